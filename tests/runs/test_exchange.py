"""The warning for learners that use almost no rollout of their peers."""

import warnings

import numpy as np
import pytest

import hacpo_kit as hk
from hacpo_kit.records import MiniBatch, StepStats
from hacpo_kit.runs.exchange import unused_share, warn_about_unused_peers


def stats(clipped, *, own=0, excluded=0):
    """One update of learner "a" with these `clipped` rollouts of its peer, and own and excluded ones."""
    peers, count = np.array(clipped, bool), len(clipped) + own
    values = np.ones(count, np.float32)
    part = MiniBatch(
        updates_made=0, lower=0.8, index=np.arange(count), own=np.arange(count) < own,
        ratio=values, clipped=np.concatenate([np.zeros(own, bool), peers]), advantages=values, weights=values,
        loss=0.0, grad_norm=1.0, lr=1e-3, kl=None,
    )  # fmt: skip
    sources = ("a",) * own + ("b",) * (len(peers) + excluded)
    return StepStats("a", (part,), {"lossy_reencoding": excluded} if excluded else {}, sources)


def test_unused_share_counts_clipped_and_excluded_peer_rollouts():
    assert unused_share(stats([True, False, False, False], own=4)) == 0.25
    assert unused_share(stats([False, False], own=1, excluded=2)) == 0.5
    assert unused_share(stats([], own=3)) == 0


@pytest.mark.parametrize(
    ("update", "config"),
    [
        (stats([True] * 57 + [False] * 7), hk.Config()),  # 89 %
        (stats([True] * 8), hk.Config()),  # too few to judge
        (stats([True] * 64), hk.Config.preset("grpo")),  # uses no peers
    ],
)
def test_warn_about_unused_peers_is_silent(update, config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_unused_peers({"a": update}, config)


@pytest.mark.parametrize("update", [stats([True] * 58 + [False] * 6, own=64), stats([False] * 4, excluded=60)])
def test_warn_about_unused_peers_names_learner_and_causes(update):
    with pytest.warns(UserWarning, match=r"agent 'a' .*delta=0\.2 .*end_id"):
        warn_about_unused_peers({"a": update}, hk.Config(delta=0.2))


def test_step_warns_about_a_wrong_end_token(pair, problems):
    """Peer responses end with a token that the learner never samples, so that their ratios are below the clipping range."""
    pair[0].end_id = 0
    config = hk.Config.preset("hacpo", prompts_per_step=8, n=8, max_new_tokens=16)
    with pytest.warns(UserWarning, match=f"agent '{pair[0].name}' learns almost nothing from its peers"):
        hk.step(pair, problems[:8], hk.Capability(), config)
