"""Which rollouts a learner takes, and problems that it has solved. Re-encoding of peer rollouts: tests/test_encoding.py."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hacpo_kit as hk
from hacpo_kit.advantages import group_advantages
from hacpo_kit.sharing import comparable_rollouts, shared_rollouts, solved_prompts


class Scored(NamedTuple):
    problem: str
    source: str
    reward: float | None


def scored(**problems):
    """Rollouts by problem: scored(p={"A": [1, 1], "B": [0, 1]})."""
    return [Scored(p, s, r) for p, rewards in problems.items() for s, values in rewards.items() for r in values]


def pool(*rollouts):
    return hk.Pool(rollouts, (), ("b", "a"), n=1)


def test_shared_rollouts_are_all_or_own_and_do_not_depend_on_the_order_of_agents():
    rollouts = pool(Scored("p", "b", 1.0), Scored("p", "a", None), Scored("q", "b", 0.0), Scored("q", "a", 1.0))
    assert shared_rollouts(rollouts, "a", hk.Config()) == [1, 3, 0, 2]
    assert shared_rollouts(rollouts, "a", hk.Config.preset("gspo")) == [1, 3]


def test_comparable_rollouts_exclude_those_without_reward():
    rollouts = pool(Scored("p", "b", 1.0), Scored("p", "a", None))
    known = {"a": 0.5, "b": 0.5}
    assert comparable_rollouts(rollouts, "a", known, hk.Config()) == ([0], {"unscorable": 1})
    assert comparable_rollouts(rollouts, "b", known, hk.Config.preset("gspo")) == ([0], {})


def test_comparable_rollouts_need_a_capability_only_where_a_ratio_is_used():
    rollouts = pool(Scored("p", "b", 1.0), Scored("p", "a", None))
    unknown = hk.Capability().with_step({"a": None, "b": 1.0})
    assert comparable_rollouts(rollouts, "a", unknown, hk.Config()) == ([], {"unscorable": 1, "no_capability": 1})
    assert comparable_rollouts(rollouts, "a", unknown, hk.Config.preset("naive")) == ([0], {"unscorable": 1})


def test_solved_prompts_are_those_on_which_no_rollout_is_better_than_the_learners_worst():
    rollouts = scored(
        solved={"A": [1, 1], "B": [0, 1]},
        mixed={"A": [1, 0], "B": [1, 1]},
        all_wrong={"A": [0, 0], "B": [0, 0]},  # equal rewards contribute no gradient anyway
        all_right={"A": [1, 1], "B": [1, 1]},
        graded={"A": [0.6, 0.6], "B": [0.5, 0.1]},
        beaten={"A": [0.6, 0.5], "B": [0.55, 0.1]},
    )
    assert solved_prompts(rollouts, "A") == {"solved", "graded"}
    assert solved_prompts(rollouts, "B") == {"mixed"}


rewards = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=8)


@given(rewards, rewards)
@settings(max_examples=80, deadline=None)
def test_solved_prompts_have_no_advantage_without_peers(a, b):
    """With exclude_solved, sharing moves a learner beyond its own rollouts only by better ones."""
    if solved_prompts(scored(p={"A": a, "B": b}), "A"):
        alone = group_advantages(torch.tensor(a), ["p"] * len(a), ["A"] * len(a), "A", {"A": 0.5})
        assert (alone.advantages == 0).all()


def test_advantage_excludes_solved_prompts_by_an_advantage_of_zero(pair, problems):
    answers = hk.rollout(pair, problems[:1], n=2, progress=False)
    answers = answers.with_rewards([1.0, 1.0, 0.0, 1.0], ["correct", "correct", "wrong", "correct"])
    capability = hk.Capability().observe(answers)
    batch = hk.advantage(answers, pair[0], capability, hk.Config(exclude_solved=True))
    assert batch.solved_prompts == 1 and (batch.advantages == 0).all()
    assert hk.advantage(answers, pair[0], capability, hk.Config()).advantages.abs().max() > 0.1


def test_advantage_does_not_know_the_order_of_agents(pair, problems):
    answers = [hk.rollout(agents, problems[:2], n=2, progress=False) for agents in (pair, pair[::-1])]
    batches = []
    for one in answers:
        one = one.with_rewards([float(r.sample) for r in one], ["wrong" if r.sample == 0 else "correct" for r in one])
        batches.append(hk.advantage(one, pair[0], hk.Capability().observe(one), hk.Config()))
    assert batches[0].response_ids == batches[1].response_ids
    assert batches[0].advantages.tolist() == pytest.approx(batches[1].advantages.tolist(), abs=0)
