"""Plotly figures from records and run folders, each with a static picture beside it; no mathematics of its own."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from hacpo_kit.records import StepStats

if TYPE_CHECKING:
    from hacpo_kit.advantages import Capability

# Okabe and Ito's colours, distinguishable with every kind of colour vision, the blue a little lighter so that it and the
# grey of the text read on white and on black
COLORS = ("#1f83c4", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#7a7a7a"
DASHES = {
    "solid": "-",
    "dash": "--",
    "dot": ":",
    "dashdot": "-.",
}  # plotly's name → matplotlib's; lines that coincide stay visible
MAX_POINTS = 2000  # a trace; more are thinned, and the title says so


class Figure(go.Figure):
    """A plotly figure that also shows where no JavaScript runs: it displays as interactive JSON and as a PNG, at once."""

    def _repr_mimebundle_(self, *_: Any, **__: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": f"Figure: {self.layout.title.text}"}
        bundle["image/png"] = base64.b64encode(self.png()).decode()
        bundle["application/vnd.plotly.v1+json"] = self.to_plotly_json_plain()
        return bundle

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self._repr_mimebundle_(), raw=True)

    def to_plotly_json_plain(self) -> dict[str, Any]:
        """The figure as JSON types."""
        import json

        return {**json.loads(self.to_json()), "config": {"displaylogo": False, "responsive": True}}

    def png(self, width: float = 8.0, dpi: int = 110) -> bytes:
        """A static picture of the figure (transparent PNG), drawn without a browser."""
        return _draw(self, width, dpi)


def _figure(title: str, x: str, y: str, *, height: int = 422, **layout: Any) -> Figure:
    axis = {
        "gridcolor": "rgba(128,128,128,0.25)",
        "zeroline": False,
        "linecolor": GREY,
        "ticks": "outside",
        "tickcolor": GREY,
    }
    return Figure(
        layout={
            "template": "none",
            "title": {"text": title, "x": 0.02, "font": {"size": 15}},
            "xaxis": {**axis, "title": {"text": x}},
            "yaxis": {**axis, "title": {"text": y}},
            "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": GREY, "size": 12}, "height": height, "colorway": COLORS,
            "margin": {"l": 65, "r": 20, "t": 60, "b": 70},
            "legend": {"bgcolor": "rgba(0,0,0,0)"},
            **layout,
        }
    )  # fmt: skip


def learning_curves(
    runs: pd.DataFrame,
    *,
    metric: str = "avg@1",
    x: str = "step",
    by: Sequence[str] = ("method",),
    title: str | None = None,
) -> Figure:
    """Mean of a metric against steps, rollouts or tokens, one line a group, with a 95 % interval over runs.

    `runs`: one row a step, agent and run, with columns `x`, `metric`, those in `by`, and `run` (for the interval).
    Raises KeyError, naming it, for a missing column.
    """
    for column in (x, metric, *by):
        if column not in runs:
            raise KeyError(f"no column {column!r}; there are {', '.join(map(str, runs.columns))}")
    rows = runs.dropna(subset=[metric])
    count = int(rows.groupby(list(by))["run"].nunique().max()) if "run" in rows else 1
    note = f" (95 % interval over {count} runs each)" if count > 1 else ""
    fig = _figure(title or f"{_label(metric).capitalize()}{note}", _label(x), _label(metric))
    for name, group in rows.groupby(list(by), sort=False):
        color, dash = _style(rows, by, name)
        # agents of one run are averaged first: runs, not agents, are independent
        per_run = group.groupby([x, "run"] if count > 1 else [x])[metric].mean()
        curve = interval(per_run, x) if count > 1 else per_run.to_frame("mean")
        label = " · ".join(map(str, name))
        if count > 1:
            _band(fig, curve, color, label)
        fig.add_scatter(
            x=curve.index,
            y=curve["mean"],
            name=label,
            mode="lines+markers",
            line={"color": color, "dash": dash},
            legendgroup=label,
        )
    return fig


def lines(
    curves: pd.DataFrame,
    *,
    title: str,
    y: str,
    x: str | None = None,
    colors: Sequence[int] | None = None,
    dashes: Sequence[str] | None = None,
    bands: Mapping[str, tuple[pd.Series, pd.Series]] | None = None,
    log: str = "",
    level: float | None = None,
) -> Figure:
    """One line a column against the index; `bands` gives a column its low and high, `level` a dotted horizontal line.

    `colors` and `dashes`: for each column a place in COLORS and a name in DASHES; `log`: "x", "y" or "xy" for logarithmic
    axes, which have no place for values of 0 and below (ValueError). `x` defaults to the name of the index.
    """
    for axis, values in (("x", curves.index), ("y", curves.to_numpy())):
        if axis in log and (np.asarray(values, float) <= 0).any():
            raise ValueError(f"log={log!r}, but the {axis} values of {title!r} are not all above 0")
    fig = _figure(title, x or str(curves.index.name), y)
    fig.update_layout({f"{axis}axis": {"type": "log"} for axis in log})
    for place, column in enumerate(curves):
        color = COLORS[(colors[place] if colors else place) % len(COLORS)]
        if bands and column in bands:
            _band(fig, pd.DataFrame(dict(zip(("low", "high"), bands[column], strict=True))), color, column)
        fig.add_scatter(
            x=curves.index, y=curves[column], name=column, mode="lines+markers", legendgroup=column, showlegend=True,
            line={"color": color, "dash": dashes[place] if dashes else "solid"},
        )  # fmt: skip
    if level is not None:
        _line(fig, level)
    return fig


def _style(rows: pd.DataFrame, by: Sequence[str], name: tuple) -> tuple[str, str]:
    """Colour by the first column and dash by the second; with one column both change."""
    places = [list(dict.fromkeys(rows[column])).index(value) for column, value in zip(by, name, strict=True)]
    return COLORS[places[0] % len(COLORS)], tuple(DASHES)[places[min(1, len(places) - 1)] % len(DASHES)]


def interval(values: pd.Series, level: str) -> pd.DataFrame:
    """Mean and 95 % t-interval of the mean over runs, for each value of an index level."""
    from scipy.stats import t

    grouped = values.groupby(level=level)
    mean, n, std = grouped.mean(), grouped.size(), grouped.std(ddof=1)
    half = pd.Series(t.ppf(0.975, np.maximum(n - 1, 1)), n.index) * std / np.sqrt(n)
    return pd.DataFrame({"mean": mean, "low": mean - half, "high": mean + half, "runs": n})


def _band(fig: Figure, curve: pd.DataFrame, color: str, group: str) -> None:
    xs = np.concatenate([curve.index, curve.index[::-1]])
    ys = np.concatenate([curve["high"], curve["low"][::-1]])
    fig.add_scatter(
        x=xs, y=ys, fill="toself", fillcolor=_faded(color, 0.18), line={"width": 0}, mode="lines",
        hoverinfo="skip", showlegend=False, legendgroup=group,
    )  # fmt: skip


def capability_ratios(capability: Capability) -> Figure:
    """ω of every pair of agents over the steps (eq. 9); above 1 the first is the stronger."""
    names = list(capability)
    steps = max(map(len, capability.history.values()), default=0)
    fig = _figure("Capability ratio: who is ahead, and by how much", "step", "ω (first ÷ second)")
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    for color, (a, b) in zip(_cycle(COLORS), pairs, strict=False):
        past = [capability.at(s) for s in range(1, steps + 1)]
        values = [c.ratio(a, b) if a in c and b in c else None for c in past]  # a gap where one had no scorable rollout
        fig.add_scatter(
            x=list(range(1, steps + 1)), y=values, name=f"ω({a}, {b})", mode="lines+markers", line={"color": color},
            showlegend=True,
        )  # fmt: skip
    _line(fig, 1.0)
    return fig


def importance_ratios(stats: StepStats | Sequence[StepStats]) -> Figure:
    """Importance ratios of one step, mini-batch by mini-batch: own ones near 1, foreign ones in and outside the band."""
    many = [stats] if isinstance(stats, StepStats) else list(stats)
    frame = pd.concat([s.to_frame() for s in many], ignore_index=True)
    rng = np.random.default_rng(0)
    names = " and ".join(s.learner for s in many)
    kinds = {
        "own": (frame["own"] & ~frame["clipped"], COLORS[0], "circle"),
        "own, clipped: no gradient": (frame["own"] & frame["clipped"], COLORS[0], "circle-open"),
        "foreign, in the band": (~frame["own"] & ~frame["clipped"], COLORS[2], "circle"),
        "foreign, clipped: no gradient": (~frame["own"] & frame["clipped"], COLORS[1], "circle-open"),
    }
    fig = _figure(
        f"Importance ratios in one step of {names}", "mini-batch m (optimiser updates already made)", "ratio s"
    )
    thinned = False
    for name, (rows, color, symbol) in kinds.items():
        points = frame[rows]
        if points.empty:
            continue
        thinned |= len(points) > MAX_POINTS
        points = points.sample(MAX_POINTS, random_state=0) if len(points) > MAX_POINTS else points
        jitter = rng.uniform(-0.3, 0.3, len(points))
        fig.add_scatter(
            x=points["updates_made"] + jitter, y=points["ratio"], mode="markers", name=name,
            marker={"color": color, "size": 5, "symbol": symbol, "opacity": 0.85},
        )  # fmt: skip
    for m, lower in frame.groupby("updates_made")["lower"].first().items():
        if (~frame["own"]).any():
            fig.add_shape(
                type="rect", x0=m - 0.4, x1=m + 0.4, y0=lower, y1=1.0, line={"width": 0}, layer="below",
                fillcolor="rgba(128,128,128,0.25)",
            )  # fmt: skip
    fig.update_xaxes(tickvals=sorted(frame["updates_made"].unique()))
    if thinned:
        fig.update_layout(title_text=f"{fig.layout.title.text} ({MAX_POINTS} points a kind shown)")
    return fig


def ratio_history(history: Sequence[Mapping[str, Any]], agent: str) -> Figure:
    """Mean importance ratio of own and foreign rollouts over the steps of a run, with the range from least to greatest."""
    lines = [line for line in history if agent in line["agents"] and "own_ratio_mean" in line["agents"][agent]]
    fig = _figure(f"Importance ratios of {agent} over training (mean, and the range of a step)", "step", "ratio s")
    for who, color in (("own", COLORS[0]), ("foreign", COLORS[2])):
        rows = [(line["step"], line["agents"][agent]) for line in lines if f"{who}_ratio_mean" in line["agents"][agent]]
        if not rows:
            continue
        columns = {k: [v[f"{who}_ratio_{k}"] for _, v in rows] for k in ("mean", "min", "max")}
        curve = pd.DataFrame(columns, index=[s for s, _ in rows]).rename(columns={"min": "low", "max": "high"})
        _band(fig, curve, color, who)
        fig.add_scatter(
            x=curve.index, y=curve["mean"], name=who, mode="lines+markers", line={"color": color}, legendgroup=who
        )
    _line(fig, 1.0)
    return fig


def _line(fig: Figure, y: float) -> None:
    fig.add_shape(type="line", xref="paper", x0=0, x1=1, y0=y, y1=y, line={"color": GREY, "dash": "dot", "width": 1})


_LABELS = {
    "step": "step", "rollouts": "rollouts sampled, all agents", "tokens": "tokens sampled, all agents",
    "seconds": "wall time (s)", "avg@1": "accuracy on test problems (share right)", "reward": "mean reward of rollouts",
}  # fmt: skip


def _label(name: str) -> str:
    return _LABELS.get(name, name)


def _cycle(values: Sequence[str]):
    while True:
        yield from values


def _faded(color: str, alpha: float) -> str:
    return f"rgba({int(color[1:3], 16)},{int(color[3:5], 16)},{int(color[5:7], 16)},{alpha})"


# ── the static twin ──────────────────────────────────────────────────────────────────────────────────────────────


def _draw(fig: go.Figure, width: float, dpi: int) -> bytes:
    """Draws the kinds of traces this module uses with matplotlib; raises NotImplementedError for any other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(width, width * 0.48), dpi=dpi, layout="constrained")
    FigureCanvasAgg(canvas)
    ax = canvas.subplots()
    for shape in fig.layout.shapes:
        _draw_shape(ax, shape)
    for trace in fig.data:
        if trace.type != "scatter":
            raise NotImplementedError(f"no static picture for traces of type {trace.type}")
        _draw_scatter(ax, trace)
    ax.set_title(_literal(fig.layout.title.text), loc="left", fontsize=11, color=GREY)
    ax.set_xlabel(fig.layout.xaxis.title.text)
    ax.set_ylabel(fig.layout.yaxis.title.text)
    for axis, set_scale in ((fig.layout.xaxis, ax.set_xscale), (fig.layout.yaxis, ax.set_yscale)):
        if axis.type == "log":  # setting "linear" would take the names off an axis of categories
            set_scale("log")
    if fig.layout.xaxis.tickvals is not None:
        ax.set_xticks(fig.layout.xaxis.tickvals)
    elif fig.layout.xaxis.title.text == _LABELS["step"]:
        ax.xaxis.get_major_locator().set_params(integer=True)
    _grey(ax)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", transparent=True, metadata={"Software": None})
    return buffer.getvalue()


def _draw_shape(ax, shape) -> None:
    if shape.type == "rect":
        ax.fill_between([shape.x0, shape.x1], shape.y0, shape.y1, color=(0.5, 0.5, 0.5, 0.25), linewidth=0)
    else:
        ax.axhline(shape.y0, color=GREY, linestyle=":", linewidth=1)


def _draw_scatter(ax, trace) -> None:
    if trace.fill == "toself":
        r, g, b, a = (float(v) for v in trace.fillcolor[5:-1].split(","))
        ax.fill(trace.x, trace.y, color=(r / 255, g / 255, b / 255, a), linewidth=0)
    elif trace.mode == "markers":
        color, hollow = trace.marker.color, str(trace.marker.symbol).endswith("open")
        ax.scatter(
            trace.x, trace.y, s=10, alpha=trace.marker.opacity, facecolors="none" if hollow else color,
            edgecolors=color if hollow else "none", linewidths=0.7, label=_literal(trace.name),
        )  # fmt: skip
    else:
        style = {"color": trace.line.color, "linestyle": DASHES[trace.line.dash or "solid"], "linewidth": 1.6}
        ax.plot(trace.x, trace.y, marker="o", markersize=3.5, label=_literal(trace.name), **style)


def _literal(text: str) -> str:
    """Text as it is: matplotlib reads dollar signs as formulas, and leaves labels that begin with _ out of the legend."""
    return f" {text}".replace("$", r"\$") if (text or "").startswith("_") else (text or "").replace("$", r"\$")


def _grey(ax) -> None:
    """Text and axes that read on a light and on a dark page."""
    ax.grid(color=(0.5, 0.5, 0.5, 0.25), linewidth=0.6)
    ax.set_axisbelow(True)
    for item in (ax.xaxis.label, ax.yaxis.label, *ax.get_xticklabels(), *ax.get_yticklabels()):
        item.set_color(GREY)
    ax.tick_params(colors=GREY)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
    if ax.get_legend_handles_labels()[0]:
        # beside the axes: inside, it would lie on the points
        ax.legend(frameon=False, labelcolor=GREY, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
