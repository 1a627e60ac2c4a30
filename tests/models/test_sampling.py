"""The default engine: distribution, order of rows, and where a response ends."""

import numpy as np
import pytest
import torch

import hacpo_kit as hk
from hacpo_kit.models.engines import transformers as engine
from hacpo_kit.models.engines.base import until_end
from hacpo_kit.models.passes import align

QUIET = {"progress": False}


def generates(monkeypatch, *answers):
    """Let the engine draw these rows, one for each prompt."""
    columns = iter(torch.tensor(answers).T)
    monkeypatch.setattr(engine, "FINISHED_SHARE", 2)  # no row leaves the batch: the rows stay those of the prompts
    monkeypatch.setattr(engine, "_draw", lambda logits, *_: (next(columns), torch.zeros(len(logits))))


def test_sample_keeps_one_end_token_where_it_is_also_the_padding(tiny_agent, monkeypatch):
    agent = tiny_agent()
    end = agent.tokenizer.eos_token_id
    assert agent.pad_id == end
    generates(monkeypatch, [5, 7, end, end, end], [5, 7, 9, 11, end], [5, 7, 9, 11, 13])
    answers = engine.sample(agent, [(1,)] * 3, temperature=1.0, max_new_tokens=5, seed=0)
    assert [a[:2] for a in answers] == [((5, 7, end), True), ((5, 7, 9, 11, end), True), ((5, 7, 9, 11, 13), False)]
    _, attention, mask = align([(1,)] * 3, [a.ids for a in answers], agent.pad_id)
    assert mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5, [True] * 5]
    assert attention[:, 1:].bool().equal(mask)


def test_sample_ends_at_any_of_several_end_tokens(qwen, monkeypatch):
    im_end, end_of_text = qwen.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert qwen.end_ids == {im_end, end_of_text}
    generates(monkeypatch, [60, im_end, end_of_text], [60, end_of_text, 61], [60, 61, 62])
    answers = engine.sample(qwen, [(1,)] * 3, temperature=1.0, max_new_tokens=3, seed=0)
    assert [a[:2] for a in answers] == [((60, im_end), True), ((60, end_of_text), True), ((60, 61, 62), False)]


@pytest.mark.parametrize("name", ["qwen3-sums", "llama-differences"])
def test_sample_is_greedy_like_generate_whenever_rows_leave_the_batch(name, monkeypatch):
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
    for leave in (1e-9, engine.FINISHED_SHARE, 2):
        monkeypatch.setattr(engine, "FINISHED_SHARE", leave)
        answers = engine.sample(agent, prompts, temperature=0, max_new_tokens=24, seed=0)
        assert [a[:2] for a in answers] == [a[:2] for a in written]
        assert all(len(a.logps) == len(a.ids) for a in answers)


def test_sample_reads_a_repeated_prompt_once(qwen, problems, monkeypatch):
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


def test_sample_is_the_same_alone_and_in_a_padded_batch(qwen, tiny_agent, uneven):
    for agent in (qwen, tiny_agent(absolute=True)):
        prompts = [agent.encode_prompt(p.prompt) for p in uneven]
        settings = {"temperature": 0.0, "max_new_tokens": 24, "seed": 0}
        together = engine.sample(agent, prompts, **settings)
        alone = [engine.sample(agent, [p], **settings)[0] for p in prompts]
        assert [a[:2] for a in together] == [a[:2] for a in alone]


def test_sample_follows_the_distribution_of_the_model(qwen):
    """First tokens of many answers to one prompt against softmax(logits / T): a chi-square test at 10⁻⁴."""
    from scipy.stats import chisquare

    from hacpo_kit.models.engines import transformers as engine

    prompt, count, temperature = qwen.encode_prompt("37+58="), 4000, 1.7
    answers = engine.sample(qwen, [prompt] * count, temperature=temperature, max_new_tokens=1, seed=3)
    with torch.no_grad():
        logits = qwen.model(torch.tensor([prompt])).logits[0, -1].double()
    expected = (logits / temperature).softmax(-1).numpy() * count
    counts = np.bincount([a.ids[0] for a in answers], minlength=len(expected))
    often = expected >= 5  # the rest together, as the test asks
    groups = [np.append(v[often], v[~often].sum()) for v in (counts, expected)]
    assert often.sum() > 5
    assert chisquare(*groups).pvalue > 1e-4
