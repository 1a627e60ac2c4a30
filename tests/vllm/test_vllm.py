"""The vLLM engine itself, on a CPU: greedy text, distributions, copies of weights, training, failures.

Engines of a process close together, so tests that restart them come last.
"""

import copy
import json
import random

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

import hacpo_kit as hk
from hacpo_kit.models.engines import transformers as reference
from hacpo_kit.models.engines import vllm as module

GREEDY = {"temperature": 0.0, "max_new_tokens": 32, "seed": 0}
CONFIG = hk.Config.preset("hacpo", prompts_per_step=8, n=4, minibatch=16)


@pytest.fixture(scope="module")
def loaded():
    """The pair, loaded once; its engines run until the end of this file."""
    agents = hk.load_agents("tiny-model-pair", device="cpu", engine="vllm")
    yield agents
    module.close_all()


@pytest.fixture
def pair(loaded):
    """The pair, whose weights are restored after each test."""
    before = [copy.deepcopy(a.model.state_dict()) for a in loaded]
    yield loaded
    for agent, state in zip(loaded, before, strict=True):
        agent.model.load_state_dict(state)
        agent.weights_version += 1
        agent.updates = agent.steps = 0
        agent.optimizer = None


@pytest.fixture(scope="module")
def test_problems():
    return hk.load_problems("arithmetic", split="test", size=40)


def prompts_of(agent, problems):
    return [agent.encode_prompt(p.prompt) for p in problems]


def disturb(agent, seed=0, scale=0.02):
    """Change the weights, as an update does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in agent.model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * scale)
    agent.weights_version += 1


def check_greedy(agent, problems, **options):
    """vLLM's greedy tokens are those of transformers, and its log-probs the trainer's."""
    prompts = prompts_of(agent, problems)
    answers = agent.engine.sample(agent, prompts, **{**GREEDY, **options})
    expected = reference.sample(agent, prompts, **{**GREEDY, **options})
    assert [(a.ids, a.ended) for a in answers] == [(a.ids, a.ended) for a in expected]
    with torch.no_grad():
        values, mask = agent.logprobs(prompts, [a.ids for a in answers])
    assert np.abs(np.concatenate([a.logps for a in answers]) - values[mask].numpy()).max() < 1e-4
    return answers


def test_vllm_greedy_text_equals_transformers_for_two_engines(pair, test_problems):
    for agent in (*pair, *pair):  # in turns: neither engine disturbs the other
        answers = check_greedy(agent, test_problems)
        assert len({a.ids for a in answers}) > 5
    assert pair[0].tokenizer.get_vocab() != pair[1].tokenizer.get_vocab()
    assert [a.engine.llm is not None for a in pair] == [True, True]


def test_vllm_marks_cut_answers_and_ends_at_each_end_token(pair, test_problems):
    qwen = pair[0]
    assert len(qwen.end_ids) == 2
    assert not any(a.ended for a in check_greedy(qwen, test_problems[:4], max_new_tokens=2))
    counts = {}
    prompts = prompts_of(qwen, test_problems) * 3
    with torch.no_grad():  # equal chances for the two end tokens: the model itself prefers one
        head = qwen.model.get_output_embeddings().weight
        first, second = sorted(qwen.end_ids)
        likely = first if any(a.ids[-1] == first for a in reference.sample(qwen, prompts, **GREEDY)) else second
        head[first if likely == second else second] = head[likely]
    qwen.weights_version += 1
    for answer in qwen.engine.sample(qwen, prompts, temperature=1.0, max_new_tokens=32, seed=0):
        inside = qwen.end_ids.intersection(answer.ids[:-1])
        assert not inside and answer.ended == (answer.ids[-1] in qwen.end_ids) and len(answer.logps) == len(answer.ids)
        counts[answer.ids[-1]] = counts.get(answer.ids[-1], 0) + 1
    assert counts[first] > 10 and counts[second] > 10


def open_question(agent, problems, temperature):
    """Return the prompt and beginning of an answer with the highest entropy of the next token."""
    prompts = prompts_of(agent, problems)
    answers = reference.sample(agent, prompts, **GREEDY)
    starts = [(*p, *a.ids[:k]) for p, a in zip(prompts, answers, strict=True) for k in range(len(a.ids))]
    return max(starts, key=lambda start: -(q := distribution(agent, start, temperature)) @ np.log(q))


def distribution(agent, start, temperature):
    """softmax(logits / T) of the next token, in float64."""
    with torch.no_grad():
        return (agent.model(torch.tensor([start])).logits[0, -1].double() / temperature).softmax(-1).numpy()


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_vllm_samples_from_softmax_of_logits_over_temperature(pair, test_problems, temperature):
    """Many first tokens behind one start, and the second tokens behind the most frequent first: chi-square at 10⁻⁴."""
    for agent in pair:
        start, count = open_question(agent, test_problems[:10], temperature), 1500
        answers = agent.engine.sample(agent, [start] * count, temperature=temperature, max_new_tokens=2, seed=5)
        first = [a.ids[0] for a in answers]
        often = max(set(first) - agent.end_ids, key=first.count)
        second = [a.ids[1] for a in answers if a.ids[0] == often]
        for before, tokens, least in ((start, first, 8), ((*start, often), second, 1)):
            expected = distribution(agent, before, temperature) * len(tokens)
            counts = np.bincount(tokens, minlength=len(expected))
            frequent = expected >= 5  # the rest together, as the test asks
            groups = [np.append(v[frequent], v[~frequent].sum()) for v in (counts, expected)]
            assert frequent.sum() >= least
            assert chisquare(*groups).pvalue > 1e-4
        # the log-probs are those at this temperature
        with torch.no_grad():
            values, mask = agent.logprobs([start] * 50, [a.ids for a in answers[:50]], temperature=temperature)
        assert np.abs(np.concatenate([a.logps for a in answers[:50]]) - values[mask].numpy()).max() < 1e-4


def test_vllm_seed_determines_the_answers_and_restores_random_generators(pair, test_problems):
    agent = pair[1]
    prompts = prompts_of(agent, test_problems[:8]) * 2
    how = {"temperature": 1.0, "max_new_tokens": 16}
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.set_num_threads  # noqa: NPY002
    once = [agent.engine.sample(agent, prompts, **how, seed=s) for s in (3, 3, 4)]
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.set_num_threads  # noqa: NPY002
    assert before[0].equal(after[0]) and before[1:] == after[1:]
    ids = [[a.ids for a in answers] for answers in once]
    assert ids[0] == ids[1] != ids[2]
    assert ids[0][:8] != ids[0][8:]  # the same prompts again are other draws


def test_vllm_uses_changed_weights(pair, test_problems):
    """Embeddings of the first agent are tied: with its old head the text would differ."""
    assert pair[0].model.config.tie_word_embeddings and not pair[1].model.config.tie_word_embeddings
    for agent in pair:
        old = [a.ids for a in check_greedy(agent, test_problems)]
        disturb(agent)
        assert [a.ids for a in check_greedy(agent, test_problems)] != old


def test_vllm_needs_both_names_of_tied_embeddings(pair, test_problems, monkeypatch):
    """`synchronise` passes tied embeddings under both names. This test fails when vLLM no longer needs that."""
    agent = pair[0]
    check_greedy(agent, test_problems)
    full = agent.model.state_dict
    monkeypatch.setattr(agent.model, "state_dict", lambda: {k: v for k, v in full().items() if k != "lm_head.weight"})
    disturb(agent)
    with pytest.raises(AssertionError):
        check_greedy(agent, test_problems)


def test_vllm_resets_the_prefix_cache_with_the_weights(pair):
    """Long prompts share blocks of the cache among answers and calls, and share nothing with other weights."""
    agent = pair[0]
    problems = hk.load_problems([{"prompt": f"{'1+1=2, 20+3=23, ' * 9}{k}+5=", "gold": "0"} for k in (11, 12)])
    results, generate = [], agent.engine.llm.generate if agent.engine.llm else None
    if generate is None:
        check_greedy(agent, problems)
        generate = agent.engine.llm.generate
    agent.engine.llm.generate = lambda *args, **more: results.append(generate(*args, **more)) or results[-1]
    try:
        assert len(prompts_of(agent, problems)[0]) > 128
        check_greedy(agent, problems)
        check_greedy(agent, problems)
        disturb(agent)
        check_greedy(agent, problems)
    finally:
        del agent.engine.llm.generate
    cached = [[r.num_cached_tokens for r in some] for some in results]
    assert min(cached[1]) >= 128 and cached[2][0] == 0


def test_vllm_engine_of_a_copied_agent_is_independent(pair, test_problems):
    twin = copy.deepcopy(pair[0])
    assert twin.engine is not pair[0].engine and twin.engine.llm is None
    disturb(twin, scale=0.1)
    result = hk.evaluate([pair[0], pair[1]], test_problems, progress=False)
    plain = hk.evaluate(hk.load_agents("tiny-model-pair", device="cpu"), test_problems, progress=False)
    assert result.agents == plain.agents
    check_greedy(twin, test_problems[:4])
    check_greedy(pair[0], test_problems[:4])


def test_vllm_sleep_does_nothing_on_a_cpu(pair, test_problems):
    check_greedy(pair[0], test_problems[:2])
    assert pair[0].engine.sleep() is False
    check_greedy(pair[0], test_problems[:2])


def test_train_with_vllm_learns_and_resume_ends_the_same(tmp_path, pair):
    train, test = (hk.load_problems("arithmetic", split=s, size=k) for s, k in (("train", 200), ("test", 60)))
    config = CONFIG.replace(prompts_per_step=16, n=8, minibatch=64)
    how = dict(test=test, eval_every=2, save_every=2, progress="off")
    first = hk.train(pair, train, config, 4, out=tmp_path / "run", **how)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    for name, values in line["agents"].items():
        assert values["engine_gap_mean"] < 1e-5 and values["engine_gap_max"] < 1e-3
        assert values["avg@1"] > first.history[0]["agents"][name]["avg@1"] + 0.1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["agents"][0]["engine"] == "vllm"
    ends = [copy.deepcopy(a.model.state_dict()) for a in pair]
    # half of it in other engines, stopped there, and the rest in these
    half = hk.load_agents("tiny-model-pair", device="cpu", engine="vllm")
    hk.train(half, train, config, 2, out=tmp_path / "half", **how)
    again = hk.resume(tmp_path / "half", steps=4, agents=pair, progress="off")
    for agent, end in zip(again.agents, ends, strict=True):
        assert all(torch.equal(value, end[name]) for name, value in agent.model.state_dict().items())


def test_vllm_sample_after_a_failure_starts_again_with_the_current_weights(pair, test_problems, monkeypatch):
    agent, other = pair
    check_greedy(other, test_problems[:4])
    check_greedy(agent, test_problems[:4])
    disturb(agent)
    LLM, *_ = module.import_vllm()
    with monkeypatch.context() as patched:
        patched.setattr(LLM, "generate", lambda *_, **__: 1 / 0)
        with pytest.raises(RuntimeError, match=r"engine of agent 'qwen3-sums' failed \(ZeroDivisionError"):
            check_greedy(agent, test_problems[:4])
    check_greedy(agent, test_problems)
    check_greedy(other, test_problems[:4])  # was closed with the failed engine


def test_train_ends_with_a_failed_vllm_engine_and_the_run_resumes(pair, tmp_path, monkeypatch):
    agent = pair[1]
    settings = dict(out=tmp_path / "run", eval_every=9, save_every=1, progress="off")
    problems = hk.load_problems("arithmetic", split="train", size=20)
    hk.train(agent, problems, CONFIG, 1, **settings)
    LLM, *_ = module.import_vllm()

    def out_of_memory(*_, **__):
        raise MemoryError("4096 blocks do not fit")

    with monkeypatch.context() as patched:
        patched.setattr(LLM, "generate", out_of_memory)
        message = r"'llama-differences' failed \(MemoryError: 4096 blocks.*max_num_seqs"
        with pytest.raises(RuntimeError, match=message):
            hk.train(agent, problems, CONFIG, 2, **settings)
    run = hk.resume(tmp_path / "run", steps=2, progress="off")
    assert run.state.step == 2 and isinstance(run.agents[0].engine, module.VLLM)


def test_vllm_sample_names_the_cause_if_the_engine_cannot_start(test_problems):
    agent = hk.load_agent("qwen3-sums", device="cpu", engine="vllm", engine_options={"kv_cache_memory_bytes": 2**50})
    with pytest.raises(RuntimeError, match=r"engine of agent 'qwen3-sums' failed .*kv cache"):
        check_greedy(agent, test_problems[:2])
    agent = hk.load_agent("qwen3-sums", device="cpu", engine="vllm", engine_options={"max_model_len": 20})
    with pytest.raises(ValueError, match=r"exceed the 20 positions of its engine; raise max_model_len"):
        check_greedy(agent, test_problems[:2])


def test_vllm_samples_with_merged_adapters(test_problems):
    pytest.importorskip("peft")
    agent = hk.load_agent("llama-differences", device="cpu", engine="vllm", lora={"r": 4})
    old = [a.ids for a in check_greedy(agent, test_problems[:10])]
    with torch.no_grad():
        for name, p in agent.model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    agent.weights_version += 1
    assert [a.ids for a in check_greedy(agent, test_problems[:10])] != old


def test_vllm_ends_answers_at_the_same_stop_strings_as_transformers(test_problems):
    agent = hk.load_agent("qwen3-sums", device="cpu", engine="vllm", stop=["boxed{"])
    answers = check_greedy(agent, test_problems[:10])
    assert all(agent.decode(a.ids).endswith("boxed{") and a.ended for a in answers)
    agent.engine.close()
