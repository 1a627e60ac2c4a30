"""The explorer's six panels: how a learner weights the rollouts of a step, with the recorded settings for comparison."""

from __future__ import annotations

from typing import Any

import numpy as np

from hacpo_kit.objective import lower_bound
from hacpo_kit.views.figure import Figure, panel_axes, panels
from hacpo_kit.views.markup import plain
from hacpo_kit.views.style import COLORS, GREY
from hacpo_kit.views.whatif import Replay, WhatIf

BINS = 20  # of a histogram
MAX_POINTS = 200  # points in the panel of weights, because each costs time at every move
LARGEST_RATIO = 2.0  # larger ratios are counted in the last bar
FADED = 0.35  # opacity
TITLES = (
    "Importance ratio (faded: clipped)", "Weight by importance ratio", "Advantage",
    "Gradient contribution (faded: A < 0)", "Clipped (dotted: recorded)", "Mean reward, window of P̂",
)  # fmt: skip
AXIS_TITLES = (
    ("", "rollouts"), ("", "weight (peer: s¹⁺ᵅ·ω)"), ("", "rollouts"),
    ("", "% of Σ|s¹⁺ᵅ·ω·A|"), ("mini-batch m", "share of rollouts"), ("step", "mean reward"),
)  # fmt: skip
CLIPPED = {"own": COLORS[3], "peer low": COLORS[4], "peer high": COLORS[5]}  # columns of `WhatIf.clip_fractions`
CLIPPED_LABELS = {"own": "own", "peer low": "peer, s too low", "peer high": "peer, s too high"}
RANGE = {"type": "rect", "y0": 0, "y1": 1, "line_width": 0, "layer": "below", "fillcolor": "rgba(128,128,128,0.18)"}


class Panels:
    """Six linked panels of one learner's step. Every setting gives the same traces with other numbers."""

    def __init__(self, replay: Replay):
        self.replay, self.recorded = replay, replay.at()
        self.recorded_shares, self.recorded_fractions = self.recorded.shares(), self.recorded.clip_fractions()
        history = replay.experience.capability.history
        self.agents = list(dict.fromkeys([*history, *replay.source]))  # in the order of the run, as in every plot
        self.agent_index = np.array([self.agents.index(name) for name in replay.source])
        self.colors = [COLORS[i % len(COLORS)] for i in range(len(self.agents))]
        self.labels = [plain(name, 40) for name in self.agents]
        length = max([1, *map(len, history.values())])
        last = replay.experience.step or length
        self.steps = np.arange(last - length + 1, last + 1)
        self.only_own = bool(replay.own.all())
        self.counted = replay.own == self.only_own  # ratios in the histogram: those of peers, if there are any
        s = replay.ratio[self.counted].astype(np.float64)
        low, high = min(s.min(), 1.0), min(max(s.max(), 1.0), LARGEST_RATIO)
        margin = max(0.02 * (high - low), 1e-4)
        self.edges = np.linspace(low - margin, high + margin, BINS + 1)
        self.bars = np.clip(np.digitize(replay.ratio, self.edges) - 1, 0, BINS - 1)
        count, rng = len(replay.used), np.random.default_rng(0)
        self.points = np.sort(rng.choice(count, min(count, MAX_POINTS), replace=False))
        rollouts = replay.frame.iloc[replay.used[self.points]].itertuples()
        self.tooltips = np.array([_tooltip(rollout) for rollout in rollouts], object)

    def figure(self, now: WhatIf, title: str) -> Figure:
        """Return all panels for these settings."""
        fig = panels(title, "", "", TITLES, height=274, columns=3).add_traces(self.traces(now))
        above = {"orientation": "h", "x": 0, "xanchor": "left", "y": 0.945, "yref": "container", "yanchor": "top"}
        fig.update_layout(
            barmode="stack", bargap=0.05, autosize=True, dragmode=False, hoverlabel_align="left", legend=above,
            margin={"l": 60, "r": 15, "t": 112, "b": 48, "autoexpand": False}, title={"y": 0.985, "yanchor": "top"},
            shapes=[{**RANGE, "xref": f"x{i}", "yref": f"y{i} domain"} for i in ("", "", 6)],
            yaxis4_range=[0, 100], yaxis5_range=[-0.03, 1.03], xaxis5_dtick=1 if now.minibatch.max() < 12 else None,
        )  # fmt: skip
        # drawing the axes takes a third of a move: few ticks, no measuring of their labels, no dragging
        axes = {"nticks": 5, "ticklabeloverflow": "allow", "automargin": False, "fixedrange": True}
        axes["title"] = {"font": {"size": 11}, "standoff": 6}
        fig.update_xaxes(**axes).update_yaxes(**axes)
        for i, (x, y) in enumerate(AXIS_TITLES, start=1):
            fig.layout[f"xaxis{i}"].title.text, fig.layout[f"yaxis{i}"].title.text = x, y
        for path, value in self.layout(now, title).items():
            fig.layout[path] = value
        return fig

    def legend(self) -> str:
        """Return the legend as HTML, because plotly would draw its own again at every move."""
        marks = [(color, "■", label) for color, label in zip(self.colors, self.labels, strict=True)]
        marks += [(color, "●", f"clipped: {CLIPPED_LABELS[kind]}") for kind, color in CLIPPED.items()]
        entries = [f"<span style='color:{color}'>{mark}</span> {label}" for color, mark, label in marks]
        return f"<div style='color:{GREY}'>{' &emsp; '.join(entries)}</div>"

    # ── the traces, one method per panel ─────────────────────────────────────────────────────────────────────────

    def traces(self, now: WhatIf) -> list[dict[str, Any]]:
        """Return the traces of all panels for these settings."""
        agents = range(len(self.agents))
        per_agent = (self._ratios, self._weights, self._advantages, self._rewards)
        traces = [trace for panel in per_agent for i in agents for trace in panel(now, i)]
        return [*traces, *self._gradient(now), *self._clipped(now)]

    def _bars(self, panel: int, agent: int, x: Any, y: Any, *, faded: bool = False, **settings: Any) -> dict[str, Any]:
        return {
            "type": "bar", "x": x, "y": y, **panel_axes(panel), "name": self.labels[agent],
            "marker": {"color": self.colors[agent], "line": {"width": 0}}, "opacity": FADED if faded else 1.0,
            "showlegend": False, **settings,
        }  # fmt: skip

    def _ratios(self, now: WhatIf, agent: int) -> list[dict[str, Any]]:
        traces = []
        for clipped, state in enumerate(("not clipped", "clipped")):
            chosen = self.counted & (self.agent_index == agent) & (now.clipped == clipped)
            counts = np.bincount(self.bars[chosen], minlength=BINS)
            hover = f"s ≈ %{{x:.3f}}: %{{y}} {state}<extra></extra>"
            shown = {"width": np.diff(self.edges)[0], "hovertemplate": hover, "showlegend": not clipped}
            traces.append(self._bars(0, agent, _centers(self.edges), counts, faded=bool(clipped), **shown))
        return traces

    def _weights(self, now: WhatIf, agent: int) -> list[dict[str, Any]]:
        shown = self.agent_index[self.points] == agent
        rows = self.points[shown]
        with np.errstate(invalid="ignore"):
            weight = np.abs(now.coefficient[rows] / now.advantage[rows])  # not defined for A = 0
        return [{
            "type": "scatter", "mode": "markers", "x": now.ratio[rows], "y": weight, "customdata": self.tooltips[shown],
            **panel_axes(1), "name": self.labels[agent], "showlegend": False,
            "marker": {"color": self.colors[agent], "size": 5}, "opacity": 0.6,
            "hovertemplate": "s = %{x:.3f}, weight %{y:.3f}<br>%{customdata}<extra></extra>",
        }]  # fmt: skip

    def _advantages(self, now: WhatIf, agent: int) -> list[dict[str, Any]]:
        edges = self._advantage_edges(now)
        a = now.advantage[(self.agent_index == agent) & (now.advantage != 0)]
        shown = {"width": edges[1] - edges[0], "hovertemplate": "A ≈ %{x:.2f}: %{y}<extra></extra>"}
        return [self._bars(2, agent, _centers(edges), np.histogram(a, edges)[0], **shown)]

    def _advantage_edges(self, now: WhatIf) -> np.ndarray:
        # the axis stays the same while the settings move, unless an advantage leaves it
        largest = max(1.25 * np.abs(self.recorded.advantage).max(initial=0.8), 1.05 * np.abs(now.advantage).max())
        return np.linspace(-largest, largest, BINS + 1)

    def _gradient(self, now: WhatIf) -> list[dict[str, Any]]:
        shares = [100 * s.reindex(self.agents, fill_value=0.0).to_numpy() for s in (self.recorded_shares, now.shares())]
        return [
            self._bars(
                3, i, ["recorded", "now"], np.array([share[i, sign] for share in shares]), faded=bool(sign), width=0.6,
                hovertemplate=f"{label}, A {('>', '&lt;')[sign]} 0: %{{y:.1f}} %<extra></extra>",
            )
            for i, label in enumerate(self.labels) for sign in (0, 1)
        ]  # fmt: skip

    def _rewards(self, now: WhatIf, agent: int) -> list[dict[str, Any]]:
        name = self.agents[agent]
        past = self.replay.experience.capability.history.get(name, (None,) * len(self.steps))
        mean = np.full(2, now.capability.get(name, np.nan))
        color, shown = self.colors[agent], {"type": "scatter", **panel_axes(5), "showlegend": False}
        return [
            {**shown, "x": self.steps, "y": np.array(past, float), "mode": "lines+markers", "name": self.labels[agent],
             "line": {"color": color}, "hovertemplate": "step %{x}: mean reward %{y:.3f}<extra></extra>"},
            {**shown, "x": self._window(now), "y": mean, "mode": "lines", "name": f"P̂ of {self.labels[agent]}",
             "line": {"color": color, "dash": "dash"}, "hovertemplate": "P̂ = %{y:.3f}<extra></extra>"},
        ]  # fmt: skip

    def _window(self, now: WhatIf) -> np.ndarray:
        return np.array([max(self.steps[-1] - now.config.window + 1, self.steps[0]) - 0.4, self.steps[-1] + 0.4])

    def _clipped(self, now: WhatIf) -> list[dict[str, Any]]:
        return [
            {
                "type": "scatter", "mode": "lines+markers" if solid else "lines", "x": fractions.index.to_numpy(),
                "y": fractions[kind].to_numpy(), **panel_axes(4), "name": f"clipped: {CLIPPED_LABELS[kind]}",
                "showlegend": solid and bool(fractions[kind].notna().any()), "legendgroup": kind,
                "line": {"color": color, "dash": "solid" if solid else "dot"},
                "hovertemplate": f"m = %{{x}}: %{{y:.1%}} {kind}{'' if solid else ', recorded'}<extra></extra>",
            }
            for solid, fractions in ((False, self.recorded_fractions), (True, now.clip_fractions()))
            for kind, color in CLIPPED.items()
        ]  # fmt: skip

    def layout(self, now: WhatIf, title: str) -> dict[str, Any]:
        """Return what changes around the traces: title, clipping range, window, ranges and titles of axes."""
        config = now.config
        m = [0, int(now.minibatch.max())] if now.updates_made is None else [now.updates_made] * 2
        # the later range lies over the first one and looks darker
        lower = [1 - config.eps_low if self.only_own else lower_bound(count, config) for count in m]
        upper = 1 + config.eps_high if config.peer_update == "own" or self.only_own else 1.0
        window, edges = self._window(now), self._advantage_edges(now)
        beyond, zero = int((now.ratio[self.counted] > self.edges[-1]).sum()), int((now.advantage == 0).sum())
        points, count = len(self.points), len(self.replay.used)
        return {
            "title.text": title,
            "shapes[0].x0": lower[0], "shapes[0].x1": upper, "shapes[1].x0": lower[1], "shapes[1].x1": upper,
            "shapes[2].x0": window[0], "shapes[2].x1": window[1],
            "xaxis.title.text": f"s, {'own' if self.only_own else 'peer'} rollouts; grey: clipping range"
            + (f"; last bar: {beyond:,} above {LARGEST_RATIO:g}" if beyond else ""),
            "xaxis.range": list(self.edges[[0, -1]]), "xaxis2.range": list(self.edges[[0, -1]]),
            "xaxis2.title.text": f"s ({points:,} of {count:,} rollouts)" if points < count else "s",
            "xaxis3.title.text": f"A ({zero:,} rollouts with A = 0 not shown)" if zero else "A",
            "xaxis3.range": [edges[0], edges[-1]],
        }  # fmt: skip


def _centers(edges: np.ndarray) -> np.ndarray:
    return (edges[:-1] + edges[1:]) / 2


def _tooltip(rollout: Any) -> str:
    source, problem = plain(rollout.source, 40), plain(rollout.problem, 60)
    return f"{source}, {problem} #{rollout.sample}<br>{tooltip_text(rollout.text)}<br>reward {rollout.reward:g}"


def tooltip_text(text: str, width: int = 70, longest: int = 210, most: int = 8) -> str:
    """Return a rollout's text for a tooltip: escaped, in lines of `width`, shortened with a count of what is missing."""
    shown = "\n".join(text[:longest].split("\n")[:most])
    missing = len(text) - len(shown)
    lines = [line[i : i + width] for line in shown.split("\n") for i in range(0, max(len(line), 1), width)]
    return "<br>".join(plain(line, width) for line in lines) + (f" … (+{missing:,} characters)" if missing else "")
