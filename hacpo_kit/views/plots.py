"""Plots of steps, updates and runs. Every figure has labelled axes and a static twin for where no JavaScript runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from hacpo_kit.config import Config
from hacpo_kit.models.memory import PARTS as MEMORY_PARTS
from hacpo_kit.models.memory import usable
from hacpo_kit.objective import clip_band
from hacpo_kit.records import Batch, StepStats
from hacpo_kit.views.curves import forest, learning_curves, lines, method_curves
from hacpo_kit.views.figure import DOTTED, Figure, figure, mark_integers, panel_axes, panels
from hacpo_kit.views.markup import escaped, plain
from hacpo_kit.views.stages import stages
from hacpo_kit.views.style import COLORS, GREY
from hacpo_kit.views.tables import Table, rollout_table

if TYPE_CHECKING:
    from hacpo_kit.advantages import Capability
    from hacpo_kit.models.memory import Estimate

__all__ = [
    "COLORS", "GREY", "Figure", "Table", "advantages", "capability_matrix", "capability_ratios", "clip_bands", "escaped",
    "figure", "forest", "gradient_shares", "importance_ratios", "learning_curves", "lines", "memory", "method_curves", "panels",
    "plain", "ratio_history", "rollout_table", "stages",
]  # fmt: skip

MINIBATCH = "mini-batch m (optimiser updates already made)"


# ── ③ advantage ──────────────────────────────────────────────────────────────────────────────────────────────────


def capability_ratios(capability: Capability) -> Figure:
    """Plot the capability ratio ω of every pair of agents against the step (eq. 9); above 1, the first agent is more capable."""
    past = [capability.at(step + 1) for step in range(max(map(len, capability.history.values()), default=0))]
    # an agent has no ω while none of its rollouts in the window is scorable
    ratios = {
        f"ω({a}, {b})": [c.ratio(a, b) if a in c and b in c else np.nan for c in past]
        for a, b in combinations(capability, 2)
    }
    steps = pd.RangeIndex(1, len(past) + 1, name="step")
    title = "Capability ratio ω of each pair of agents"
    return lines(pd.DataFrame(ratios, index=steps), title=title, y="ω (first ÷ second agent)", level=1.0)


def capability_matrix(capability: Capability) -> Figure:
    """Plot the capability ratio ω of every agent (row) to every other (column) as a matrix (eq. 9).

    The title names agents without a scorable rollout in the window, which have no ω. For an earlier step pass
    `capability.at(step)`. Raises ValueError if no agent has a scorable rollout in the window.
    """
    step = max(map(len, capability.history.values()), default=0)
    # iterating yields all names, `in` says which have a value
    names = [name for name in capability if name in capability]
    if not names:
        raise ValueError(f"after step {step} no agent has a scorable rollout in the window: there is no capability yet")
    ratios = np.array([[capability.ratio(a, b) for b in names] for a in names])
    missing = ", ".join(name for name in capability if name not in names)
    note = f" (without {plain(missing, 120)}: no scorable rollout)" if missing else ""
    fig = figure(f"Capability ratios ω after step {step}: row ÷ column{note}", "second agent", "first agent")
    labels = [plain(name, 100) for name in names]
    # On a logarithmic scale, twice and half as capable are equally far from 1. Ratios within a factor of 1.4 stay pale.
    shades = np.log10(ratios)
    limit = max(0.15, float(np.abs(shades).max()))
    fig.add_heatmap(
        z=shades, x=labels, y=labels, text=[[f"{v:.2f}" for v in row] for row in ratios], texttemplate="%{text}",
        hovertemplate="ω(%{y}, %{x}) = %{text}<extra></extra>", zmin=-limit, zmax=limit, showscale=False,
        textfont={"color": "black"}, colorscale=[[0, "#f0a878"], [0.5, "#f4f4f4"], [1, "#8fc3e8"]],
    )  # fmt: skip
    # an agent may be called "1"
    return fig.update_xaxes(type="category").update_yaxes(type="category", autorange="reversed")


def advantages(batches: Batch | Sequence[Batch], *, weighted: bool = False) -> Figure:
    """Plot histograms of the advantages of all rollouts that a learner uses, by source, one panel per learner (eqs. 6-7).

    `weighted` shows ω(source, learner)·A of peer rollouts, which the update uses (eq. 10). Raises ValueError without a batch,
    and if an advantage is not finite.
    """
    batches = [batches] if isinstance(batches, Batch) else list(batches)
    if not batches:
        raise ValueError("there is no batch to show")
    values = [(b.advantages * b.weights if weighted else b.advantages).numpy() for b in batches]
    for batch, value in zip(batches, values, strict=True):
        if bad := int((~np.isfinite(value)).sum()):
            raise ValueError(f"{bad} advantages of learner {batch.learner!r} are not finite")
    symbol = "ω·A" if weighted else "A"
    title = f"{'Weighted advantages' if weighted else 'Advantages'} of the rollouts that each learner uses, by source"
    learners = [f"learner {b.learner}" for b in batches]
    fig = panels(title, f"advantage {symbol} (standard deviations)", "rollouts", learners, height=330)
    most = max([1.0, *(float(np.abs(value).max(initial=0)) for value in values)])
    edges = np.linspace(-most, most, 32)  # the number of bins is odd, so that zero is inside a bin
    colors = dict(zip(dict.fromkeys(name for b in batches for name in b.pool.agents), cycle(COLORS), strict=False))
    shown = set()  # in the legend
    for place, (batch, value) in enumerate(zip(batches, values, strict=True)):
        sources = np.array([rollout.source for rollout in batch.rollouts])
        for source in [name for name in colors if name in sources]:
            fig.add_bar(
                x=(edges[1:] + edges[:-1]) / 2, y=np.histogram(value[sources == source], edges)[0], name=plain(source, 100),
                legendgroup=source, showlegend=source not in shown, marker={"color": colors[source]},
                hovertemplate=f"{symbol} about %{{x:.2f}}: %{{y}} rollouts", **panel_axes(place),
            )  # fmt: skip
            shown.add(source)
    return fig.update_layout(barmode="stack", bargap=0.05)


# ── ④ update ─────────────────────────────────────────────────────────────────────────────────────────────────────


def importance_ratios(stats: StepStats | Sequence[StepStats]) -> Figure:
    """Plot the importance ratio of each rollout in one step against the mini-batch, with the clipping range of peer rollouts."""
    many = [stats] if isinstance(stats, StepStats) else list(stats)
    frame = pd.concat([s.to_frame() for s in many], ignore_index=True)
    own, clipped = frame["own"], frame["clipped"]
    kinds = {  # own ratios are all near 1 and would be covered
        "peer, in the clipping range": (~own & ~clipped, COLORS[2], "circle"),
        "peer, clipped: no gradient": (~own & clipped, COLORS[1], "circle-open"),
        "own": (own & ~clipped, COLORS[0], "circle"),
        "own, clipped: no gradient": (own & clipped, COLORS[0], "circle-open"),
    }
    names = " and ".join(plain(s.learner, 60) for s in many)
    note = " (no update)" if frame.empty else ""
    fig = figure(f"Importance ratios in one step of {names}{note}", MINIBATCH, "importance ratio s")
    jitter = np.random.default_rng(0).uniform(-0.3, 0.3, len(frame))  # so that points do not cover each other
    for name, (rows, color, symbol) in kinds.items():
        if rows.any():
            fig.add_scatter(
                x=(frame["updates_made"] + jitter)[rows].astype(np.float32), y=frame["ratio"][rows], mode="markers", name=name,
                showlegend=True, marker={"color": color, "size": 5, "symbol": symbol, "opacity": 0.8},
            )  # fmt: skip
    for m, lower in frame[~own].groupby("updates_made")["lower"].first().items():
        fig.add_shape(
            type="rect", x0=m - 0.4, x1=m + 0.4, y0=lower, y1=1.0, line={"width": 0}, layer="below",
            fillcolor="rgba(128,128,128,0.25)",
        )  # fmt: skip
    mark_integers(fig, sorted(frame["updates_made"].unique()))
    return fig


def clip_bands(configs: Config | Mapping[str, Config], *, updates: int = 8) -> Figure:
    """Plot the clipping range of peer rollouts against the mini-batch, one line per config: it ends at s = 1 (eqs. 13-14).

    Raises ValueError for a config without such a range: one that uses own rollouts only, or clips peer rollouts like own ones.
    """
    if updates < 0:
        raise ValueError(f"updates={updates}: it must be 0 or more")
    ranges = {}
    for name, config in ({"": configs} if isinstance(configs, Config) else configs).items():
        if config.share == "none" or config.peer_update != "hacpo":
            why = "uses no peer rollouts" if config.share == "none" else "clips peer rollouts like own ones"
            raise ValueError(f"config {name or config.method!r} has no clipping range for peer rollouts: it {why}")
        lower = [clip_band(m, config.delta, config.delta_step)[0] for m in range(updates + 1)]
        label = name or f"δ = {config.delta:g}, δ_step = {config.delta_step:g}"
        ranges[label] = pd.DataFrame({"mean": lower, "low": lower, "high": 1.0})
    title = "Peer rollouts contribute to the gradient between the line and 1"
    return lines(pd.concat(ranges, axis=1), title=title, x=MINIBATCH, y="importance ratio s", level=1.0)


def gradient_shares(
    shares: pd.DataFrame, *, title: str = "Share of the gradient, by source of the rollouts", x: str | None = None
) -> Figure:
    """Plot stacked bars in percent of the whole gradient: one bar per row of `shares`, one colour per column.

    The fractions of a row, as `gradients.gradient_parts` returns them, sum to 1; a part that points against the whole has a
    negative one. Rows of NaN stay empty. `x` is by default the name of the index, or the mini-batch. Raises ValueError if a
    row does not sum to 1.
    """
    sums = shares.sum(axis=1)[shares.notna().any(axis=1)]
    if len(wrong := sums[~((sums - 1).abs() <= 0.01)]):
        raise ValueError(f"the shares of {wrong.index[0]!r} sum to {wrong.iloc[0]:.3f}, not 1")
    fig = figure(title, x or str(shares.index.name or MINIBATCH), "share of the gradient (%)")
    for color, part in zip(cycle(COLORS), shares, strict=False):
        fig.add_bar(
            x=list(shares.index), y=100 * shares[part], name=plain(part, 100), showlegend=True, marker={"color": color},
            hovertemplate="%{y:.0f} %",
        )  # fmt: skip
    if pd.api.types.is_integer_dtype(shares.index):
        mark_integers(fig, shares.index)
    return fig.update_layout(barmode="relative", bargap=0.25)


# ── a run ────────────────────────────────────────────────────────────────────────────────────────────────────────


def ratio_history(history: Sequence[Mapping[str, Any]], agent: str) -> Figure:
    """Plot the mean importance ratio of own and peer rollouts against the step of a run, with the range of each step."""
    title = f"Importance ratios of {plain(agent, 60)} over training (mean and range of each step)"
    metrics = pd.DataFrame({line["step"]: line["agents"].get(agent, {}) for line in history}).T.rename_axis("step")
    curves = {
        (who, column): metrics.get(f"{who}_ratio_{name}")
        for who in ("own", "peer")
        for column, name in (("mean", "mean"), ("low", "min"), ("high", "max"))
        if f"{who}_ratio_mean" in metrics
    }
    curves = pd.DataFrame(curves, index=metrics.index, dtype=float).dropna(how="all")
    return lines(curves, title=title, y="importance ratio s", colors=[0, 2], level=1.0)


def memory(estimate: Estimate, *, title: str = "Peak memory on the device in each phase of a step") -> Figure:
    """Plot what each agent needs on the device in each phase (GiB), with a dotted line at the memory that is usable."""
    frame = estimate.to_frame()
    names = [f"{plain(agent, 40)} · {phase}" for agent, phase in frame.index]
    fig = figure(title, "memory (GiB; dotted: usable)", "agent · phase", height=max(260, 110 + 34 * len(names)))
    for part, color in zip(MEMORY_PARTS, COLORS, strict=True):
        if frame[part].max() > 0:
            bar = {"orientation": "h", "marker": {"color": color}, "hovertemplate": f"%{{y}}: {part} %{{x:.1f}} GiB"}
            fig.add_bar(x=frame[part], y=names, name=part, **bar)
    fig.add_vline(usable(estimate.device_memory) / 2**30, line=DOTTED)
    return fig.update_layout(barmode="stack", bargap=0.25).update_yaxes(autorange="reversed", showgrid=False)
