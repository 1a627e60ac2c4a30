"""Padding, micro-batches and log-probabilities of tokens."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hacpo_kit.models.passes import align, microbatches

QUIET = {"progress": False}


ROW = st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 3))  # lengths, and the token it consists of


def test_align_derives_masks_from_lengths():
    pad = 7
    ids, attention, mask = align([(pad,), (1, pad, 2)], [(pad, 3, pad), (pad,)], pad)
    assert ids.tolist() == [[pad, pad, pad, pad, 3, pad], [1, pad, 2, pad, pad, pad]]
    assert attention.tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]


def test_logprobs_of_equal_rollouts_are_computed_once_and_each_counts_in_the_gradient(qwen, monkeypatch):
    qwen.model.double()
    prompts, responses = [(1, 2), (1, 2), (3,), (1, 2), (3,)], [(5, 6), (7,), (5, 6), (5, 6), (5, 6)]
    counts = torch.arange(1.0, 6, dtype=torch.float64)

    def gradient(rows):
        qwen.model.zero_grad()
        logp, mask = qwen.logprobs([prompts[i] for i in rows], [responses[i] for i in rows])
        ((logp * mask).sum(1) * counts[rows]).sum().backward()
        return logp.detach(), torch.cat([p.grad.flatten() for p in qwen.model.parameters() if p.grad is not None])

    alone = [gradient([i]) for i in range(5)]
    read, forward = [], qwen.model.forward
    monkeypatch.setattr(qwen.model, "forward", lambda **given: read.append(len(given["input_ids"])) or forward(**given))
    logp, together = gradient(list(range(5)))
    assert read == [3]
    for row, (one, _) in zip(logp, alone, strict=True):
        torch.testing.assert_close(row[: one.shape[1]], one[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(together, sum(g for _, g in alone), rtol=1e-4, atol=5e-5)  # log-probs are in float32


def test_logprobs_of_a_row_are_the_same_alone_and_in_a_batch(pair, tiny_agent, uneven):
    for agent in (*pair, tiny_agent(absolute=True)):
        prompts = [agent.encode_prompt(p.prompt) for p in uneven]
        responses = [(20, 21), (30,), (40, 41, 42, 43, 44, 45)]
        together, mask = agent.logprobs(prompts, responses, temperature=0.6)
        assert together.isfinite().all() and len(set(map(len, prompts))) == 3
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            alone, _ = agent.logprobs([prompt], [response], temperature=0.6)
            torch.testing.assert_close(together[row][mask[row]], alone[0], rtol=1e-4, atol=1e-5)


def test_logprobs_have_a_gradient_without_padding(llama, uneven):
    prompts, responses = [llama.encode_prompt(p.prompt) for p in uneven[:2]], [(20, 21), (30, 31, 32, 33)]

    def gradient(rows):
        llama.model.zero_grad()
        for part in rows:
            values, mask = llama.logprobs([prompts[i] for i in part], [responses[i] for i in part])
            (values * mask).sum().backward()
        return torch.cat([p.grad.flatten() for p in llama.model.parameters()])

    padded, bare = gradient([[0, 1]]), gradient([[0], [1]])
    assert bare.norm() > 1 and padded.isfinite().all()
    torch.testing.assert_close(padded, bare, rtol=1e-3, atol=1e-4)


def test_logprobs_do_not_depend_on_the_padding_token(llama, uneven):
    prompts = [llama.encode_prompt(p.prompt) for p in uneven]
    responses = [(20, 21), (30,), (40, 41, 42)]
    values = []
    for pad in ("<pad>", "5"):
        llama.tokenizer.pad_token = pad
        logps, mask = llama.logprobs(prompts, responses)
        values.append(logps[mask])
    assert values[0].equal(values[1])


@settings(max_examples=100, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=40), st.integers(1, 120))
def test_microbatches_hold_every_row_once_within_the_budget(rows, budget):
    prompts, responses = [[t] * p for p, _, t in rows], [[t] * r for _, r, t in rows]
    groups = list(microbatches(prompts, responses, budget))
    assert sorted(i for g in groups for i in g) == list(range(len(rows)))
    for g in groups:
        different = [rows.index(row) for row in {rows[i] for i in g}]
        ids, *_ = align([prompts[i] for i in different], [responses[i] for i in different], 0)
        assert len(different) == 1 or ids.numel() <= budget
    assert len({(n, rows[i]) for n, g in enumerate(groups) for i in g}) == len(set(rows))  # equal ones are in one group
