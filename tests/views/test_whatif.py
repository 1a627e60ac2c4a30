"""A replay with the recorded settings equals the training step, and its coefficients are the gradient of the objective."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hacpo_kit as hk
from hacpo_kit.advantages import group_advantages
from hacpo_kit.objective import clip_band, hacpo_loss
from hacpo_kit.runs.experience import Experience, recorded_steps
from hacpo_kit.views.whatif import Replay

METHODS = {
    "hacpo": {"exclude_solved": True},
    "naive": {},
    "gspo": {},
    "no_clip": {"cross_baseline": "source"},
    "grpo": {},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of a short recorded run of each method."""
    torch.set_num_threads(1)
    problems = hk.load_problems("arithmetic", split="train", size=40)

    def train(method, changes):
        config = hk.Config.preset(method, prompts_per_step=6, n=4, minibatch=16, lr=3e-4, **changes)
        agents = hk.load_agents("tiny-model-pair", device="cpu")
        return hk.train(agents, problems, config, 2, out=tmp_path_factory.mktemp("runs") / "run", progress="off").folder

    return {method: train(method, changes) for method, changes in METHODS.items()}


@pytest.mark.parametrize("method", ["hacpo", "naive", "gspo", "no_clip"])
def test_replay_of_the_recorded_settings_equals_training(runs, method):
    clipped = contributes = 0
    for step in recorded_steps(runs[method]):
        experience = Experience.of_run(runs[method], step)
        for learner in experience.learners:
            replay = Replay(experience, learner)
            now, recorded = replay.at(), replay.frame.iloc[replay.used]
            for name in ("advantage", "weight", "clipped", "lower", "ratio", "minibatch"):
                np.testing.assert_array_equal(
                    getattr(now, name), recorded[name].to_numpy(), err_msg=f"{name}, step {step}"
                )
            assert np.all((now.coefficient == 0) == (now.clipped | (now.advantage == 0)))
            clipped, contributes = clipped + now.clipped.sum(), contributes + (now.coefficient != 0).sum()
    assert clipped and contributes


def test_replay_uses_the_settings_of_its_step(tmp_path):
    """Settings, also the window, may change within a run."""
    problems = hk.load_problems("arithmetic", split="train", size=40)
    change = lambda result: result.config.replace(alpha=3.0, window=1) if result.config.alpha < 3 else None  # noqa: E731
    config = hk.Config(prompts_per_step=6, n=4, minibatch=16, lr=3e-4)
    agents = hk.load_agents("tiny-model-pair", device="cpu")
    run = hk.train(agents, problems, config, 3, out=tmp_path / "run", callbacks=[change], progress="off")
    steps = [Experience.of_run(run.folder, s) for s in (1, 2, 3)]
    assert [e.config.alpha for e in steps] == [1.0, 3.0, 3.0] and [e.capability.window for e in steps] == [5, 1, 1]
    for experience in steps:
        replay = Replay(experience)
        now, recorded = replay.at(), replay.frame.iloc[replay.used]
        np.testing.assert_array_equal(now.advantage, recorded["advantage"].to_numpy())
        np.testing.assert_array_equal(now.weight, recorded["weight"].to_numpy())


@st.composite
def rollouts(draw):
    """Ratio, own and reward of 2 to 12 rollouts of one prompt; the first is the learner's own."""
    count = draw(st.integers(2, 12))
    ratio = draw(st.lists(st.floats(0.25, 2.5, width=32), min_size=count, max_size=count))
    own = [True, *draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1))]
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0, 0.25]), min_size=count, max_size=count))
    return ratio, own, rewards


@given(
    rows=rollouts(),
    alpha=st.floats(0, 4),
    delta=st.floats(0, 1),
    delta_step=st.floats(0, 0.1),
    m=st.integers(0, 20),
    discrepancy=st.booleans(),
    peer_update=st.sampled_from(["hacpo", "own"]),
)
@settings(deadline=None, max_examples=60)
def test_replay_coefficient_is_the_gradient_of_the_loss(
    experience_of, rows, alpha, delta, delta_step, m, discrepancy, peer_update
):
    """∂ objective / ∂ mean log π of each rollout, against autograd through hacpo_loss and its tokens."""
    ratio, own, rewards = rows
    config = hk.Config(
        alpha=alpha, delta=delta, delta_step=delta_step, discrepancy=discrepancy, peer_update=peer_update
    )
    now = Replay(experience_of(ratio, own, rewards=rewards)).at(config, updates_made=m)
    # two tokens per rollout, so that there is a mean; log π = log s with source log-probabilities of 0
    logp = torch.tensor(np.log(np.array(ratio, np.float64)))[:, None].repeat(1, 2).requires_grad_()
    s = torch.tensor(ratio, dtype=torch.float64)
    out = hacpo_loss(
        logp, torch.ones(len(ratio), 2, dtype=torch.bool), torch.zeros(len(ratio), dtype=torch.float64),
        torch.tensor(now.advantage).double(), torch.tensor(now.weight).double(), torch.tensor(own), m, config,
    )  # fmt: skip
    out.loss.backward()
    expected = -logp.grad.sum(-1) * len(ratio)
    # at a bound of a clipping range, single and double precision may differ
    bounds = torch.tensor([clip_band(m, delta, delta_step)[0], 1.0, 1 - config.eps_low, 1 + config.eps_high])
    clear = ((s[:, None] - bounds).abs() > 1e-6).all(-1).numpy()
    np.testing.assert_allclose(now.coefficient[clear], expected.numpy()[clear], rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(now.clipped[clear], out.clipped.numpy()[clear])


def test_replay_by_hand(experience_of):
    """Two own and two peer rollouts of one prompt with P̂ = 0.5 and 0.25."""
    replay = Replay(experience_of([1, 1, 0.9, 0.7], [True, True, False, False], rewards=[0, 1, 1, 0]))
    now = replay.at()
    # baseline (0 + 1 + 2·1 + 2·0)/4 = 0.75, σ = 0.57735, ω(B, A) = 0.5
    np.testing.assert_allclose(now.advantage, np.array([-0.75, 0.25, 0.25, -0.75]) / 0.57735, rtol=1e-5)
    assert now.capability == {"A": 0.5, "B": 0.25} and now.weight.tolist() == [1, 1, 0.5, 0.5]
    assert now.clipped.tolist() == [False, False, False, True] and now.lower.tolist() == [0.8] * 4
    # own s·A; peer s^(1+α)·ω·A = 0.81·0.5·A
    np.testing.assert_allclose(now.coefficient, np.array([-0.75, 0.25, 0.81 * 0.5 * 0.25, 0]) / 0.57735, rtol=1e-5)
    shares = now.shares()
    assert shares.to_numpy().sum() == pytest.approx(1) and shares.loc["A", "down"] == pytest.approx(0.75 / 1.10125)
    wide = replay.at(hk.Config(delta=0.4, alpha=0, discrepancy=False, capability_baseline=False))
    np.testing.assert_allclose(wide.coefficient * 0.57735, [-0.5, 0.5, 0.9 * 0.5, -0.7 * 0.5], rtol=1e-5)
    assert replay.at(updates_made=6).clipped.tolist() == [False, False, True, True]  # lower(6) = 0.95
    assert now.clip_fractions().loc[0].to_dict() == {"own": 0, "peer low": 0.5, "peer high": 0}


def test_replay_window_changes_the_advantages(experience_of):
    experience = experience_of([1, 0.9], [True, False], rewards=[0, 1])
    capability = hk.Capability().with_step({"A": 0.1, "B": 0.9}).with_step({"A": 0.5, "B": 0.25})
    replay = Replay(Experience(experience.frame, capability, hk.Config(window=1), 2))
    one, two = replay.at(), replay.at(hk.Config(window=2))
    assert one.weight[1] == 0.5 and two.weight[1] == pytest.approx(0.575 / 0.3)
    assert one.advantage[0] != two.advantage[0] and two.capability == {"A": 0.3, "B": 0.575}


def test_replay_advantages_of_many_prompts(experience_of):
    """The last prompt has one rollout fewer."""
    rng = np.random.default_rng(0)
    problems = [f"p{i}" for i in range(60) for _ in range(6)][:-1]
    count = len(problems)
    own, rewards = [i % 2 == 0 for i in range(count)], rng.choice([0.0, 0.35, 2.0], count)
    experience = experience_of(rng.uniform(0.8, 1, count), own, rewards=rewards, problems=problems)
    sources = experience.frame["source"].tolist()
    expected = group_advantages(torch.tensor(rewards), problems, sources, "A", experience.capability).advantages
    np.testing.assert_array_equal(Replay(experience).at().advantage, expected.float())


def test_replay_refuses_settings_that_act_before_the_record(runs):
    replay = Replay(Experience.of_run(runs["hacpo"]))
    with pytest.raises(ValueError, match=r"temperature: 1\.0 → 0\.5.*lr"):
        replay.at(replay.experience.config.replace(temperature=0.5, lr=1.0))
    alone = Replay(Experience.of_run(runs["gspo"]))
    with pytest.raises(ValueError, match="share='all'"):
        alone.at(alone.experience.config.replace(share="all"))
    own = replay.at(replay.experience.config.replace(share="none"))
    assert own.own.all() and len(own.row) < len(replay.used)


def test_replay_refuses_what_it_cannot_weight(runs, experience_of):
    experience = experience_of([1.0, np.nan, np.inf], [True, True, False])
    with pytest.raises(ValueError, match="2 importance ratios of learner 'A' are not finite"):
        Replay(experience)
    with pytest.raises(ValueError, match="no learner"):
        Replay(Experience(experience.frame.iloc[:0], experience.capability, experience.config))
    with pytest.raises(ValueError, match="'missing'"):
        Replay(experience, "missing")
    with pytest.raises(ValueError, match="updates_made=-1"):
        Replay(experience_of([1.0], [True])).at(updates_made=-1)
    with pytest.raises(ValueError, match="token by token"):
        Replay(Experience.of_run(runs["grpo"]))
    unused = experience_of([1.0], [True])
    unused.frame["minibatch"] = None
    with pytest.raises(ValueError, match="used none of the 1 rollouts"):
        Replay(unused)
