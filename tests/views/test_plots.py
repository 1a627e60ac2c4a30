"""Plots of steps and updates: what they show and what they refuse."""

import base64
import re

import numpy as np
import pandas as pd
import pytest
import torch

import hacpo_kit as hk
from hacpo_kit.models.memory import Estimate, Phase, usable
from hacpo_kit.records import Batch, MiniBatch, Pool, Rollout, StepStats


def stats(count=200, minibatches=3):
    """Half own rollouts near 1, half peer ones, some of them outside the clipping range."""
    rng, parts = np.random.default_rng(0), []
    for m in range(minibatches):
        own = np.arange(count) % 2 == 0
        ratio = np.where(own, rng.normal(1, 0.001, count), rng.uniform(0.6, 1.2, count)).astype(np.float32)
        lower = 0.8 + 0.025 * m
        clipped = np.where(own, ratio > 1.0004, (ratio < lower) | (ratio > 1))
        ones = np.ones(count, np.float32)
        parts.append(MiniBatch(m, lower, np.arange(count), own, ratio, clipped, ones, ones, 0.0, 1.0, 1e-4, None))
    return StepStats("A", tuple(parts), {}, tuple("AB"[i % 2] for i in range(count)))


def batch(learner, advantages=(1.5, -0.5, -0.5, 1.0, -1.5, 0.0)):
    """Six rollouts, three of each agent."""
    own = torch.tensor([s == learner for s in "AAABBB"])
    rollouts = [
        Rollout("p", s, i % 3, "2", (1,), (2, 3), np.array([-0.1, -0.2]), True, reward=float(i % 2), status="wrong")
        for i, s in enumerate("AAABBB")
    ]
    pool = Pool(tuple(rollouts), (hk.Problem("p", "1+1=", "2"),), ("A", "B"), 3)
    ids, ones = tuple((1,) for _ in range(6)), torch.ones(6)
    weights = torch.where(own, 1.0, 2.0)
    return Batch(learner, ids, ids, -ones, torch.tensor(advantages), weights, own, tuple(range(6)), pool)


def estimate():
    """Two agents, one of which needs more memory than there is."""
    phases = (
        Phase("A", "rollout", weights=2**30, cache=2 * 2**30, others=2**30),
        Phase("$B$", "update", weights=2**30, optimizer=6 * 2**30, work=3 * 2**30),
    )
    return Estimate(phases, {"A": 1, "$B$": 1}, {"A": 1, "$B$": 1}, False, 8 * 2**30, ())


def history():
    values = {f"{who}_ratio_{k}": v for who in ("own", "peer") for k, v in (("mean", 1.0), ("min", 0.9), ("max", 1.1))}
    return [{"step": 0, "agents": {"A": {"avg@1": 0.1}}}, *({"step": s, "agents": {"A": values}} for s in (1, 2))]


CAPABILITY = hk.Capability().with_step({"A": 0.2, "B": 0.4}).with_step({"A": 0.3, "B": 0.1})
FIGURES = {
    "importance_ratios": lambda: hk.plots.importance_ratios(stats()),
    "capability_ratios": lambda: hk.plots.capability_ratios(CAPABILITY),
    "capability_matrix": lambda: hk.plots.capability_matrix(CAPABILITY),
    "ratio_history": lambda: hk.plots.ratio_history(history(), "A"),
    "lines": lambda: hk.plots.lines(pd.DataFrame({"a": [1.0, 2.0]}), title="T", x="step", y="value"),
    "advantages": lambda: hk.plots.advantages([batch("A"), batch("B")]),
    "clip_bands": lambda: hk.plots.clip_bands({"0.2": hk.Config(), "0.8": hk.Config(delta=0.8)}),
    "gradient_shares": lambda: hk.plots.gradient_shares(pd.DataFrame({"own": [0.9, 0.4], "B": [0.1, 0.6]})),
    "memory": lambda: hk.plots.memory(estimate()),
}


@pytest.mark.parametrize("name", FIGURES)
def test_plots_have_labels_and_a_static_twin(name):
    figure = FIGURES[name]()
    assert figure.layout.title.text and figure.layout.xaxis.title.text and figure.layout.yaxis.title.text
    bundle = figure._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png", "application/vnd.plotly.v1+json"}
    assert bundle["application/vnd.plotly.v1+json"]["data"]


def test_importance_ratios_separate_own_from_peer_and_clipped():
    figure = hk.plots.importance_ratios(stats())
    frame = stats().to_frame()
    own, clipped = frame["own"], frame["clipped"]
    counts = [int(rows.sum()) for rows in (~own & ~clipped, ~own & clipped, own & ~clipped, own & clipped)]
    assert [len(trace.x) for trace in figure.data] == counts
    assert [(round(s.y0, 3), s.y1) for s in figure.layout.shapes] == [(0.8, 1.0), (0.825, 1.0), (0.85, 1.0)]


def test_importance_ratios_of_a_step_without_an_update():
    figure = hk.plots.importance_ratios(StepStats("A", (), {"unscorable": 4}, ()))
    assert "no update" in figure.layout.title.text and not figure.data and figure.png()


def test_capability_ratios_of_every_pair():
    capability = hk.Capability().with_step({"A": 0.2, "B": 0.4, "C": 0.4}).with_step({"A": 0.2, "B": 0.4})
    figure = hk.plots.capability_ratios(capability.at(1))
    assert {t.name: t.y[0] for t in figure.data} == {"ω(A, B)": 0.5, "ω(A, C)": 0.5, "ω(B, C)": 1.0}


def test_capability_matrix_has_every_pair_in_both_directions():
    cells = hk.plots.capability_matrix(hk.Capability().with_step({"A": 0.2, "B": 0.4})).data[0]
    assert list(cells.x) == list(cells.y) == ["A", "B"]
    assert [list(row) for row in cells.text] == [["1.00", "0.50"], ["2.00", "1.00"]]


def test_capability_matrix_shades_are_symmetric_and_pale_for_equal_agents():
    near = hk.plots.capability_matrix(hk.Capability().with_step({"A": 0.32, "B": 0.25})).data[0]
    assert (near.zmin, near.zmax) == (-0.15, 0.15) and np.asarray(near.z)[0, 1] == pytest.approx(np.log10(1.28))
    far = hk.plots.capability_matrix(hk.Capability().with_step({"A": 0.1, "B": 0.2})).data[0]
    assert far.zmax == -far.zmin == pytest.approx(np.log10(2)) == pytest.approx(np.asarray(far.z).max())


def test_capability_matrix_names_agents_without_a_capability():
    past = hk.Capability().with_step({"A": None, "B": None, "1": None}).with_step({"A": 0.5, "B": None, "1": 0.25})
    figure = hk.plots.capability_matrix(past)
    assert figure.data[0].x == ("A", "1") and "without B" in figure.layout.title.text
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "category"  # "1" is a name
    for capability in (hk.Capability(), past.at(1)):
        with pytest.raises(ValueError, match="no capability"):
            hk.plots.capability_matrix(capability)


def test_advantages_count_every_rollout_once_by_source():
    figure = hk.plots.advantages([batch("A"), batch("B")])
    bars = {(t.xaxis, t.name): t for t in figure.data}
    assert set(bars) == {("x", "A"), ("x", "B"), ("x2", "A"), ("x2", "B")}
    assert all(sum(t.y) == 3 for t in figure.data) and figure.layout.barmode == "stack"
    places = {
        name: [round(x, 1) for x, y in zip(bars["x", name].x, bars["x", name].y, strict=True) if y] for name in "AB"
    }
    assert places == {"A": [-0.5, 1.5], "B": [-1.5, 0.0, 1.0]}
    weighted = hk.plots.advantages(batch("A"), weighted=True)
    assert "ω·A" in weighted.layout.xaxis.title.text and max(weighted.data[1].x) > 2.5


def test_advantages_name_every_source_once_in_the_legend():
    alone = [batch(name).part(range(3 * i, 3 * i + 3)) for i, name in enumerate("AB")]  # own rollouts only
    for batches in (alone, [batch("A"), batch("B")]):
        assert [t.name for t in hk.plots.advantages(batches).data if t.showlegend] == ["A", "B"]


def test_advantages_refuse_no_batch_and_values_that_are_not_finite():
    with pytest.raises(ValueError, match="no batch"):
        hk.plots.advantages([])
    with pytest.raises(ValueError, match="1 advantages of learner 'A'"):
        hk.plots.advantages(batch("A", (float("nan"), 1, 1, 1, 1, 1)))
    assert hk.plots.advantages(batch("A", (0.0,) * 6)).png()


def test_memory_has_a_bar_for_each_phase_and_a_line_at_the_usable_memory():
    figure = hk.plots.memory(estimate())
    assert {bar.name: list(bar.x) for bar in figure.data} == {
        "weights": [1, 1], "optimizer": [0, 6], "cache": [2, 0], "work": [0, 3], "others": [1, 0]
    }  # fmt: skip
    assert [shape.x0 for shape in figure.layout.shapes] == [usable(8 * 2**30) / 2**30]


def test_clip_bands_narrow_with_every_update_and_end_at_one():
    curve = hk.plots.clip_bands(hk.Config(), updates=10).data[1]
    np.testing.assert_allclose(curve.y, [0.8, 0.825, 0.85, 0.875, 0.9, 0.925, 0.95, 0.975, 1, 1, 1])
    with pytest.raises(ValueError, match="updates=-1"):
        hk.plots.clip_bands(hk.Config(), updates=-1)


@pytest.mark.parametrize("method", ["naive", "gspo", "grpo"])
def test_clip_bands_refuse_a_method_without_them(method):
    with pytest.raises(ValueError, match="'mine' has no clipping range"):
        hk.plots.clip_bands({"mine": hk.Config.preset(method)})


def test_gradient_shares_are_in_percent_and_may_be_negative():
    figure = hk.plots.gradient_shares(pd.DataFrame({"own": [1.1, np.nan], "B": [-0.1, np.nan]}))
    assert [t.y[0] for t in figure.data] == pytest.approx([110, -10]) and figure.layout.barmode == "relative"
    assert figure.png() and hk.plots.gradient_shares(pd.DataFrame({"own": [], "B": []})).png()
    with pytest.raises(ValueError, match=r"shares of 0 sum to 1\.300"):
        hk.plots.gradient_shares(pd.DataFrame({"own": [0.9], "B": [0.4]}))


@pytest.mark.parametrize("current", [None, 1, 4])
def test_stages_mark_the_current_one(current):
    image = re.search(r'src="data:image/svg\+xml;base64,(.*?)"', hk.plots.stages(current)._repr_html_())[1]
    svg = base64.b64decode(image).decode()
    assert svg.count('class="current"') == (current is not None)
    assert re.findall(r">([①-④] \w+)<", svg) == ["① rollout", "② reward", "③ advantage", "④ update"]


def test_stages_refuse_another_number():
    with pytest.raises(ValueError, match="current=5"):
        hk.plots.stages(5)
