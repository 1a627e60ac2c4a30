"""Plotly figures from records and run folders, each with a static picture beside it; no mathematics of its own."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from hacpo_kit.config import Config
from hacpo_kit.experiments.statistics import MEAN, interval
from hacpo_kit.models.memory import PARTS as MEMORY_PARTS
from hacpo_kit.models.memory import usable
from hacpo_kit.objective import clip_band
from hacpo_kit.records import Batch, StepStats
from hacpo_kit.views.pictures import COLORS, DASHES, GREY, HEIGHT, draw
from hacpo_kit.views.pictures import stages as stages

if TYPE_CHECKING:
    from hacpo_kit.advantages import Capability
    from hacpo_kit.models.memory import Estimate

# a method looks the same on every page: the ablations of hacpo, seldom beside the other methods, share their colours dashed
METHOD_STYLES = {
    "hacpo": (COLORS[0], "solid"), "gspo": (COLORS[1], "solid"), "gspo_x2": (COLORS[4], "solid"),
    "naive": (COLORS[2], "solid"), "grpo": (COLORS[3], "solid"), "hacpo_equal": (COLORS[5], "solid"),
    "no_capability_baseline": (COLORS[1], "dash"), "no_discrepancy": (COLORS[2], "dash"), "alpha=0": (COLORS[3], "dash"),
    "delta_step=0": (COLORS[4], "dash"), "no_clip": (COLORS[5], "dash"),
}  # fmt: skip
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
        return draw(self, width or (10.0 if beside else 8.0), dpi or (90 if beside else 110))


AXIS = {
    "gridcolor": "rgba(128,128,128,0.25)", "zeroline": False, "linecolor": GREY, "ticks": "outside", "tickcolor": GREY,
}  # fmt: skip


def figure(title: str, x: str, y: str, *, height: int = HEIGHT, **layout: Any) -> Figure:
    """An empty figure in the package's style, for traces of one's own: scatter, bar and heatmap have a static picture too."""
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
    fig.update_layout(figure(title, x, y, height=total).layout)
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
    fig = figure(title or f"{_label(metric).capitalize()}{note}", _label(x), _label(metric))
    for name, group in rows.groupby(list(by), sort=False):
        color, dash = _style(rows, by, name)
        # agents of one run are averaged first: runs, not agents, are independent
        per_run = group.groupby([x, "run"] if count > 1 else [x])[metric].mean()
        curve = interval(per_run, x) if count > 1 else per_run.to_frame("mean")
        label = plain(" · ".join(map(str, name)), 200)
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
    """One line a column against the index, through the values it has; `bands` gives a column its low and high.

    `colors` and `dashes`: for each column a place in COLORS and a name in DASHES; `level`: a dotted horizontal line; `log`: "x",
    "y" or "xy" for logarithmic axes, which have no place for values of 0 and below (ValueError). `x` defaults to the name of
    the index.
    """
    for axis, values in (("x", curves.index), ("y", curves.to_numpy())):
        if axis in log and (np.asarray(values, float) <= 0).any():
            raise ValueError(f"log={log!r}, but the {axis} values of {title!r} are not all above 0")
    fig = figure(title, x or str(curves.index.name), y)
    fig.update_layout({f"{axis}axis": {"type": "log"} for axis in log})
    for place, column in enumerate(curves):
        color = COLORS[(colors[place] if colors else place) % len(COLORS)]
        if bands and column in bands:
            _band(fig, pd.DataFrame(dict(zip(("low", "high"), bands[column], strict=True))), color, column)
        known = curves[column].dropna()  # it may have values at some places only: its line goes from one to the next
        fig.add_scatter(
            x=known.index, y=known, name=plain(column, 200), mode="lines+markers", legendgroup=column, showlegend=True,
            line={"color": color, "dash": dashes[place] if dashes else "solid"},
        )  # fmt: skip
    if pd.api.types.is_integer_dtype(curves.index) and len(curves) <= 24 and "x" not in log:
        fig.update_xaxes(tickvals=list(curves.index))  # there is no half of a step or an update
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
    titles = [plain(name, 200) for name in names]
    fig = _panels(f"{title} ({_seeds_told(curves['seeds'])})", _PER_AGENT.get(x, _label(x)), y, titles, height=330)
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
                x=line.index, y=line["mean"], name=plain(method, 200), mode=mode, line={"color": color, "dash": dash},
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
    titles, height = [plain(name, 200) for name in names], 60 + 34 * max(most, 3)
    fig = _panels(f"{title} ({told})", "difference (percentage points)", "method", titles, height=height)
    for i, name in enumerate(names, start=1):
        x_axis, y_axis = (f"{letter}{i if i > 1 else ''}" for letter in "xy")
        axes = {"xaxis": x_axis, "yaxis": y_axis}
        rows = differences[differences["agents"] == name]
        methods = [str(m) for m in dict.fromkeys(rows.sort_values("method")["method"])]
        labels = [plain(method, 200) for method in methods]
        for place, method in enumerate(methods):
            mine = rows[rows["method"] == method]
            single, mean = mine[mine["agent"] != MEAN], mine[mine["agent"] == MEAN]
            color = styles[method][0]
            fig.add_scatter(
                x=100 * single["mean"], y=[place - 0.25] * len(single), mode="markers", showlegend=False,
                text=[plain(a, 100) for a in single["agent"]], hovertemplate="%{text} %{x:.1f}", name=labels[place],
                marker={"color": color, "size": 7, "symbol": "circle-open", "opacity": 0.9}, **axes,
            )  # fmt: skip
            fig.add_scatter(
                x=100 * mean["mean"], y=[place] * len(mean), mode="markers", showlegend=False, name=labels[place],
                error_x={"type": "data", "array": 100 * (mean["high"] - mean["mean"]), "color": color, "thickness": 2.5},
                marker={"color": color, "size": 9, "symbol": "circle", "opacity": 1.0},
                hovertemplate=f"{labels[place]} %{{x:.1f}}", **axes,
            )  # fmt: skip
        axis = fig.layout[f"yaxis{i if i > 1 else ''}"]
        axis.update(tickvals=list(range(len(methods))), ticktext=labels, range=[len(methods) - 0.5, -0.5], title=None)
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
    fig = figure("Capability ratio: who is ahead, and by how much", "step", "ω (first ÷ second)")
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    for color, (a, b) in zip(_cycle(COLORS), pairs, strict=False):
        past = [capability.at(s) for s in range(1, steps + 1)]
        values = [c.ratio(a, b) if a in c and b in c else None for c in past]  # a gap where one had no scorable rollout
        fig.add_scatter(
            x=list(range(1, steps + 1)), y=values, name=f"ω({plain(a, 100)}, {plain(b, 100)})", mode="lines+markers",
            line={"color": color}, showlegend=True,
        )  # fmt: skip
    _line(fig, 1.0)
    return fig


def capability_matrix(capability: Capability, step: int | None = None) -> Figure:
    """ω of every agent (row) to every other (column), n × n, after `step` steps or all of them (eq. 9).

    Agents without a scorable rollout in the window have no ω, and the title names them. Raises ValueError if that is all of
    them, and for a step that was not observed.
    """
    last = max(map(len, capability.history.values()), default=0)
    when = last if step is None else step
    if not 0 <= when <= last:
        raise ValueError(f"step={step}: there are the steps 1 to {last}")
    past = capability.at(when)
    names = [name for name in past.history if name in past]  # a capability is what had a scorable rollout
    if not names:
        raise ValueError(f"after step {when} no agent has a scorable rollout in the window: there is no capability yet")
    cells = np.array([[past.ratio(a, b) for b in names] for a in names])
    unknown = ", ".join(plain(name, 60) for name in past.history if name not in names)
    told = f" (without {unknown}: nothing scorable)" if unknown else ""
    fig = figure(
        f"Capability ratios after step {when}: row ÷ column{told}", "second agent", "first agent", height=HEIGHT
    )
    labels = [plain(name, 100) for name in names]
    # the logarithm: twice as strong and half as strong are equally far from 1; the shades span what there is, and where all
    # are within 10^0.15 = 1.4 times of each other they stay pale
    shades = np.log10(cells)
    limit = max(0.15, float(np.abs(shades).max()))
    fig.add_heatmap(
        z=shades, x=labels, y=labels, text=[[f"{v:.2f}" for v in row] for row in cells], texttemplate="%{text}",
        hovertemplate="ω(%{y}, %{x}) = %{text}<extra></extra>", zmin=-limit, zmax=limit, showscale=False,
        textfont={"color": "black"}, colorscale=[[0, "#f0a878"], [0.5, "#f4f4f4"], [1, "#8fc3e8"]],
    )  # fmt: skip
    axes = {"xaxis_type": "category", "yaxis_type": "category"}  # an agent may be called "1"
    return fig.update_layout(yaxis_autorange="reversed", margin_l=170, **axes)


def advantages(batches: Batch | Sequence[Batch], *, weighted: bool = False) -> Figure:
    """How many rollouts of each source got which advantage, one panel a learner (eqs. 6-7).

    `weighted`: what the update uses, ω(source, learner)·A for peer rollouts (eq. 10).

    Raises ValueError without any batch, and for an advantage that is not finite.
    """
    many = [batches] if isinstance(batches, Batch) else list(batches)
    if not many:
        raise ValueError("there is no batch to show")
    what = "ω·A" if weighted else "A"
    values = [(b.advantages * b.weights if weighted else b.advantages).numpy() for b in many]
    for b, value in zip(many, values, strict=True):
        if bad := int((~np.isfinite(value)).sum()):
            raise ValueError(f"{bad} advantages of learner {b.learner!r} are not finite")
    most = max([1.0, *(float(np.abs(v).max(initial=0)) for v in values)])
    edges = np.linspace(-most, most, 32)  # an odd number of bins: zero has its own
    sources = list(dict.fromkeys(name for b in many for name in b.pool.agents))
    names, named = [f"{plain(b.learner, 100)} learns" for b in many], set()  # in the legend
    title = f"{'Weighted advantages' if weighted else 'Advantages'} of the rollouts that each learner uses, by who wrote them"
    fig = _panels(title, f"advantage {what} (standard deviations)", "rollouts", names, height=330)
    for i, (batch, value) in enumerate(zip(many, values, strict=True), start=1):
        writer = np.array([r.source for r in batch.rollouts])
        for source in sources:
            if not (writer == source).any():
                continue
            counts, _ = np.histogram(value[writer == source], edges)
            fig.add_bar(
                x=(edges[1:] + edges[:-1]) / 2, y=counts, name=plain(source, 100), legendgroup=source,
                showlegend=source not in named,
                marker={"color": COLORS[sources.index(source) % len(COLORS)]}, xaxis=f"x{i if i > 1 else ''}",
                yaxis=f"y{i if i > 1 else ''}", hovertemplate=f"{what} about %{{x:.2f}}: %{{y}} rollouts",
            )  # fmt: skip
            named.add(source)
    return fig.update_layout(barmode="stack", bargap=0.05)


def clip_bands(configs: Config | Mapping[str, Config], *, updates: int = 8, stats: StepStats | None = None) -> Figure:
    """Where the band of peer rollouts begins at every mini-batch, a line a config; up to s = 1 they teach (eqs. 13-14).

    `stats` adds the peer ratios of a real step as points.

    Raises ValueError for a config without such a band: one that uses own rollouts only, or clips peer ones like own ones.
    """
    named = {"": configs} if isinstance(configs, Config) else dict(configs)
    for name, config in named.items():
        if config.sources == "own" or config.peer_update != "hacpo":
            why = "uses no peer rollouts" if config.sources == "own" else "clips peer rollouts like own ones"
            raise ValueError(f"config {name or config.method!r} has no band for peer rollouts: it {why}")
    if updates < 0:
        raise ValueError(f"updates={updates}: it must be 0 or more")
    m = np.arange(updates + 1)
    fig = figure("The band closes: below the line a peer rollout teaches nothing", _M, "importance ratio s")
    for color, (name, config) in zip(_cycle(COLORS), named.items(), strict=False):
        lower = [clip_band(int(i), config.delta, config.delta_step)[0] for i in m]
        label = plain(name, 100) if name else f"δ = {config.delta:g}, δ_step = {config.delta_step:g}"
        band = pd.DataFrame({"low": lower, "high": 1.0}, index=m)
        _band(fig, band, color, label, alpha=0.12)
        fig.add_scatter(
            x=m, y=lower, name=label, mode="lines+markers", line={"color": color}, legendgroup=label, showlegend=True
        )
    if stats is not None:
        peer = stats.to_frame().query("not own")
        points, told = thinned(peer)
        jitter = np.random.default_rng(0).uniform(-0.3, 0.3, len(points))
        fig.add_scatter(
            x=points["updates_made"] + jitter, y=points["ratio"], mode="markers",
            name=f"peer rollouts of {plain(stats.learner, 100)}", showlegend=True,
            marker={"color": GREY, "size": 5, "symbol": "circle", "opacity": 0.5},
        )  # fmt: skip
        fig.update_layout(title_text=f"{fig.layout.title.text}{told}")
    _line(fig, 1.0)
    return fig


def gradient_shares(
    shares: pd.DataFrame, *, title: str = "Whose rollouts make the gradient", x: str | None = None
) -> Figure:
    """Stacked bars: one bar a row of `shares`, one colour a column ("own", then the sources), in percent of the whole.

    `x` defaults to the name of the index, or to the mini-batch. The shares of `gradients.gradient_parts` add up to 1; a
    part that pulls against the whole has a negative one.

    Raises ValueError if a row does not add up to 1 (rows of NaN, without any gradient, stay empty).
    """
    shares = shares.astype(float)
    with np.errstate(invalid="ignore"):
        sums = shares.sum(axis=1, min_count=1)
    # an infinite share makes the sum NaN
    if len(wrong := sums[shares.notna().any(axis=1) & ~((sums - 1).abs() <= 0.01)]):
        raise ValueError(f"the shares of {wrong.index[0]!r} add up to {wrong.iloc[0]:.3f}, not 1")
    fig = figure(title, x or str(shares.index.name or _M), "share of the gradient (%)")
    for color, part in zip(_cycle(COLORS), shares, strict=False):
        fig.add_bar(
            x=list(shares.index), y=100 * shares[part], name=plain(part, 100), showlegend=True, marker={"color": color},
            hovertemplate="%{y:.0f} %",
        )  # fmt: skip
    if pd.api.types.is_integer_dtype(shares.index) and len(shares):
        fig.update_xaxes(tickvals=list(shares.index)[:: -(-len(shares) // 24)])
    return fig.update_layout(barmode="relative", bargap=0.25)


def importance_ratios(stats: StepStats | Sequence[StepStats]) -> Figure:
    """Importance ratios of one step, mini-batch by mini-batch: own ones near 1, peer ones in and outside the band."""
    many = [stats] if isinstance(stats, StepStats) else list(stats)
    frame = pd.concat([s.to_frame() for s in many], ignore_index=True)
    rng = np.random.default_rng(0)
    names = " and ".join(plain(s.learner, 60) for s in many)
    kinds = {
        "own": (frame["own"] & ~frame["clipped"], COLORS[0], "circle"),
        "own, clipped: no gradient": (frame["own"] & frame["clipped"], COLORS[0], "circle-open"),
        "peer, in the band": (~frame["own"] & ~frame["clipped"], COLORS[2], "circle"),
        "peer, clipped: no gradient": (~frame["own"] & frame["clipped"], COLORS[1], "circle-open"),
    }
    fig = figure(f"Importance ratios in one step of {names}", _M, "importance ratio s")
    told = " (it made no update)" if frame.empty else ""
    for name, (rows, color, symbol) in kinds.items():
        points = frame[rows]
        if points.empty:
            continue
        points, note = thinned(points)
        told = told or note
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
    return fig.update_layout(title_text=f"{fig.layout.title.text}{told}")


def thinned(points: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """At most `MAX_POINTS` rows, chosen at random and always the same ones, and a note for the title ("" if all are there)."""
    if len(points) <= MAX_POINTS:
        return points, ""
    return points.sample(MAX_POINTS, random_state=0).sort_index(), f" ({MAX_POINTS:,} points of a kind shown)"


def ratio_history(history: Sequence[Mapping[str, Any]], agent: str) -> Figure:
    """Mean importance ratio of own and peer rollouts over the steps of a run, with the range from least to greatest."""
    lines = [line for line in history if agent in line["agents"] and "own_ratio_mean" in line["agents"][agent]]
    fig = figure(f"Importance ratios of {agent} over training (mean, and the range of a step)", "step", "ratio s")
    for who, color in (("own", COLORS[0]), ("peer", COLORS[2])):
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


def memory(estimate: Estimate, *, title: str = "Memory on the device, at most, in each phase of a step") -> Figure:
    """What fills the device in each phase of a run, one bar an agent and phase (GiB); dotted: what it can hold."""
    frame = estimate.to_frame()
    names = [f"{plain(agent, 40)} · {phase}" for agent, phase in frame.index]
    fig = figure(title, "GiB", "agent · phase", height=max(260, 110 + 34 * len(names)), barmode="stack", bargap=0.25)
    for part, color in zip(MEMORY_PARTS, COLORS, strict=True):
        if frame[part].max() > 0:
            hover = f"%{{y}}: {part} %{{x:.1f}} GiB"
            fig.add_bar(
                x=frame[part], y=names, orientation="h", name=part, marker={"color": color}, hovertemplate=hover
            )
    fig.add_vline(x=usable(estimate.device_memory) / 2**30, line={"color": GREY, "dash": "dot", "width": 1})
    fig.update_layout(meta={"panels": [""], "columns": 1}, margin={"l": 190})
    return fig.update_yaxes(autorange="reversed", showgrid=False)


def _line(fig: Figure, y: float, xref: str = "paper", yref: str = "y") -> None:
    line = {"color": GREY, "dash": "dot", "width": 1}
    fig.add_shape(type="line", xref=xref, yref=yref, x0=0, x1=1, y0=y, y1=y, line=line)


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Table:
    """Rows as an HTML table in which nothing that a model wrote can become markup, formula or script."""

    def __init__(self, frame: pd.DataFrame, limit: int = 20):
        self.frame, self.limit = frame, limit

    def __repr__(self) -> str:
        # a terminal obeys control characters
        shown = self.frame.head(self.limit).rename(columns=lambda c: visible(c, 80))
        return shown.map(lambda v: visible(v, 80) if isinstance(v, str | list | dict) else v).to_string()

    def _repr_html_(self) -> str:
        shown = self.frame.head(self.limit)
        head = "".join(f"<th style='{_HEAD}'>{escaped(c)}</th>" for c in shown)
        rows = "".join(f"<tr>{''.join(_cell(v) for v in row)}</tr>" for row in shown.itertuples(index=False))
        left = len(self.frame) - len(shown)
        more = f"<div style='color:{GREY}'>{left:,} more rows are not shown</div>" if left else ""
        return literal(
            f"<table style='border-collapse:collapse'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"
        )


def literal(markup: str) -> str:
    """HTML in which MathJax leaves dollar signs alone: $…$ in an answer is text."""
    return f"<div class='tex2jax_ignore mathjax_ignore' style='overflow-x:auto'>{markup}</div>"


_HEAD = f"text-align:left;padding:4px 10px;border-bottom:1px solid {GREY}"
_LONGEST = 400  # characters of a cell


def _cell(value: Any) -> str:
    if value is None or value is pd.NA or (isinstance(value, float | np.floating) and np.isnan(value)):
        text, align = f"<span style='color:{GREY}'>–</span>", "left"
    elif isinstance(value, bool | np.bool_):
        text, align = ("yes" if value else "no"), "left"
    elif isinstance(value, float | np.floating):
        text, align = f"{value:.4g}", "right"
    elif isinstance(value, int | np.integer):
        text, align = str(value), "right"
    else:
        text, align = f"<code style='white-space:pre-wrap;unicode-bidi:isolate'>{escaped(value)}</code>", "left"
    return f"<td style='text-align:{align};padding:3px 10px;vertical-align:top'>{text}</td>"


def escaped(text: Any, longest: int = _LONGEST) -> str:
    """Text that HTML shows as it is: markup escaped, control characters named, and cut with a count of what is missing."""
    return html.escape(visible(text, longest)).replace("$", "&#36;")


def plain(text: Any, longest: int = _LONGEST) -> str:
    """Text that plotly shows as it is: as `escaped`, in the entities that plotly knows, and no template for a tooltip."""
    return escaped(text, longest).replace("&quot;", "&#34;").replace("%{", "%&#123;")


def visible(text: Any, longest: int = _LONGEST) -> str:
    """Text with control characters named, cut with a count of what is missing."""
    text = str(text)
    cut = f" … (+{len(text) - longest:,} characters)" if len(text) > longest else ""
    return _INVISIBLE.sub(lambda c: "\\" + f"U{ord(c[0]):08x}".replace("U0000", "u"), text[:longest]) + cut


# control and format characters, which turn the direction of writing or cannot be seen, and halves of a character, which no
# page can be sent; line feed and tab stay
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def rollout_table(rollouts: Any, columns: Sequence[str] | None = None, *, limit: int = 20) -> Table:
    """Rollouts as a table that is safe to show: of a `Pool`, a list of dicts, or a frame with a row a rollout.

    Raises KeyError, naming it, for a missing column.
    """
    frame = rollouts.to_frame() if hasattr(rollouts, "to_frame") else pd.DataFrame(rollouts)
    known = [c for c in _ROLLOUT_COLUMNS if c in frame]
    columns = (known if "text" in known else list(frame)) if columns is None else list(columns)
    for column in columns:
        if column not in frame:
            raise KeyError(f"no column {column!r}; there are {', '.join(map(str, frame.columns))}")
    return Table(frame[columns], limit)


_ROLLOUT_COLUMNS = ("prompt", "gold", "source", "text", "reward", "status", "length", "mean_logp")
_M = "mini-batch m (optimiser updates already made)"


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
