"""Plotly figures from records and run folders, each with a static picture beside it; no mathematics of its own."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from hacpo_kit.compare import MEAN, interval
from hacpo_kit.records import StepStats

if TYPE_CHECKING:
    from hacpo_kit.advantages import Capability

# Okabe and Ito's colours, distinguishable with every kind of colour vision, the blue a little lighter so that it and the
# grey of the text read on white and on black
COLORS = ("#1f83c4", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#7a7a7a"
# a method looks the same on every page: the ablations of hacpo, seldom beside the other methods, share their colours dashed
METHOD_STYLES = {
    "hacpo": (COLORS[0], "solid"), "gspo": (COLORS[1], "solid"), "gspo_x2": (COLORS[4], "solid"),
    "naive": (COLORS[2], "solid"), "grpo": (COLORS[3], "solid"), "hacpo_equal": (COLORS[5], "solid"),
    "no_capability_baseline": (COLORS[1], "dash"), "no_discrepancy": (COLORS[2], "dash"), "alpha=0": (COLORS[3], "dash"),
    "delta_step=0": (COLORS[4], "dash"), "no_clip": (COLORS[5], "dash"),
}  # fmt: skip
DASHES = {
    "solid": "-",
    "dash": "--",
    "dot": ":",
    "dashdot": "-.",
}  # plotly's name → matplotlib's; lines that coincide stay visible
HEIGHT = 422  # of a figure with one panel (pixels)
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

    def png(self, width: float | None = None, dpi: int | None = None) -> bytes:
        """A static picture of the figure: a transparent PNG, about 900 pixels wide, drawn without a browser."""
        beside = (self.layout.meta or {}).get("columns", 1) > 1  # panels side by side want room
        return _draw(self, width or (10.0 if beside else 8.0), dpi or (90 if beside else 110))


AXIS = {
    "gridcolor": "rgba(128,128,128,0.25)", "zeroline": False, "linecolor": GREY, "ticks": "outside", "tickcolor": GREY,
}  # fmt: skip


def _figure(title: str, x: str, y: str, *, height: int = HEIGHT, **layout: Any) -> Figure:
    return Figure(
        layout={
            "template": "none",
            "title": {"text": title, "x": 0.02, "font": {"size": 15}},
            "xaxis": {**AXIS, "title": {"text": x}},
            "yaxis": {**AXIS, "title": {"text": y}},
            "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": GREY, "size": 12}, "height": height, "colorway": COLORS,
            "margin": {"l": 65, "r": 20, "t": 60, "b": 70},
            "legend": {"bgcolor": "rgba(0,0,0,0)"},
            **layout,
        }
    )  # fmt: skip


def _panels(title: str, x: str, y: str, names: Sequence[str], *, height: int) -> Figure:
    """An empty figure with a named panel for each name, two in a row; a trace names its panel by its axes (x2 and y2)."""
    from plotly.subplots import make_subplots

    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    height = min(height, max(220, 660 // rows))
    total = rows * height + 92
    gap = min(110 / total, 1 / rows)  # room for the labels of the axis above
    grid = make_subplots(rows, columns, subplot_titles=list(names), vertical_spacing=gap, horizontal_spacing=0.1)
    fig = Figure(grid).update_layout(template="none")
    fig.update_layout(_figure(title, x, y, height=total).layout)
    fig.update_xaxes(**AXIS, title_text=x)
    fig.update_yaxes(**AXIS, title_text=y)
    fig.update_annotations(font={"color": GREY, "size": 13})
    return fig.update_layout(meta={"panels": list(names), "columns": columns})


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


def _band(fig: Figure, curve: pd.DataFrame, color: str, group: str, alpha: float = 0.18, **axes: str) -> None:
    # single precision: a page holds many bands
    xs = np.concatenate([curve.index, curve.index[::-1]]).astype(np.float32)
    ys = np.concatenate([curve["high"], curve["low"][::-1]]).astype(np.float32)
    fig.add_scatter(
        x=xs, y=ys, fill="toself", fillcolor=_faded(color, alpha), line={"width": 0}, mode="lines",
        hoverinfo="skip", showlegend=False, legendgroup=group, **axes,
    )  # fmt: skip


def method_styles(methods: pd.Series) -> dict[str, tuple[str, str]]:
    """Colour and dash of each method; those that the package does not know take what is left, by name.

    Where `methods` is categorical, all its categories count, so that a part of a study looks like the whole.
    """
    names = methods.cat.categories if isinstance(methods.dtype, pd.CategoricalDtype) else methods.unique()
    others = sorted(set(map(str, names)) - set(METHOD_STYLES))
    left = [*((c, d) for d in ("dot", "dashdot") for c in COLORS), (COLORS[0], "dash")]
    return METHOD_STYLES | {name: left[i % len(left)] for i, name in enumerate(others)}


def method_curves(
    curves: pd.DataFrame, *, y: str, title: str, x: str = "step", panel: str = "agents", reference: float | None = None
) -> Figure:
    """One line a method with its 95 % band, one panel for each value of a column; colour and dash are the method's own.

    `curves`: as `compare.accuracy_curves` returns them. Raises KeyError for a missing column, and ValueError where a panel
    has several values of a method at one place.
    """
    for column in (x, panel, "method", "mean", "low", "high", "seeds"):
        if column not in curves:
            raise KeyError(f"no column {column!r}; there are {', '.join(map(str, curves.columns))}")
    if curves.duplicated([panel, "method", x]).any():
        raise ValueError(
            f"several values of a method at one {x} in one panel: choose rows, or another column for panel="
        )
    styles, seen = method_styles(curves["method"]), set()
    names = list(dict.fromkeys(map(str, curves[panel])))
    fig = _panels(f"{title} ({_seeds_told(curves['seeds'])})", _PER_AGENT.get(x, _label(x)), y, names, height=330)
    for i, name in enumerate(names, start=1):
        x_axis, y_axis = (f"{letter}{i if i > 1 else ''}" for letter in "xy")
        axes = {"xaxis": x_axis, "yaxis": y_axis}
        for method, line in curves[curves[panel].astype(str) == name].groupby("method", observed=True, sort=False):
            color, dash = styles[method]
            line = line.sort_values(x).astype({"mean": np.float32}).set_index(x)
            mode = "lines+markers" if len(line) <= 12 else "lines"
            if (band := line.dropna(subset=["low", "high"])).shape[0] > 1:
                _band(fig, band, color, method, alpha=0.15, **axes)
            fig.add_scatter(
                x=line.index, y=line["mean"], name=method, mode=mode, line={"color": color, "dash": dash},
                legendgroup=method, showlegend=method not in seen, customdata=line["seeds"],
                hovertemplate="%{y:.3f} (%{customdata} seeds)", **axes,
            )  # fmt: skip
            seen.add(method)
        if reference is not None:
            _line(fig, reference, xref=f"{x_axis} domain", yref=y_axis)
    return fig


def _seeds_told(seeds: pd.Series) -> str:
    if seeds.dropna().empty:
        return "no seed in common"
    few, many = int(seeds.min()), int(seeds.max())
    if many == 1:
        return "one seed, so no interval"
    return f"95 % intervals over {many if few == many else f'{few} to {many}'} seeds"


def forest(differences: pd.DataFrame, *, title: str, margin: float = 0.0) -> Figure:
    """Differences with their 95 % intervals, one row a method and one panel a set; open circles are the single agents.

    `differences`: as `compare.paired_differences` returns them. `margin` (a share) draws the strip that counts as no worse.
    """
    styles = method_styles(differences["method"])
    names = list(dict.fromkeys(map(str, differences["agents"])))
    most = max(differences[differences["agents"] == n]["method"].nunique() for n in names)
    told = _seeds_told(differences["seeds"][differences["seeds"] > 0])
    fig = _panels(f"{title} ({told})", "difference (percentage points)", "method", names, height=60 + 34 * max(most, 3))
    for i, name in enumerate(names, start=1):
        x_axis, y_axis = (f"{letter}{i if i > 1 else ''}" for letter in "xy")
        axes = {"xaxis": x_axis, "yaxis": y_axis}
        rows = differences[differences["agents"] == name]
        methods = [str(m) for m in dict.fromkeys(rows.sort_values("method")["method"])]
        for place, method in enumerate(methods):
            mine = rows[rows["method"] == method]
            single, mean = mine[mine["agent"] != MEAN], mine[mine["agent"] == MEAN]
            color = styles[method][0]
            fig.add_scatter(
                x=100 * single["mean"], y=[place - 0.25] * len(single), mode="markers", showlegend=False, text=single["agent"],
                hovertemplate="%{text} %{x:.1f}", name=method,
                marker={"color": color, "size": 7, "symbol": "circle-open", "opacity": 0.9}, **axes,
            )  # fmt: skip
            fig.add_scatter(
                x=100 * mean["mean"], y=[place] * len(mean), mode="markers", showlegend=False, name=method,
                error_x={"type": "data", "array": 100 * (mean["high"] - mean["mean"]), "color": color, "thickness": 2.5},
                marker={"color": color, "size": 9, "symbol": "circle", "opacity": 1.0},
                hovertemplate=f"{method} %{{x:.1f}}", **axes,
            )  # fmt: skip
        axis = fig.layout[f"yaxis{i if i > 1 else ''}"]
        axis.update(tickvals=list(range(len(methods))), ticktext=methods, range=[len(methods) - 0.5, -0.5], title=None)
        if margin:
            low = {"x0": -100 * margin, "x1": 100 * margin, "y0": -0.5, "y1": len(methods) - 0.5}
            fig.add_shape(
                type="rect", **low, xref=x_axis, yref=y_axis, line={"width": 0}, layer="below",
                fillcolor="rgba(128,128,128,0.25)",
            )  # fmt: skip
        fig.add_shape(
            type="line", x0=0, x1=0, y0=-0.5, y1=len(methods) - 0.5, xref=x_axis, yref=y_axis,
            line={"color": GREY, "dash": "dot", "width": 1},
        )  # fmt: skip
    return fig.update_layout(margin={"l": 170})


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


def _line(fig: Figure, y: float, xref: str = "paper", yref: str = "y") -> None:
    line = {"color": GREY, "dash": "dot", "width": 1}
    fig.add_shape(type="line", xref=xref, yref=yref, x0=0, x1=1, y0=y, y1=y, line=line)


_LABELS = {
    "step": "step", "rollouts": "rollouts sampled, all agents", "tokens": "tokens sampled, all agents",
    "seconds": "wall time (s)", "avg@1": "accuracy on test problems (share right)", "reward": "mean reward of rollouts",
}  # fmt: skip

_PER_AGENT = {"rollouts": "rollouts sampled, per agent", "tokens": "tokens sampled, per agent"}


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

    height = 8.0 * 0.48 * (fig.layout.height or HEIGHT) / HEIGHT if fig.layout.meta else width * 0.48
    canvas = Canvas(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(canvas)
    meta = fig.layout.meta or {"panels": [""], "columns": 1}
    columns = meta["columns"]
    axes = canvas.subplots(-(-len(meta["panels"]) // columns), columns, squeeze=False).flatten()
    for shape in fig.layout.shapes:
        _draw_shape(axes[_panel_of(shape.xref)], shape)
    for trace in fig.data:
        if trace.type != "scatter":
            raise NotImplementedError(f"no static picture for traces of type {trace.type}")
        _draw_scatter(axes[_panel_of(trace.xaxis)], trace)
    for i, (ax, name) in enumerate(zip(axes, meta["panels"], strict=False)):
        _draw_axes(ax, fig.layout[f"xaxis{i + 1 if i else ''}"], fig.layout[f"yaxis{i + 1 if i else ''}"], name)
    for ax in axes[len(meta["panels"]) :]:
        ax.set_visible(False)
    _title_and_legend(canvas, axes, _literal(fig.layout.title.text))
    return _small_png(canvas)


def _small_png(canvas) -> bytes:
    """256 colours are enough for lines on nothing, and make a third of the size: pages hold many figures."""
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    canvas.savefig(drawn, format="png", transparent=True)
    Image.open(drawn).quantize(256, method=Image.Quantize.FASTOCTREE).save(small, format="PNG", optimize=True)
    return small.getvalue()


def _panel_of(axis: str | None) -> int:
    """Position of the panel that "x", "x3" or "x3 domain" means; "paper" means the first."""
    digits = "".join(c for c in axis or "" if c.isdigit())
    return int(digits) - 1 if digits else 0


def _draw_axes(ax, x, y, name: str) -> None:
    if name:
        ax.set_title(_literal(name), fontsize=10, color=GREY)
    ax.set_xlabel(x.title.text)
    ax.set_ylabel(y.title.text)
    for axis, set_scale in ((x, ax.set_xscale), (y, ax.set_yscale)):
        if axis.type == "log":  # setting "linear" would take the names off an axis of categories
            set_scale("log")
    if x.tickvals is not None:
        ax.set_xticks(x.tickvals)
    elif x.title.text == _LABELS["step"]:
        ax.xaxis.get_major_locator().set_params(integer=True)
    if y.tickvals is not None:
        ax.set_yticks(y.tickvals, [_literal(text) for text in y.ticktext])
    if y.range is not None:
        ax.set_ylim(y.range)
    _grey(ax)


def _title_and_legend(canvas, axes, title: str) -> None:
    if len(axes) == 1 and not axes[0].get_title():
        axes[0].set_title(title, loc="left", fontsize=11, color=GREY)
    else:
        canvas.suptitle(title, x=0.01, ha="left", fontsize=11, color=GREY)
    named = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if named:
        # beside the axes: inside, it would lie on the points
        canvas.legend(named.values(), named, frameon=False, labelcolor=GREY, fontsize=9, loc="outside right upper")


def _draw_shape(ax, shape) -> None:
    if shape.type == "rect":
        ax.fill_between([shape.x0, shape.x1], shape.y0, shape.y1, color=(0.5, 0.5, 0.5, 0.25), linewidth=0)
    elif shape.x0 == shape.x1:
        ax.axvline(shape.x0, color=GREY, linestyle=":", linewidth=1)
    else:
        ax.axhline(shape.y0, color=GREY, linestyle=":", linewidth=1)


def _draw_scatter(ax, trace) -> None:
    if trace.fill == "toself":
        r, g, b, a = (float(v) for v in trace.fillcolor[5:-1].split(","))
        ax.fill(trace.x, trace.y, color=(r / 255, g / 255, b / 255, a), linewidth=0)
    elif trace.mode == "markers":
        color, hollow = trace.marker.color, str(trace.marker.symbol).endswith("open")
        ax.scatter(
            trace.x, trace.y, s=0.4 * (trace.marker.size or 5) ** 2, alpha=trace.marker.opacity,
            facecolors="none" if hollow else color, edgecolors=color if hollow else "none", linewidths=0.7,
            label=None if trace.showlegend is False else _literal(trace.name),
        )  # fmt: skip
        if trace.error_x.array is not None:
            bars = {"fmt": "none", "ecolor": trace.error_x.color, "elinewidth": 1.8, "capsize": 3}
            ax.errorbar(trace.x, trace.y, xerr=trace.error_x.array, **bars)
    else:
        style = {"color": trace.line.color, "linestyle": DASHES[trace.line.dash or "solid"], "linewidth": 1.6}
        label = None if trace.showlegend is False else _literal(trace.name)
        marker = "o" if "markers" in trace.mode else None
        ax.plot(trace.x, trace.y, marker=marker, markersize=3.5, label=label, **style)


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
