"""rollout(): what is sampled, and its log-probabilities."""

import copy
import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import hacpo_kit as hk
from hacpo_kit.models.engines import transformers as engine
from hacpo_kit.models.sources import data_folder
from hacpo_kit.rollouts import score

QUIET = {"progress": False}


def tokens(pool):
    return [r.token_ids for r in pool]


def reference_logprobs(agent, prompt, response, temperature=1.0):
    """The definition in float64: one row, no padding, no cut logits, the model as transformers has it."""
    model = copy.deepcopy(agent.model).double()
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0] / temperature
    return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).squeeze(1)


def test_rollout_stops_at_either_end_token(qwen, problems):
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


def test_rollout_in_float64_is_scored_in_float64(qwen, problems):
    expected = hk.rollout(qwen, problems[:2], n=4, **QUIET)
    qwen.model.double()
    pool = hk.rollout(qwen, problems[:2], n=4, **QUIET)
    assert tokens(pool) == tokens(expected) and {r.logps.dtype for r in pool} == {np.dtype("float64")}


def test_rollout_keeps_the_engines_log_probabilities_where_a_part_of_them_agrees(qwen, problems, monkeypatch):
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


def test_rollout_adds_no_end_token_to_a_cut_response(llama, problems, write):
    write(llama, [[20, 21, 22, 23]])
    with pytest.warns(UserWarning, match="cut"):
        pool = hk.rollout(llama, problems[:1], n=2, max_new_tokens=3, **QUIET)
    assert tokens(pool) == [(20, 21, 22)] * 2
    assert not any(r.ended for r in pool) and all(len(r.logps) == 3 for r in pool)


def test_rollout_warns_if_many_responses_are_cut(qwen, problems, say):
    say(qwen, ["7+8=15;3+5+1=9;"])
    with pytest.warns(UserWarning, match="100% .*qwen3-sums.*6 tokens"):
        pool = hk.rollout(qwen, problems[:2], n=4, max_new_tokens=6, **QUIET)
    pool = hk.reward(pool)
    assert {(r.reward, r.status) for r in pool} == {(0.0, "no_answer")}
    assert pool.metrics("qwen3-sums")["share_cut"] == 1.0


def test_rollout_counts_a_few_cut_responses_without_a_warning(qwen, problems, say):
    say(qwen, [r"\boxed{1}"] * 7 + ["1" * 40])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool = hk.rollout(qwen, problems[:2], n=4, **QUIET)
    assert pool.metrics("qwen3-sums")["share_cut"] == 1 / 8


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
def test_rollout_refuses_settings_that_scoring_does_not_allow(tiny_agent, problems, options, message):
    with pytest.raises(ValueError, match=message):
        hk.rollout(tiny_agent(), problems[:1], **{"n": 2, **QUIET, **options})


def test_rollout_refuses_an_empty_request(tiny_agent, problems):
    for agents, asked in (([], problems[:1]), (tiny_agent(), [])):
        with pytest.raises(ValueError, match="need agents, problems and n ≥ 1"):
            hk.rollout(agents, asked, **QUIET)


def test_rollout_refuses_two_agents_or_problems_of_the_same_name(tiny_agent, problems):
    with pytest.raises(ValueError, match="agents with the same name: 'tiny'"):
        hk.rollout([tiny_agent(), tiny_agent(seed=1)], problems[:1], **QUIET)
    with pytest.raises(ValueError, match=f"problems with the same name: '{problems[0].id}'"):
        hk.rollout(tiny_agent(), [problems[0], problems[1], problems[0]], **QUIET)


def test_rollout_names_a_prompt_that_does_not_fit(tiny_agent, problems):
    prompt = len(tiny_agent().encode_prompt(problems[0].prompt))
    with pytest.warns(UserWarning, match="cut"):
        fits = hk.rollout(tiny_agent(positions=prompt + 4), problems[:1], n=1, max_new_tokens=4, **QUIET)
    assert len(fits.rollouts[0].token_ids) == 4
    with pytest.raises(ValueError, match=rf"problem '{problems[0].id}': {prompt} prompt tokens.*agent 'tiny'"):
        hk.rollout(tiny_agent(positions=prompt + 3), problems[:1], n=1, max_new_tokens=4, **QUIET)


def test_rollout_returns_every_agent_problem_and_sample_in_order(pair, uneven):
    pool = hk.rollout(pair, uneven, n=3, batch_size=4, **QUIET)
    wanted = [(a.name, p.id, k) for a in pair for p in uneven for k in range(3)]
    assert [(r.source, r.problem, r.sample) for r in pool] == wanted
    assert (pool.agents, pool.n, pool.temperature) == (("qwen3-sums", "llama-differences"), 3, 1.0)
    assert all(
        r.prompt_ids == a.encode_prompt(pool.problem(r.problem).prompt) for a in pair for r in pool.by_source[a.name]
    )
    assert pool.seconds["seconds_rollout"] > 0 and pool.seconds["seconds_scoring"] > 0
    pool.check_complete()


def test_rollout_depends_on_the_seed_and_on_the_updates(llama, problems):
    first, again, other = (hk.rollout(llama, problems[:4], n=4, seed=seed, **QUIET) for seed in (3, 3, 4))
    assert tokens(first) == tokens(again) and all(map(np.array_equal, *([r.logps for r in p] for p in (first, again))))
    assert tokens(first) != tokens(other)
    llama.updates = 1  # the next step draws anew
    assert tokens(first) != tokens(hk.rollout(llama, problems[:4], n=4, seed=3, **QUIET))


def test_rollout_does_not_use_the_global_random_state(llama, problems):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = hk.rollout(llama, problems[:2], n=2, **QUIET)
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(2)
    assert tokens(hk.rollout(llama, problems[:2], n=2, **QUIET)) == tokens(first)


def test_rollout_samples_differ_within_a_prompt(tiny_agent, problems):
    with pytest.warns(UserWarning, match="cut"):
        pool = hk.rollout(tiny_agent(), problems[:3], n=8, max_new_tokens=8, **QUIET)
    assert pool.distinct()["texts"].tolist() == [8, 8, 8]


def test_rollout_samples_differ_between_batches(tiny_agent, problems):
    """One seed for every batch would repeat the first answers in the second."""
    with pytest.warns(UserWarning, match="cut"):
        pool = hk.rollout(tiny_agent(), problems[:1], n=8, max_new_tokens=8, batch_size=2, **QUIET)
    assert pool.distinct()["texts"].tolist() == [8]


@pytest.mark.parametrize("do_sample", [None, True])
def test_rollout_ignores_stored_sampling_defaults(llama, problems, tmp_path, do_sample):
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


def test_rollout_ignores_sampling_defaults_set_after_loading(fresh_agent, problems):
    clean, spoiled = fresh_agent("llama-differences"), fresh_agent("llama-differences")
    spoiled.model.generation_config = GenerationConfig(min_p=0.9, suppress_tokens=[16, 17], forced_eos_token_id=5)
    assert tokens(hk.rollout(clean, problems[:4], n=4, **QUIET)) == tokens(
        hk.rollout(spoiled, problems[:4], n=4, **QUIET)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rollout_log_probabilities_are_those_of_the_plain_model_in_float64(pair, uneven, temperature):
    pool = hk.rollout(pair, uneven, n=2, temperature=temperature, **QUIET)
    by_name = {a.name: a for a in pair}
    assert len({len(r.prompt_ids) for r in pool}) > 2 and len({len(r.token_ids) for r in pool}) > 2
    for r in pool:
        expected = reference_logprobs(by_name[r.source], r.prompt_ids, r.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(r.logps).double(), expected, rtol=1e-4, atol=1e-5)


def test_rollout_tokens_are_as_frequent_as_their_scored_probability(llama, problems):
    """2000 first tokens against exp(log-prob): a sampler and a scorer of different temperature would not agree."""
    problem, n = problems[0], 2000
    with pytest.warns(UserWarning, match="cut"):
        pool = hk.rollout(llama, [problem], n=n, temperature=0.6, max_new_tokens=1, **QUIET)
    probability = {r.token_ids[0]: float(np.exp(r.logps[0])) for r in pool}
    first = [r.token_ids[0] for r in pool]
    assert 2 <= len(probability) < n
    for token, p in probability.items():
        assert abs(first.count(token) / n - p) < 4 * (p * (1 - p) / n) ** 0.5 + 1 / n


def test_score_does_not_depend_on_the_size_of_passes(qwen, problems):
    pool = hk.rollout(qwen, problems[:3], n=3, **QUIET)
    small = score(qwen, pool.rollouts, temperature=1.0, tokens=1)
    for a, b in zip(pool, small, strict=True):
        np.testing.assert_allclose(a.logps, b.logps, rtol=1e-4, atol=1e-5)


def test_rollout_names_rollouts_whose_log_probabilities_are_not_finite(tiny_agent, problems, write):
    agent = tiny_agent()
    write(agent, [[20, 21, agent.tokenizer.eos_token_id]])
    agent.model.lm_head.weight.data[21] = float("nan")
    with pytest.raises(
        FloatingPointError, match=f"agent 'tiny'.*2 rollouts are not finite .{problems[0].id} by tiny #0"
    ):
        hk.rollout(agent, problems[:1], n=2, **QUIET)
