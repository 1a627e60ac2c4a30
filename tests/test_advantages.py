"""Capability, ω and the capability-aware advantage against golden values, by properties and by reduction."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hacpo_kit.advantages import Capability, capability_ratio, group_advantages

CASES = json.loads((Path(__file__).parent / "golden" / "advantage.json").read_text())["cases"]
SETTINGS = {"guard": "binary_guard", "cap": "capability_baseline"}


def group(rewards, learner="A", capability=None, prompts=None, **kwargs):
    """Advantages for one prompt from rewards by agent."""
    sources = [name for name, values in rewards.items() for _ in values]
    flat = torch.tensor([float(v) for values in rewards.values() for v in values], dtype=torch.float64)
    capability = capability or dict.fromkeys(rewards, 0.5)
    return group_advantages(flat, prompts or ["p"] * len(flat), sources, learner, capability, **kwargs)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['name']} ({c['learner']})")
def test_group_advantages_golden(case):
    keywords = {SETTINGS[k]: v for k, v in case["settings"].items()}
    out = group(case["rewards"], case["learner"], case["capability"], **keywords)
    expected = [a for values in case["advantages"].values() for a in values]
    torch.testing.assert_close(out.advantages, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(out.baselines[0].item(), case["baseline"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(out.joint_std[0].item(), case["joint_std"], rtol=1e-9, atol=1e-12)
    for other, omega in case["omega_update"].items():
        assert capability_ratio(case["capability"], other, case["learner"]) == pytest.approx(omega, rel=1e-9)
    if keywords.get("capability_baseline", True):
        for other, omega in case["omega_baseline"].items():
            assert capability_ratio(case["capability"], case["learner"], other) == pytest.approx(omega, rel=1e-9)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1, 1, 1, 1], [0, 0, 0, 0]), ([1], [0]), ([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5])],
)
def test_group_advantages_of_small_groups(rewards, expected):
    out = group({"A": rewards})
    torch.testing.assert_close(out.advantages, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-9)


def test_group_advantages_are_zero_for_equal_rewards():
    out = group({"A": [1, 0, 1, 1]}, prompts=["p", "p", "q", "q"])
    assert out.advantages[:2].abs().min() > 0.5 and (out.advantages[2:] == 0).all()


def test_group_advantages_stay_zero_for_equal_rewards_whatever_omega_is():
    """σ = 0 and a baseline of ω·R would give advantages of ±5·10⁵."""
    out = group({"A": [1, 1], "B": [1, 1]}, "B", {"A": 0.9, "B": 0.1})
    assert (out.advantages == 0).all()


def test_group_advantages_ignore_rounding_of_equal_rewards():
    rewards = torch.full((7,), 0.35) + torch.tensor([0, 1e-8, 0, 0, -1e-8, 0, 0])
    out = group_advantages(rewards, ["p"] * 7, ["A"] * 7, "A", {"A": 0.3})
    assert (out.advantages == 0).all()
    different = group_advantages(torch.tensor([0.35] * 7 + [0.0]), ["p"] * 8, ["A"] * 8, "A", {"A": 0.3})
    assert different.advantages[-1] < -2


def test_group_advantages_refuse_rewards_that_are_not_finite():
    rewards = torch.tensor([float("nan")] * 7 + [1.0])
    with pytest.raises(ValueError, match=r"\[0, 1, 2, 3, 4, 5, 6\] are not finite"):
        group_advantages(rewards, ["p"] * 8, ["A"] * 8, "A", {"A": 0.5})


def test_group_advantages_refuse_rewards_that_are_too_large():
    with pytest.raises(ValueError, match=r"\[0, 1, 2\] are too large"):
        group_advantages(torch.tensor([1e308, -1e308, 0.0], dtype=torch.float64), ["p"] * 3, ["A"] * 3, "A", {"A": 1.0})


def test_group_advantages_with_the_baseline_of_each_source():
    rewards, capability = {"A": [1, 1, 0, 0], "B": [1, 0, 0, 0]}, {"A": 0.5, "B": 0.25}
    mixed = group(rewards, "A", capability, cross_baseline="source").baselines
    of_a, of_b = (group(rewards, k, capability).baselines[0] for k in "AB")
    torch.testing.assert_close(mixed, torch.stack([of_a] * 4 + [of_b] * 4))
    with pytest.raises(ValueError, match="cross_baseline"):
        group(rewards, cross_baseline="both")


def test_capability_ratio_floor_and_clip():
    assert capability_ratio({"A": 0.5, "B": 0.0}, "A", "B") == 10.0
    assert capability_ratio({"A": 0.5, "B": 0.0}, "B", "A") == 0.1
    assert capability_ratio({"A": 0.0, "B": 0.0}, "B", "A") == 1.0
    with pytest.raises(KeyError, match="no capability for agent 'C'"):
        capability_ratio({"A": 0.5}, "A", "C")
    with pytest.raises(ValueError, match="'A' is nan"):
        capability_ratio({"A": float("nan"), "B": 1.0}, "A", "B")


def test_capability_window_keeps_the_last_steps():
    c = Capability(window=5)
    for value in (1.0, 0.0, 0.2, 0.4, 0.6, 0.8):
        c = c.with_step({"A": value})
    assert c["A"] == pytest.approx((0.0 + 0.2 + 0.4 + 0.6 + 0.8) / 5)
    assert c.at(1)["A"] == 1.0
    assert c.with_step({"A": None})["A"] == pytest.approx((0.2 + 0.4 + 0.6 + 0.8) / 4)  # not a reward of 0
    with pytest.raises(KeyError, match="never observed"):
        c["B"]
    with pytest.raises(KeyError, match="no scorable rollout"):
        Capability().with_step({"A": None})["A"]


rewards = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=8)
share = st.floats(0.05, 1.0)


@given(rewards, rewards, share, share)
@settings(max_examples=150, deadline=None)
def test_group_advantages_properties(a, b, p, q):
    n = min(len(a), len(b))
    capability = {"A": p, "B": q}
    assert capability_ratio(capability, "A", "B") * capability_ratio(capability, "B", "A") == pytest.approx(1.0)
    out = group({"A": a[:n], "B": b[:n]}, "A", capability)
    flat = torch.tensor(a[:n] + b[:n])
    assert out.advantages.isfinite().all()
    assert (out.advantages == 0).all() if flat.unique().numel() == 1 else True
    # a correct answer never has a smaller advantage than a wrong one
    if flat.unique().numel() == 2:
        assert out.advantages[flat == 1].min() > out.advantages[flat == 0].max()


@given(rewards, share)
@settings(max_examples=80, deadline=None)
def test_group_advantages_of_one_agent_are_group_relative(values, p):
    out = group({"A": values}, "A", {"A": p})
    flat = torch.tensor(values, dtype=torch.float64)
    expected = (flat - flat.mean()) / (flat.std() + 1e-6) if flat.unique().numel() > 1 else torch.zeros_like(flat)
    torch.testing.assert_close(out.advantages, expected, rtol=1e-9, atol=1e-12)


@given(rewards, share)
@settings(max_examples=80, deadline=None)
def test_group_advantages_of_equal_agents_are_those_of_plain_averaging(values, p):
    both = {"A": values, "B": values[::-1]}
    with_ratio = group(both, "A", {"A": p, "B": p}, binary_guard=False).advantages
    without = group(both, "A", {"A": p, "B": p}, binary_guard=False, capability_baseline=False).advantages
    torch.testing.assert_close(with_ratio, without)


def test_group_advantages_do_not_depend_on_the_order_of_rollouts():
    generator = torch.Generator().manual_seed(0)
    r = torch.randint(0, 2, (24,), generator=generator).double()
    prompts, sources = ["p", "q"] * 12, ["A"] * 12 + ["B"] * 12
    capability = {"A": 0.7, "B": 0.2}
    straight = group_advantages(r, prompts, sources, "A", capability).advantages
    order = torch.randperm(24, generator=generator)
    shuffled = group_advantages(
        r[order], [prompts[i] for i in order], [sources[i] for i in order], "A", capability
    ).advantages
    torch.testing.assert_close(shuffled, straight[order])


def test_capability_refuses_a_window_of_no_steps():
    """The slice of the last zero steps contains all steps."""
    with pytest.raises(ValueError, match="window=0"):
        Capability(window=0)


def test_capability_tells_an_agent_without_reward_from_an_unknown_one():
    past = Capability().with_step({"A": None, "B": 0.5})
    with pytest.raises(KeyError, match="'A' had no scorable rollout in the last 5 steps"):
        past.ratio("B", "A")
    with pytest.raises(KeyError, match="no capability for agent 'C'; there are 'A', 'B'"):
        past.ratio("B", "C")


def test_capability_warns_of_a_negative_mean_reward(fresh_agent):
    import hacpo_kit as hk

    pool = hk.rollout(fresh_agent("qwen3-sums"), hk.load_problems("arithmetic", size=1), n=2, progress=False)
    with pytest.warns(UserWarning, match="negative"):
        hk.Capability().observe(pool.with_rewards([-1.0, 0.0], ["wrong", "wrong"]))
