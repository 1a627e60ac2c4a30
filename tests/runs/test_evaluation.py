"""evaluate(): avg@k and best@k, and everything that must not change them."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hacpo_kit as hk
from hacpo_kit.models.engines import transformers as engine
from hacpo_kit.rewards import Verdict, boxed_math
from hacpo_kit.runs.evaluation import best_at

SUMS = [hk.Problem("sum/0", "1+1=", "2"), hk.Problem("sum/1", "2+2=", "4")]


def box(number):
    return rf"\boxed{{{number}}}"


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_best_at_is_the_share_of_all_subsets_with_a_right_answer(numbers):
    n, correct, k = numbers
    right = [i < correct for i in range(n)]
    draws = [any(subset) for subset in itertools.combinations(right, k)]
    assert best_at(n, correct, k) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize(("n", "correct", "k"), [(3, 1, 0), (3, 1, 4), (3, 4, 1), (3, -1, 1), (0, 0, 0)])
def test_best_at_refuses_impossible_counts(n, correct, k):
    with pytest.raises(ValueError, match="need 1 ≤ k ≤ n and 0 ≤ correct ≤ n"):
        best_at(n, correct, k)


def test_evaluate_is_greedy_for_one_rollout(llama, problems):
    result = hk.evaluate(llama, problems[:4], progress=False)
    prompts = [llama.encode_prompt(p.prompt) for p in problems[:4]]
    greedy = engine.sample(llama, prompts, temperature=0.0, max_new_tokens=32, seed=0)
    assert [r.token_ids for r in result.answers] == [answer.ids for answer in greedy]
    again = hk.evaluate([llama], problems[:4], seed=5, progress=False)  # no chance in it
    assert [r.text for r in again.answers] == [r.text for r in result.answers]
    right = [boxed_math(r.text, p.gold).reward for r, p in zip(result.answers, problems[:4], strict=True)]
    assert result["llama-differences"]["avg@1"] == pytest.approx(np.mean(right))
    assert not any(key.startswith("best@") for key in result["llama-differences"])


def test_evaluate_returns_avg_and_unbiased_best(tiny_agent, say):
    agent = tiny_agent()
    say(agent, [box(2), box(0), box(0), box(0), box(4), box(4), box(0), box(0)])  # 1 of 4 and 2 of 4 right
    result = hk.evaluate(agent, SUMS, 2, samples=4, progress=False)["tiny"]
    assert result["avg@4"] == 3 / 8
    assert result["best@2"] == pytest.approx(np.mean([1 / 2, 5 / 6]))
    assert {k: result[k] for k in ("problems", "answers", "correct", "unscorable", "cut", "status_wrong")} == {
        "problems": 2,
        "answers": 8,
        "correct": 3,
        "unscorable": 0,
        "cut": 0,
        "status_wrong": 5,
    }


def test_evaluate_samples_several_rollouts_at_temperature_1_from_the_seed(llama, problems):
    def texts(**options):
        return [r.text for r in hk.evaluate(llama, problems[:4], 4, progress=False, **options).answers]

    assert texts() == texts() == texts(temperature=1.0) != texts(seed=1)
    assert len(set(texts()[:4])) > 1


def test_evaluate_uses_random_streams_of_its_own(tiny_agent, problems):
    agent = tiny_agent()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    answers = hk.evaluate(agent, problems[:2], 2, progress=False, max_new_tokens=8).answers
    assert torch.get_rng_state().equal(before) and agent.updates == 0
    with pytest.warns(UserWarning, match="cut"):
        trained_on = hk.rollout(agent, problems[:2], n=2, progress=False, max_new_tokens=8)
    assert not {r.text for r in answers} & {r.text for r in trained_on}


def test_evaluate_takes_another_reward_function(tiny_agent, say):
    agent = tiny_agent()
    say(agent, ["abc", "abcd"])
    asked = []

    def by_length(response, gold):
        asked.append((response, gold))
        return len(response) / 4

    result = hk.evaluate(agent, SUMS, reward_function=by_length, progress=False)
    assert asked == [("abc", "2"), ("abcd", "4")]
    assert result["tiny"]["avg@1"] == 0.875 and result["tiny"]["correct"] == 1  # 0.75 is not all of it
    assert [r.reward for r in result.answers] == [0.75, 1.0]
    say(agent, ["a", "ab", "abc", "abcd"])
    best = hk.evaluate(agent, SUMS, 2, reward_function=by_length, progress=False)["tiny"]["best@2"]
    assert best == 0.5  # nothing right for the first problem, one right answer to the second


def test_evaluate_excludes_and_counts_unscorable_rollouts(tiny_agent, say):
    agent = tiny_agent()
    say(agent, ["yes", "no", "?", "?"])

    def judge(response, gold):
        return Verdict(None, "unscorable") if response == "?" else float(response == "yes")

    result = hk.evaluate(agent, SUMS, 2, reward_function=judge, progress=False)["tiny"]
    assert result["avg@2"] == 0.5 and result["best@2"] == 1.0  # the second problem has no verdict at all
    assert result["unscorable"] == 2 and result["status_unscorable"] == 2
    say(agent, ["yes", "no", "?", "no"])
    result = hk.evaluate(agent, SUMS, 2, reward_function=judge, progress=False)["tiny"]
    assert result["avg@2"] == pytest.approx(1 / 3) and result["best@2"] == 1.0  # no best of 2 from one verdict
    nothing = hk.evaluate(agent, SUMS, reward_function=lambda *_: Verdict(None, "error"), progress=False)["tiny"]
    assert np.isnan(nothing["avg@1"]) and nothing["unscorable"] == 2


def test_evaluate_counts_cut_rollouts(tiny_agent, say):
    agent = tiny_agent()
    say(agent, [box(2), "1" * 30])
    assert hk.evaluate(agent, SUMS, max_new_tokens=12, progress=False)["tiny"]["cut"] == 1


def test_evaluate_does_not_depend_on_the_batch_size_and_keeps_the_order(pair, problems):
    whole, parts = (hk.evaluate(pair, problems[:5], batch_size=size, progress=False) for size in (512, 2))
    assert [r.token_ids for r in whole.answers] == [r.token_ids for r in parts.answers]  # greedy: no chance in it
    assert [(r.source, r.problem) for r in whole.answers] == [(a.name, p.id) for a in pair for p in problems[:5]]
    frame = whole.to_frame()
    assert frame.index.tolist() == ["qwen3-sums", "llama-differences"] and frame["answers"].tolist() == [5, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "need 1 ≤ k ≤ samples"),
        ({"k": 4, "samples": 2}, "k=4, samples=2"),
        ({"k": 4, "temperature": 0}, "samples=4: greedy"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 1000}, "exceed the 256 positions of agent 'tiny'"),
    ],
)
def test_evaluate_refuses_invalid_options(tiny_agent, options, message):
    with pytest.raises(ValueError, match=message):
        hk.evaluate(tiny_agent(), SUMS, progress=False, **options)


def test_evaluate_refuses_repeated_names(tiny_agent):
    """One result would hide the other, and one gold answer would judge both."""
    with pytest.raises(ValueError, match="agents with the same name: 'tiny'"):
        hk.evaluate([tiny_agent(), tiny_agent(seed=1)], SUMS, progress=False)
    with pytest.raises(ValueError, match="problems with the same name: 'sum/0'"):
        hk.evaluate(tiny_agent(), [*SUMS, hk.Problem("sum/0", "3+3=", "6")], progress=False)
    with pytest.raises(ValueError, match="need agents, problems"):
        hk.evaluate(tiny_agent(), [], progress=False)
