"""rollout(): what is sampled and what is not, its log-probabilities, and how one agent's answers reach another."""

import copy
import json
import shutil
import warnings
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

import hacpo_kit as hk
from hacpo_kit.models.engines import transformers as engine
from hacpo_kit.models.engines.base import until_end
from hacpo_kit.models.passes import align, microbatches
from hacpo_kit.models.sources import data_folder
from hacpo_kit.records import disputed
from hacpo_kit.rollouts import score

QUIET = {"progress": False}


def tokens(pool):
    return [r.token_ids for r in pool]


def paid(pool, rewards=None):
    """The pool with rewards given by hand: 1, 0, 1, 0, … where nothing else is said."""
    rewards = [float(i % 2 == 0) for i in range(len(pool))] if rewards is None else rewards
    return pool.with_rewards(rewards, ["unscorable" if r is None else "correct" if r else "wrong" for r in rewards])


def seen_by(agent, pool, **options):
    """The learner's batch of a pool."""
    pool = pool if pool.rollouts[0].status != "unscored" else paid(pool)
    return hk.advantage(pool, agent, hk.Capability().observe(pool), hk.Config(**options))


def in_pool_order(batch, values):
    """Values of a batch, by position in the pool: the order of a batch is no business of these tests."""
    return dict(sorted(zip(batch.index, values, strict=True)))


def responses(batch):
    """Position in the pool → response in the learner's tokens."""
    return in_pool_order(batch, batch.response_ids)


def source_means(batch):
    """Position in the pool → the source's mean log-probability."""
    return in_pool_order(batch, batch.source_mean_logp.tolist())


def peer(batch):
    """The responses of a batch that another agent wrote, in the order of the pool."""
    own = in_pool_order(batch, batch.own.tolist())
    return [ids for i, ids in responses(batch).items() if not own[i]]


def reference_logprobs(agent, prompt, response, temperature=1.0):
    """The definition in float64: one row, no padding, no cut logits, the model as transformers has it."""
    model = copy.deepcopy(agent.model).double()
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0] / temperature
    return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).squeeze(1)


# ── what ends an answer ──────────────────────────────────────────────────────────────────────────────────────────


def generates(monkeypatch, *answers):
    """Lets the engine draw these rows, one for each prompt."""
    columns = iter(torch.tensor(answers).T)
    monkeypatch.setattr(engine, "LEAVE", 2)  # nobody leaves the batch: the rows stay those of the prompts
    monkeypatch.setattr(engine, "_draw", lambda logits, *_: (next(columns), torch.zeros(len(logits))))


def test_padding_with_the_end_token_leaves_one_end_token(tiny_agent, monkeypatch):
    agent = tiny_agent()
    end = agent.tokenizer.eos_token_id
    assert agent.pad_id == end
    generates(monkeypatch, [5, 7, end, end, end], [5, 7, 9, 11, end], [5, 7, 9, 11, 13])
    answers = engine.sample(agent, [(1,)] * 3, temperature=1.0, max_new_tokens=5, seed=0)
    assert [a[:2] for a in answers] == [((5, 7, end), True), ((5, 7, 9, 11, end), True), ((5, 7, 9, 11, 13), False)]
    _, attention, mask = align([(1,)] * 3, [a.ids for a in answers], agent.pad_id)
    assert mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5, [True] * 5]
    assert attention[:, 1:].bool().equal(mask)


def test_masks_come_from_lengths_and_not_from_ids():
    pad = 7
    ids, attention, mask = align([(pad,), (1, pad, 2)], [(pad, 3, pad), (pad,)], pad)
    assert ids.tolist() == [[pad, pad, pad, pad, 3, pad], [1, pad, 2, pad, pad, pad]]
    assert attention.tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]


def test_any_of_several_end_tokens_ends(qwen, monkeypatch):
    im_end, end_of_text = qwen.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert qwen.end_ids == {im_end, end_of_text}
    generates(monkeypatch, [60, im_end, end_of_text], [60, end_of_text, 61], [60, 61, 62])
    answers = engine.sample(qwen, [(1,)] * 3, temperature=1.0, max_new_tokens=3, seed=0)
    assert [a[:2] for a in answers] == [((60, im_end), True), ((60, end_of_text), True), ((60, 61, 62), False)]


def test_sampling_stops_at_either_end_token(qwen, problems):
    """Bias the second end token up, so that the model itself writes it."""
    end_of_text = qwen.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    forward, calls = qwen.model.forward, []

    def eager_to_end(*args, **kwargs):
        calls.append(1)
        out = forward(*args, **kwargs)
        out.logits[..., end_of_text] += 30.0
        return out

    qwen.model.forward = eager_to_end
    pool = hk.rollout(qwen, problems[:2], n=2, **QUIET)
    assert {r.token_ids for r in pool} == {(end_of_text,)} and all(r.ended for r in pool)
    assert len(calls) < 4  # and not a call for each of 32 tokens


@pytest.mark.parametrize("name", ["qwen3-sums", "llama-differences"])
def test_greedy_answers_are_those_of_generate_whoever_leaves_the_batch(name, monkeypatch):
    agent = hk.load_agent(name)
    prompts = [agent.encode_prompt(p.prompt) for p in hk.load_problems("arithmetic", size=12)]
    prompts = [*prompts, prompts[0], *prompts[3:5]]  # of several lengths, some more than once
    width = max(map(len, prompts))
    ids = torch.tensor([[agent.pad_id] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        out = agent.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    written = [until_end(row, agent.end_ids) for row in out[:, width:].tolist()]
    assert len({len(a.ids) for a in written}) > 2  # so that some leave while others write
    for leave in (1e-9, engine.LEAVE, 2):
        monkeypatch.setattr(engine, "LEAVE", leave)
        answers = engine.sample(agent, prompts, temperature=0, max_new_tokens=24, seed=0)
        assert [a[:2] for a in answers] == [a[:2] for a in written]
        assert all(len(a.logps) == len(a.ids) for a in answers)


def test_an_agent_in_float64_samples_and_is_scored_by_its_own_passes(qwen, problems):
    expected = hk.rollout(qwen, problems[:2], n=4, **QUIET)
    qwen.model.double()
    pool = hk.rollout(qwen, problems[:2], n=4, **QUIET)
    assert tokens(pool) == tokens(expected) and {r.logps.dtype for r in pool} == {np.dtype("float64")}


def test_a_prompt_asked_often_is_read_once(qwen, problems, monkeypatch):
    read = []
    forward = qwen.model.forward
    monkeypatch.setattr(
        qwen.model,
        "forward",
        lambda *args, **kwargs: read.append(tuple(kwargs["input_ids"].shape)) or forward(*args, **kwargs),
    )
    prompts = [qwen.encode_prompt(p.prompt) for p in problems[:3] for _ in range(5)]
    engine.sample(qwen, prompts, temperature=1.0, max_new_tokens=2, seed=0)
    assert read[0][0] == 3 and read[1] == (15, 1)


def test_equal_rollouts_are_computed_once_and_each_counts_in_the_gradient(qwen, monkeypatch):
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


def test_log_probs_of_the_engine_stand_where_some_of_them_are_looked_at_and_agree(qwen, problems, monkeypatch):
    counted = []
    logprobs = qwen.logprobs
    monkeypatch.setattr(
        qwen,
        "logprobs",
        lambda prompts, *args, **kwargs: counted.append(len(prompts)) or logprobs(prompts, *args, **kwargs),
    )
    how = {"n": 8, "temperature": 0.7, "seed": 1, **QUIET}
    pool = hk.rollout(qwen, problems[:8], **how)
    assert sum(counted) == 4  # of 64
    expected = score(qwen, pool.rollouts, temperature=0.7)
    for r, e in zip(pool, expected, strict=True):
        assert r.logps.dtype == e.logps.dtype and np.abs(r.logps - e.logps).max() < 2e-5 and r.engine_logps is None
    # an engine that is off by more than rounding is not believed
    draw = engine._draw
    monkeypatch.setattr(engine, "_draw", lambda *args: (lambda token, logp: (token, logp + 3e-5))(*draw(*args)))
    again = hk.rollout(qwen, problems[:8], **how)
    assert tokens(again) == tokens(pool)
    assert all(np.array_equal(r.logps, e.logps) for r, e in zip(again, expected, strict=True))


def test_an_answer_cut_at_the_limit_gets_no_end_token(llama, problems, write):
    write(llama, [[20, 21, 22, 23]])
    with pytest.warns(UserWarning, match="cut"):
        pool = hk.rollout(llama, problems[:1], n=2, max_new_tokens=3, **QUIET)
    assert tokens(pool) == [(20, 21, 22)] * 2
    assert not any(r.ended for r in pool) and all(len(r.logps) == 3 for r in pool)


def test_when_every_answer_is_too_long_there_is_a_warning_with_the_share_and_no_reward(qwen, problems, say):
    say(qwen, ["7+8=15;3+5+1=9;"])
    with pytest.warns(UserWarning, match="100% .*qwen3-sums.*6 tokens"):
        pool = hk.rollout(qwen, problems[:2], n=4, max_new_tokens=6, **QUIET)
    pool = hk.reward(pool)
    assert {(r.reward, r.status) for r in pool} == {(0.0, "no_answer")}
    assert pool.metrics("qwen3-sums")["share_cut"] == 1.0


def test_a_few_cut_answers_are_counted_without_a_warning(qwen, problems, say):
    say(qwen, [r"\boxed{1}"] * 7 + ["1" * 40])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool = hk.rollout(qwen, problems[:2], n=4, **QUIET)
    assert pool.metrics("qwen3-sums")["share_cut"] == 1 / 8


# ── what may be asked ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, r"temperature=0.*evaluate\(temperature=0\)"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.9}, "top_p=0.9.*full distribution"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": 20}, "top_k=20.*full distribution"),
        ({"n": 0}, "n=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"batch_size": -1}, "batch_size=-1"),
    ],
)
def test_what_cannot_be_scored_or_done_is_refused(tiny_agent, problems, options, message):
    with pytest.raises(ValueError, match=message):
        hk.rollout(tiny_agent(), problems[:1], **{"n": 2, **QUIET, **options})


def test_nothing_to_do_is_refused(tiny_agent, problems):
    for agents, asked in (([], problems[:1]), (tiny_agent(), [])):
        with pytest.raises(ValueError, match="need agents, problems and n ≥ 1"):
            hk.rollout(agents, asked, **QUIET)


def test_two_agents_or_problems_with_one_name_are_refused(tiny_agent, problems):
    with pytest.raises(ValueError, match="agents with the same name: 'tiny'"):
        hk.rollout([tiny_agent(), tiny_agent(seed=1)], problems[:1], **QUIET)
    with pytest.raises(ValueError, match=f"problems with the same name: '{problems[0].id}'"):
        hk.rollout(tiny_agent(), [problems[0], problems[1], problems[0]], **QUIET)


def test_a_prompt_that_leaves_no_room_for_the_answer_is_refused_by_name(tiny_agent, problems):
    prompt = len(tiny_agent().encode_prompt(problems[0].prompt))
    with pytest.warns(UserWarning, match="cut"):
        fits = hk.rollout(tiny_agent(positions=prompt + 4), problems[:1], n=1, max_new_tokens=4, **QUIET)
    assert len(fits.rollouts[0].token_ids) == 4
    with pytest.raises(ValueError, match=rf"problem '{problems[0].id}': {prompt} prompt tokens.*agent 'tiny'"):
        hk.rollout(tiny_agent(positions=prompt + 3), problems[:1], n=1, max_new_tokens=4, **QUIET)


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_pool_holds_every_agent_problem_and_sample_in_order(pair, uneven):
    pool = hk.rollout(pair, uneven, n=3, batch_size=4, **QUIET)
    wanted = [(a.name, p.id, k) for a in pair for p in uneven for k in range(3)]
    assert [(r.source, r.problem, r.sample) for r in pool] == wanted
    assert (pool.agents, pool.n, pool.temperature) == (("qwen3-sums", "llama-differences"), 3, 1.0)
    assert all(
        r.prompt_ids == a.encode_prompt(pool.problem(r.problem).prompt) for a in pair for r in pool.by_source[a.name]
    )
    assert pool.seconds["seconds_rollout"] > 0 and pool.seconds["seconds_scoring"] > 0
    pool.check_complete()


def test_the_same_seed_gives_the_same_answers_and_another_does_not(llama, problems):
    first, again, other = (hk.rollout(llama, problems[:4], n=4, seed=seed, **QUIET) for seed in (3, 3, 4))
    assert tokens(first) == tokens(again) and all(map(np.array_equal, *([r.logps for r in p] for p in (first, again))))
    assert tokens(first) != tokens(other)
    llama.updates = 1  # the next step draws anew
    assert tokens(first) != tokens(hk.rollout(llama, problems[:4], n=4, seed=3, **QUIET))


def test_sampling_neither_reads_nor_moves_the_global_random_state(llama, problems):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = hk.rollout(llama, problems[:2], n=2, **QUIET)
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(2)
    assert tokens(hk.rollout(llama, problems[:2], n=2, **QUIET)) == tokens(first)


def test_eight_answers_of_a_model_that_knows_nothing_are_eight_different_texts(tiny_agent, problems):
    with pytest.warns(UserWarning, match="cut"):
        pool = hk.rollout(tiny_agent(), problems[:3], n=8, max_new_tokens=8, **QUIET)
    assert pool.distinct()["texts"].tolist() == [8, 8, 8]


def test_batches_draw_each_their_own_answers(tiny_agent, problems):
    """One seed for every batch would repeat the first answers in the second."""
    with pytest.warns(UserWarning, match="cut"):
        pool = hk.rollout(tiny_agent(), problems[:1], n=8, max_new_tokens=8, batch_size=2, **QUIET)
    assert pool.distinct()["texts"].tolist() == [8]


@pytest.mark.parametrize("do_sample", [None, True])
def test_stored_sampling_defaults_do_not_leak(llama, problems, tmp_path, do_sample):
    folder = tmp_path / "llama-differences"
    shutil.copytree(data_folder() / "agents" / "llama-differences", folder)
    path = folder / "generation_config.json"
    defaults = {"repetition_penalty": 5.0, "temperature": 0.1, "top_k": 1, "min_p": 0.9, "top_p": 0.1}
    defaults |= {
        "no_repeat_ngram_size": 1,
        "min_new_tokens": 20,
        "suppress_tokens": [16, 17, 18],
        "do_sample": do_sample,
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **defaults}))
    spoiled = hk.load_agent(folder, device="cpu")
    clean, same = (hk.rollout(a, problems[:4], n=4, **QUIET) for a in (llama, spoiled))
    assert tokens(clean) == tokens(same)
    assert [r.logps.tolist() for r in clean] == [r.logps.tolist() for r in same]
    greedy = [hk.evaluate(a, problems[:4], progress=False).answers for a in (llama, spoiled)]
    assert tokens(greedy[0]) == tokens(greedy[1])


def test_sampling_defaults_set_after_loading_do_not_leak(fresh_agent, problems):
    clean, spoiled = fresh_agent("llama-differences"), fresh_agent("llama-differences")
    spoiled.model.generation_config = GenerationConfig(min_p=0.9, suppress_tokens=[16, 17], forced_eos_token_id=5)
    assert tokens(hk.rollout(clean, problems[:4], n=4, **QUIET)) == tokens(
        hk.rollout(spoiled, problems[:4], n=4, **QUIET)
    )


# ── log-probabilities ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_the_plain_model_in_float64(pair, uneven, temperature):
    pool = hk.rollout(pair, uneven, n=2, temperature=temperature, **QUIET)
    by_name = {a.name: a for a in pair}
    assert len({len(r.prompt_ids) for r in pool}) > 2 and len({len(r.token_ids) for r in pool}) > 2
    for r in pool:
        expected = reference_logprobs(by_name[r.source], r.prompt_ids, r.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(r.logps).double(), expected, rtol=1e-4, atol=1e-5)


def test_sampled_tokens_are_as_frequent_as_their_scored_probability_at_t_06(llama, problems):
    """2000 first tokens against exp(log-prob): a sampler and a scorer of different temperature would not agree."""
    problem, n = problems[0], 2000
    with pytest.warns(UserWarning, match="cut"):
        pool = hk.rollout(llama, [problem], n=n, temperature=0.6, max_new_tokens=1, **QUIET)
    probability = {r.token_ids[0]: float(np.exp(r.logps[0])) for r in pool}
    first = [r.token_ids[0] for r in pool]
    assert 2 <= len(probability) < n
    for token, p in probability.items():
        assert abs(first.count(token) / n - p) < 4 * (p * (1 - p) / n) ** 0.5 + 1 / n


def test_a_row_alone_and_in_a_batch_agree_and_every_column_is_finite(pair, tiny_agent, uneven):
    for agent in (*pair, tiny_agent(absolute=True)):
        prompts = [agent.encode_prompt(p.prompt) for p in uneven]
        responses = [(20, 21), (30,), (40, 41, 42, 43, 44, 45)]
        together, mask = agent.logprobs(prompts, responses, temperature=0.6)
        assert together.isfinite().all() and len(set(map(len, prompts))) == 3
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            alone, _ = agent.logprobs([prompt], [response], temperature=0.6)
            torch.testing.assert_close(together[row][mask[row]], alone[0], rtol=1e-4, atol=1e-5)


def test_padding_changes_no_gradient(llama, uneven):
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


def test_the_padding_token_is_never_read(llama, uneven):
    prompts = [llama.encode_prompt(p.prompt) for p in uneven]
    responses = [(20, 21), (30,), (40, 41, 42)]
    values = []
    for pad in ("<pad>", "5"):
        llama.tokenizer.pad_token = pad
        logps, mask = llama.logprobs(prompts, responses)
        values.append(logps[mask])
    assert values[0].equal(values[1])


def test_greedy_answers_alone_and_in_a_left_padded_batch_are_the_same(qwen, tiny_agent, uneven):
    for agent in (qwen, tiny_agent(absolute=True)):
        prompts = [agent.encode_prompt(p.prompt) for p in uneven]
        settings = {"temperature": 0.0, "max_new_tokens": 24, "seed": 0}
        together = engine.sample(agent, prompts, **settings)
        alone = [engine.sample(agent, [p], **settings)[0] for p in prompts]
        assert [a[:2] for a in together] == [a[:2] for a in alone]


def test_micro_batches_do_not_change_the_scores(qwen, problems):
    pool = hk.rollout(qwen, problems[:3], n=3, **QUIET)
    small = score(qwen, pool.rollouts, temperature=1.0, tokens=1)
    for a, b in zip(pool, small, strict=True):
        np.testing.assert_allclose(a.logps, b.logps, rtol=1e-4, atol=1e-5)


def test_a_model_that_gives_nan_is_named_with_its_rollouts(tiny_agent, problems, write):
    agent = tiny_agent()
    write(agent, [[20, 21, agent.tokenizer.eos_token_id]])
    agent.model.lm_head.weight.data[21] = float("nan")
    with pytest.raises(
        FloatingPointError, match=f"agent 'tiny'.*2 rollouts are not finite .{problems[0].id} by tiny #0"
    ):
        hk.rollout(agent, problems[:1], n=2, **QUIET)


ROW = st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 3))  # lengths, and the token it consists of


@settings(max_examples=100, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=40), st.integers(1, 120))
def test_micro_batches_hold_every_row_once_and_are_padded_within_the_budget(rows, budget):
    prompts, responses = [[t] * p for p, _, t in rows], [[t] * r for _, r, t in rows]
    groups = list(microbatches(prompts, responses, budget))
    assert sorted(i for g in groups for i in g) == list(range(len(rows)))
    for g in groups:
        different = [rows.index(row) for row in {rows[i] for i in g}]
        ids, *_ = align([prompts[i] for i in different], [responses[i] for i in different], 0)
        assert len(different) == 1 or ids.numel() <= budget
    assert len({(n, rows[i]) for n, g in enumerate(groups) for i in g}) == len(set(rows))  # equal ones are in one group


# ── from one tokenizer to another ────────────────────────────────────────────────────────────────────────────────

AWKWARD = [
    "x != y and a.b == c",
    "hello !",
    "for 'manual'",
    " leading and trailing ",
    "a  b\n\n c\t.",
    "∀x∈ℝ: 🙂",
    "e\u0301 é",
    "\r\n\u00a0\u200b",
    r"7+8=15;\boxed{95}",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_peer_text_goes_into_the_other_tokenizer_and_back(pair, problems, text):
    for agent in pair:
        prompt, ids = agent.view(problems[0], text, ended=True)
        assert prompt == agent.encode_prompt(problems[0].prompt)
        assert ids[-1] == agent.tokenizer.eos_token_id and agent.decode(ids[:-1]) == text


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_any_text_survives_the_exchange(text):
    problem = hk.Problem("p", "1+1=", "2")
    for agent in _both():
        assert agent.decode(agent.view(problem, text, ended=False)[1]) == text


@cache
def _both():
    return hk.load_agents("tiny-model-pair", device="cpu")  # once: views change nothing


FORCED = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}


@pytest.mark.parametrize("text", ["x != y and a.b == c", "hello !", "for 'manual'"])
def test_no_clean_up_of_spaces_even_where_the_tokenizer_asks_for_it(tiny_agent, tokenizers, text):
    agent = tiny_agent(tokenizers.bytes(clean_up_tokenization_spaces=True, **FORCED))
    assert agent.tokenizer.decode(agent.tokenizer(text)["input_ids"]) != text  # or the test shows nothing
    assert agent.decode(agent.tokenizer(text)["input_ids"]) == text


def test_own_rollouts_keep_the_sampled_ids_and_only_peer_text_is_re_encoded(tiny_agent, tokenizers, problems, write):
    merges = ["he", "ll", ("ll", "o"), ("he", "llo")]
    author = tiny_agent(tokenizers.bytes(merges=merges), name="author")
    reader = tiny_agent(tokenizers.bytes(merges=merges), name="reader", seed=1)
    he, llo, hello, end = author.tokenizer.convert_tokens_to_ids(["he", "llo", "hello", "<end>"])
    assert author.tokenizer("hello")["input_ids"] == [hello]
    write(author, [[he, llo, end]])
    write(reader, [[hello, end]])
    pool = hk.rollout([author, reader], problems[:1], n=2, **QUIET)
    own, others = seen_by(author, pool), seen_by(reader, pool)
    assert [r.text for r in pool] == ["hello"] * 4
    assert list(responses(own).values()) == [(he, llo, end)] * 2 + [(hello, end)] * 2
    assert list(responses(others).values()) == [(hello, end)] * 4
    # the author's mean is over its three tokens, though the reader counts two
    assert len(pool.rollouts[0].logps) == 3
    assert source_means(others)[0] == pytest.approx(pool.rollouts[0].logps.mean())


def test_the_same_peer_answer_to_a_problem_is_read_once_and_the_prompt_not_again(pair, problems, say, monkeypatch):
    qwen, llama = pair
    say(qwen, [r"\boxed{2}", r"\boxed{2}", r"\boxed{3}"])
    say(llama, [r"\boxed{4}"])
    pool = hk.rollout(pair, problems[:2], n=3, **QUIET)
    whole, view, read = seen_by(llama, pool), llama.view, []
    monkeypatch.setattr(
        llama, "view", lambda problem, text, **how: read.append((problem.id, text)) or view(problem, text, **how)
    )
    monkeypatch.setattr(llama, "encode_prompt", lambda prompt: pytest.fail("its own rollouts have the prompt's tokens"))
    batch = seen_by(llama, pool)
    assert sorted(read) == sorted((p.id, text) for p in problems[:2] for text in (r"\boxed{2}", r"\boxed{3}"))
    assert batch.response_ids == whole.response_ids and batch.prompt_ids == whole.prompt_ids and len(batch) == 12


def spoiled(agent, what):
    encode = agent.tokenizer
    return {
        "half an emoji": [*encode("ok 🙂", add_special_tokens=False)["input_ids"][:-2]],
        "half a sign": [*encode("∀", add_special_tokens=False)["input_ids"][:-1], 20],
        "a control token": [20, encode.pad_token_id, 21],
        "an id without a token": [20, len(encode), 21],
    }[what]


@pytest.mark.parametrize(
    ("what", "hazard"),
    [
        ("half an emoji", "lossy_text"),
        ("half a sign", "lossy_text"),
        ("a control token", "control_token"),
        ("an id without a token", "lossy_text"),
    ],
)
def test_what_text_cannot_carry_is_marked_and_not_exchanged(tiny_agent, tokenizers, problems, write, say, what, hazard):
    author = tiny_agent(tokenizers.bytes(specials=("<end>", "<pad>"), pad_token="<pad>"), name="author", extra=8)
    reader = tiny_agent(name="reader", seed=1)
    end = author.tokenizer.eos_token_id
    write(author, [[*spoiled(author, what), end], [20, end]])
    say(reader, ["1"])
    pool = hk.rollout([author, reader], problems[:1], n=2, **QUIET)
    assert [r.hazard for r in pool] == [hazard, "", "", ""]
    assert pool.metrics("author")["share_hazard"] == 0.5
    own, others = seen_by(author, pool), seen_by(reader, pool)
    assert responses(own)[0] == (*spoiled(author, what), end) and own.excluded == {}
    assert others.excluded == {hazard: 1} and set(others.index) == {1, 2, 3}


def test_a_special_token_without_a_role_is_a_control_token_too(tiny_agent, tokenizers, problems, write, say):
    author = tiny_agent(tokenizers.bytes(unnamed=["<|start_header_id|>"]), name="author")
    reader = tiny_agent(name="reader", seed=1)
    header, end = author.tokenizer.convert_tokens_to_ids(["<|start_header_id|>", "<end>"])
    assert header not in author.tokenizer.all_special_ids  # or the test shows nothing
    write(author, [[20, header, end], [20, end]])
    say(reader, ["<|start_header_id|>", "fine"])
    pool = hk.rollout([author, reader], problems[:1], n=2, **QUIET)
    assert [r.hazard for r in pool] == ["control_token", "", "", ""]
    assert seen_by(reader, pool).excluded == {"control_token": 1}
    assert seen_by(author, pool).excluded == {"control_token": 1}


def test_text_that_would_become_a_control_token_of_the_learner_is_excluded_and_counted(pair, problems, say):
    qwen, llama = pair
    say(llama, [r"<|im_end|>\boxed{1}", r"\boxed{1}"])
    say(qwen, [r"\boxed{2}"])
    pool = hk.rollout(pair, problems[:1], n=2, **QUIET)
    assert [r.hazard for r in pool] == [""] * 4  # for its author it is plain text
    assert seen_by(qwen, pool).excluded == {"control_token": 1}
    assert seen_by(llama, pool).excluded == {}


def test_text_with_an_unknown_word_is_excluded_of_that_learner_alone(tiny_agent, tokenizers, say):
    problem = hk.Problem("p", "one two", "3")
    reader = tiny_agent(tokenizers.words(["one", "two", " "]), name="reader")
    author = tiny_agent(name="author", seed=1)
    say(author, ["one two", "one three", "one <unk>"])
    say(reader, ["one"])
    pool = hk.rollout([reader, author], [problem], n=3, **QUIET)
    batch = seen_by(reader, pool)
    assert batch.excluded == {"lossy_reencoding": 1, "control_token": 1}
    one, two, space, end = reader.tokenizer.convert_tokens_to_ids(["one", "two", " ", "<end>"])
    assert peer(batch) == [(one, space, two, end)]
    assert seen_by(author, pool).excluded == {}


def test_a_reply_that_is_only_the_end_token_stays_one_action(pair, problems, write):
    llama = pair[1]
    for agent in pair:
        write(agent, [[agent.tokenizer.eos_token_id]])
    pool = hk.rollout(pair, problems[:1], n=2, **QUIET)
    assert [(r.text, len(r.token_ids), r.hazard) for r in pool] == [("", 1, "")] * 4
    batch = seen_by(llama, pool)
    assert peer(batch) == [(llama.tokenizer.eos_token_id,)] * 2 and batch.excluded == {}
    assert source_means(batch)[0] == pytest.approx(pool.rollouts[0].logps[0])
    # without end tokens nothing is left to compare, but own answers still count it
    batch = seen_by(llama, pool, count_eos=False)
    assert (
        batch.excluded == {"empty": 2}
        and batch.own.all()
        and batch.response_ids == ((llama.tokenizer.eos_token_id,),) * 2
    )
    assert batch.source_mean_logp.isfinite().all()


@pytest.mark.parametrize("count_eos", [True, False])
def test_the_end_token_counts_on_both_sides_or_on_neither(pair, problems, write, count_eos):
    qwen, llama = pair
    end_of_text = qwen.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    write(qwen, [[20, 21, end_of_text], [20, 21, 22, 23]])  # the second is cut at four tokens
    write(llama, [[30, 31, llama.tokenizer.eos_token_id]])
    with pytest.warns(UserWarning, match="50%"):
        pool = hk.rollout(pair, problems[:1], n=2, max_new_tokens=4, **QUIET)
    ended, cut = pool.rollouts[:2]
    assert (ended.ended, cut.ended) == (True, False)
    batch = seen_by(llama, pool, count_eos=count_eos)
    text = llama.tokenizer(qwen.decode([20, 21]), add_special_tokens=False)["input_ids"]
    assert peer(batch)[0] == (*text, *([llama.tokenizer.eos_token_id] if count_eos else []))
    assert llama.decode(peer(batch)[1]) == qwen.decode([20, 21, 22, 23])  # never an end token
    counted = ended.logps if count_eos else ended.logps[:2]
    expected = [counted.mean(), cut.logps.mean(), *[pool.rollouts[2].logps.mean()] * 2]
    assert list(source_means(batch).values()) == pytest.approx(expected)
    own = (30, 31, llama.tokenizer.eos_token_id)
    assert (responses(batch)[2], responses(batch)[3]) == (own, own)  # as sampled, either way


def test_a_peer_reply_too_long_for_the_learner_is_dropped_and_counted_never_cut(tiny_agent, qwen, problems, say):
    problem = problems[0]
    room = len(tiny_agent().encode_prompt(problem.prompt)) + 8
    reader = tiny_agent(name="reader", positions=room)
    say(qwen, ["1" * 7, "1" * 8, "1" * 20])
    say(reader, ["2"])
    pool = hk.rollout([reader], [problem], n=3, max_new_tokens=8, **QUIET)
    wide = hk.rollout([qwen], [problem], n=3, **QUIET)
    both = hk.Pool((*pool, *wide), (problem,), ("reader", "qwen3-sums"), 3)
    batch = seen_by(reader, both)
    assert batch.excluded == {"too_long": 2}
    assert peer(batch) == [(*reader.tokenizer("1" * 7)["input_ids"], reader.tokenizer.eos_token_id)]
    assert len(in_pool_order(batch, batch.prompt_ids)[3]) + len(peer(batch)[0]) == room


def test_unscorable_rollouts_are_excluded_for_every_learner_and_counted(pair, problems, say):
    for agent in pair:
        say(agent, [r"\boxed{1}"])
    pool = hk.rollout(pair, problems[:1], n=2, **QUIET)
    pool = paid(pool, [1.0, None, 0.0, 1.0])
    for agent in pair:
        batch = seen_by(agent, pool)
        assert batch.excluded == {"unscorable": 1} and set(batch.index) == {0, 2, 3}
        assert batch.advantages.isfinite().all()
    alone = seen_by(pair[0], pool, sources="own")
    assert alone.excluded == {"unscorable": 1} and alone.index == (0,)


def test_the_first_ratio_of_own_rollouts_is_one_at_t_06_and_that_of_peer_ones_is_not(pair, problems):
    pool = hk.rollout(pair, problems[:4], n=4, temperature=0.6, **QUIET)
    batch = seen_by(pair[0], pool, temperature=0.6)
    with torch.no_grad():
        logps, mask = pair[0].logprobs(batch.prompt_ids, batch.response_ids, temperature=0.6)
    ratio = ((logps * mask).sum(-1) / mask.sum(-1) - batch.source_mean_logp).exp()
    torch.testing.assert_close(ratio[batch.own], torch.ones(int(batch.own.sum())), rtol=1e-4, atol=1e-5)
    assert (ratio[~batch.own] - 1).abs().max() > 0.01


# ── the pool ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def pool(pair, problems, say):
    """Two problems, two agents, two answers each."""
    say(pair[0], [r"\boxed{1}", r"1+0=1;\boxed{1}", "no box", "none"])
    say(pair[1], [r"\boxed{3}"])
    return hk.rollout(pair, problems[:2], n=2, **QUIET)


def test_a_missing_or_surplus_rollout_is_named_with_problem_and_agent(pool, pair):
    first = pool.problems[0].id
    short = hk.Pool(pool.rollouts[1:], pool.problems, pool.agents, 2)
    with pytest.raises(ValueError, match=f"problem '{first}' has 1 rollouts of agent 'qwen3-sums', need 2"):
        short.check_complete()
    with pytest.raises(ValueError, match=f"problem '{first}' has 1 rollouts of agent 'qwen3-sums'"):
        seen_by(pair[1], short)
    surplus = hk.Pool((*pool, pool.rollouts[-1]), pool.problems, pool.agents, 2)
    with pytest.raises(
        ValueError, match=f"'{pool.problems[1].id}' has 3 rollouts of agent 'llama-differences', need 2"
    ):
        surplus.check_complete()
    absent = hk.Pool(tuple(pool.by_source["qwen3-sums"]), pool.problems, pool.agents, 2)
    with pytest.raises(ValueError, match="has 0 rollouts of agent 'llama-differences'"):
        absent.check_complete()
    pool.check_complete()


def test_distinct_counts_texts_and_boxed_answers(pool):
    table = pool.distinct().set_index("source")
    assert table.loc["qwen3-sums", "texts"].tolist() == [2, 2]
    assert table.loc["qwen3-sums", "answers"].tolist() == [1, 1]  # one box twice; two texts without a box
    assert table.loc["llama-differences", "texts"].tolist() == [1, 1]
    assert table["rollouts"].tolist() == [2] * 4
    for source in pool.agents:
        assert paid(pool).metrics(source)["distinct_answers"] == table.loc[source, "answers"].mean()


def test_an_agent_that_wrote_nothing_and_a_pool_without_rewards_are_refused(pool, tiny_agent):
    with pytest.raises(ValueError, match="no rewards yet"):
        hk.advantage(pool, tiny_agent(), hk.Capability(), hk.Config())
    with pytest.raises(ValueError, match=r"agent 'tiny'.*'qwen3-sums'"):
        seen_by(tiny_agent(), paid(pool))


def test_rewards_of_another_number_are_refused(pool):
    with pytest.raises(ValueError, match="8 rollouts, 1 rewards, 8 statuses"):
        pool.with_rewards([1.0], ["correct"] * 8)


def test_the_frame_has_one_row_a_rollout_and_the_metrics_leave_unscorable_ones_out(pool):
    scored = paid(pool, [1.0, None, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    frame = scored.to_frame()
    assert len(frame) == 8 and frame["mean_logp"].notna().all()
    assert frame["length"].tolist() == [len(r.token_ids) for r in pool] and pool.tokens == frame["length"].sum()
    assert frame["prompt"].tolist() == [pool.problem(r.problem).prompt for r in pool]
    metrics = scored.metrics("qwen3-sums")
    assert metrics["reward"] == pytest.approx(1 / 3) and metrics["status_unscorable"] == 0.25
    assert metrics["equal_reward_prompts"] == 1.0 and scored.metrics("llama-differences")["equal_reward_prompts"] == 0.5
    assert scored.restricted_to("llama-differences").agents == ("llama-differences",)
    assert len(scored.restricted_to("llama-differences")) == 4


def test_the_second_opinion_is_counted(pool):
    texts = [r"\boxed{2}", r"\boxed{2.0}", r"\boxed{3}", "2"]
    golds = [pool.problem(r.problem).gold for r in pool.by_source["qwen3-sums"]]
    rollouts = [
        replace(r, text=t.replace("2", g)) for r, t, g in zip(pool.by_source["qwen3-sums"], texts, golds, strict=True)
    ]
    own = hk.reward(replace(pool.restricted_to("qwen3-sums"), rollouts=tuple(rollouts)))
    assert [r.status for r in own] == ["correct", "correct", "wrong", "no_answer"]
    assert [disputed(r.text, g, r.status) for r, g in zip(own, golds, strict=True)] == [False, True, False, False]
    assert own.metrics("qwen3-sums")["share_disputed"] == 0.25
    unpaid = own.with_rewards([0.0] * 4, ["wrong"] * 4)
    assert unpaid.metrics("qwen3-sums")["share_disputed"] == 0.25  # the first: the texts are equal
    assert pool.metrics("qwen3-sums")["share_disputed"] == 0  # nothing is scored yet


def test_sampled_tokens_follow_the_model_s_distribution(qwen):
    """First tokens of many answers to one prompt against softmax(logits / T): a chi-square test at 10⁻⁴."""
    from scipy.stats import chisquare

    from hacpo_kit.models.engines import transformers as engine

    prompt, count, temperature = qwen.encode_prompt("37+58="), 4000, 1.7
    answers = engine.sample(qwen, [prompt] * count, temperature=temperature, max_new_tokens=1, seed=3)
    with torch.no_grad():
        logits = qwen.model(torch.tensor([prompt])).logits[0, -1].double()
    expected = (logits / temperature).softmax(-1).numpy() * count
    seen = np.bincount([a.ids[0] for a in answers], minlength=len(expected))
    often = expected >= 5  # the rest together, as the test asks
    groups = [np.append(v[often], v[~often].sum()) for v in (seen, expected)]
    assert often.sum() > 5
    assert chisquare(*groups).pvalue > 1e-4
