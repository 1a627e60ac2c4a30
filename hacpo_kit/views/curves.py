"""Curves of runs, and differences between methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from hacpo_kit.experiments.statistics import MEAN, interval
from hacpo_kit.views.figure import DOTTED, Figure, add_curve, figure, mark_integers, panel_axes, panels
from hacpo_kit.views.markup import plain
from hacpo_kit.views.style import COLORS, DASHES, method_styles
from hacpo_kit.views.tables import select

LABELS = {
    "rollouts": "rollouts sampled, all agents", "tokens": "tokens sampled, all agents", "seconds": "wall time (s)",
    "avg@1": "accuracy on test problems", "reward": "mean reward of rollouts",
}  # fmt: skip
LABELS_PER_AGENT = {"rollouts": "rollouts sampled, per agent", "tokens": "tokens sampled, per agent"}


def learning_curves(
    runs: pd.DataFrame,
    *,
    metric: str = "avg@1",
    x: str = "step",
    by: Sequence[str] = ("method",),
    title: str | None = None,
) -> Figure:
    """Plot the mean of a metric against steps, rollouts or tokens, one line per group, with a 95 % interval over runs.

    `runs` has one row per step, agent and run, with the columns `x`, `metric`, those in `by`, and `run` for the interval. The
    colour of a line is that of the first column in `by`, its dash that of the last one. Raises KeyError for a missing column.
    """
    rows = select(runs.assign(run=runs.get("run", 0)), [x, metric, *by, "run"]).dropna(subset=[metric])
    count = rows.groupby(list(by))["run"].nunique().max()
    label = LABELS.get(metric, metric)
    note = f" (95 % interval over {count} runs each)" if count > 1 else ""
    # the agents of a run are averaged first, because only runs are independent
    groups = rows.astype({x: float}).groupby(list(by), sort=False)
    curves = {names: interval(group.groupby([x, "run"])[metric].mean(), x) for names, group in groups}
    first, last = (list(rows[column].unique()) for column in (by[0], by[-1]))
    return lines(
        pd.concat({" · ".join(map(str, names)): curve for names, curve in curves.items()}, axis=1).sort_index(),
        title=title or f"{label.capitalize()}{note}", x=LABELS.get(x, x), y=label,
        colors=[first.index(names[0]) for names in curves],
        dashes=[list(DASHES)[last.index(names[-1]) % len(DASHES)] for names in curves],
    )  # fmt: skip


def lines(
    curves: pd.DataFrame,
    *,
    title: str,
    y: str,
    x: str | None = None,
    colors: Sequence[int] | None = None,
    dashes: Sequence[str] | None = None,
    log: str = "",
    level: float | None = None,
) -> Figure:
    """Plot one line per column against the index; a line connects the values that are not missing.

    `colors` has a position in COLORS for each column, `dashes` a name in DASHES; `x` is by default the name of the index; `level`
    adds a dotted horizontal line. If the columns have two levels, a name and then "mean", "low" and "high", the area from low to
    high is filled. `log` makes axes logarithmic: "x", "y" or "xy". Raises ValueError if a value on such an axis is not above 0.
    """
    for axis, values in (("x", curves.index), ("y", curves.to_numpy())):
        if axis in log and (np.asarray(values, float) <= 0).any():
            raise ValueError(f"log={log!r}, but the {axis} values of {title!r} are not all above 0")
    fig = figure(title, x or str(curves.index.name), y)
    fig.update_layout({f"{axis}axis": {"type": "log"} for axis in log})
    for place, name in enumerate(curves.columns.unique(0)):
        curve = curves[name].to_frame("mean") if curves.columns.nlevels == 1 else curves[name]
        color = COLORS[(colors[place] if colors else place) % len(COLORS)]
        add_curve(fig, curve.dropna(subset=["mean"]), name, color, dashes[place] if dashes else "solid")
    if pd.api.types.is_integer_dtype(curves.index) and "x" not in log:
        mark_integers(fig, curves.index)
    if level is not None:
        fig.add_hline(level, line=DOTTED)
    return fig


def method_curves(
    curves: pd.DataFrame, *, y: str, title: str, x: str = "step", panel: str = "agents", reference: float | None = None
) -> Figure:
    """Plot one line per method with its 95 % interval, one panel for each value of a column.

    `curves` is what `compare.accuracy_curves` returns; `reference` adds a dotted horizontal line. Raises KeyError for a
    missing column, and ValueError if a panel has several values of a method at one place.
    """
    curves = select(curves, [x, panel, "method", "mean", "low", "high", "seeds"])
    if curves.duplicated([panel, "method", x]).any():
        raise ValueError(f"several values of a method at one {x} in one panel: select rows, or choose another panel=")
    styles = method_styles(curves["method"])
    names, shown = list(dict.fromkeys(map(str, curves[panel]))), set()
    label = LABELS_PER_AGENT.get(x, LABELS.get(x, x))
    fig = panels(f"{title} ({_seeds(curves['seeds'])})", label, y, names, height=330)
    for (name, method), line in curves.groupby([panel, "method"], observed=True, sort=False):
        line = line.sort_values(x).astype({"mean": np.float32}).set_index(x)
        axes = panel_axes(names.index(str(name)))
        add_curve(fig, line, method, *styles[method], showlegend=method not in shown, **axes)
        shown.add(method)
    return fig if reference is None else fig.add_hline(reference, line=DOTTED)


def _seeds(seeds: pd.Series) -> str:
    few, many = seeds.min(), seeds.max()
    if pd.isna(many):
        return "no common seed"
    if many == 1:
        return "one seed, no interval"
    return f"95 % intervals over {f'{few:.0f} to ' if few < many else ''}{many:.0f} seeds"


def forest(differences: pd.DataFrame, *, title: str, margin: float = 0.0) -> Figure:
    """Plot differences with their 95 % intervals, one row per method and one panel per set of agents.

    `differences` is what `compare.paired_differences` returns. Filled circles are the mean of the agents, open circles single
    agents. `margin` (a fraction) marks the differences that count as no worse.
    """
    styles = method_styles(differences["method"])
    names = list(dict.fromkeys(map(str, differences["agents"])))
    most = differences.groupby("agents", observed=True)["method"].nunique().max()
    note = _seeds(differences["seeds"][differences["seeds"] > 0])
    height = 60 + 34 * max(most, 3)
    fig = panels(f"{title} ({note})", "difference (percentage points)", "", names, height=height, columns=1)
    for place, name in enumerate(names):
        rows = differences[differences["agents"] == name].sort_values("method", kind="stable")
        methods = list(dict.fromkeys(map(str, rows["method"])))
        labels = [plain(method, 200) for method in methods]
        for position, method in enumerate(methods):
            _add_differences(fig, rows[rows["method"] == method], position, styles[method][0], panel_axes(place))
        axis = fig.layout[panel_axes(place)["yaxis"].replace("y", "yaxis")]
        axis.update(tickvals=list(range(len(methods))), ticktext=labels, range=[len(methods) - 0.5, -0.5])
    if margin:
        fig.add_vrect(-100 * margin, 100 * margin, fillcolor="rgba(128,128,128,0.25)", line_width=0, layer="below")
    return fig.add_vline(0, line=DOTTED)


def _add_differences(fig: Figure, rows: pd.DataFrame, position: int, color: str, axes: Mapping[str, str]) -> None:
    """Add the open circles of single agents, then the mean of the agents with its interval."""
    for single, symbol in ((True, "circle-open"), (False, "circle")):
        drawn = rows[(rows["agent"] != MEAN) == single]
        error = {"type": "data", "array": 100 * (drawn["high"] - drawn["mean"]), "color": color, "thickness": 2.5}
        fig.add_scatter(
            x=100 * drawn["mean"], y=[position - 0.25 * single] * len(drawn), mode="markers", showlegend=False,
            text=[plain(agent, 100) for agent in drawn["agent"]], name="", hovertemplate="%{text}: %{x:.1f}",
            marker={"color": color, "size": 7 if single else 9, "symbol": symbol}, error_x=None if single else error, **axes,
        )  # fmt: skip
