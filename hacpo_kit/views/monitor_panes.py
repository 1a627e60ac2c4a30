"""What the monitor shows of a background training: curves, status, table, warnings, changes and rollouts."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pandas as pd

from hacpo_kit.records import StepResult
from hacpo_kit.runs.run import history_frame
from hacpo_kit.views.background import BackgroundTraining
from hacpo_kit.views.figure import DOTTED, Figure, panel_axes, panels
from hacpo_kit.views.markup import escaped, literal
from hacpo_kit.views.rollout_view import side_by_side
from hacpo_kit.views.style import COLORS
from hacpo_kit.views.tables import Table

MAX_POINTS = 200  # of a curve
MAX_WARNINGS = 20
# panel → label of its y axis
PANELS = {
    "accuracy on test problems": "accuracy", "mean reward of the rollouts": "mean reward", "capability P̂": "P̂ (mean reward)",
    "importance ratio s (dashed: peer)": "mean s of a step",
}  # fmt: skip
# panel, metric and dash of each agent's curves
CURVES = (
    (0, "accuracy", "solid"), (1, "reward", "solid"), (2, "capability", "solid"), (3, "own_ratio_mean", "solid"),
    (3, "peer_ratio_mean", "dash"),
)  # fmt: skip
# column of the table → metrics, whose values are added
COLUMNS = {
    "reward": ["reward"], "P̂": ["capability"], "s own": ["own_ratio_mean"], "s peer": ["peer_ratio_mean"],
    "clipped own": ["clip_own_low", "clip_own_high"], "clipped peer": ["clip_peer_low", "clip_peer_high"],
    "gradient norm": ["grad_norm"], "learning rate": ["lr"],
}  # fmt: skip
STATUS = {
    "pausing": "pausing after this step", "paused": "paused, saved",
    "stopping": "stopping after this step", "stopped": "stopped, saved",
}  # fmt: skip


def _tests(training: BackgroundTraining) -> list[tuple[int, dict[str, float]]]:
    """Return step and accuracy by agent of every evaluation on the test problems."""
    metric = f"avg@{training.options.get('eval_k', 1)}"
    found = ({n: v[metric] for n, v in line["agents"].items() if metric in v} for line in training.history)
    return [(line["step"], scores) for line, scores in zip(training.history, found, strict=True) if scores]


def traces(training: BackgroundTraining) -> list[dict[str, Any]]:
    """Return the curves of all panels."""
    with training.lock:
        tested = [(step, {n: {"accuracy": v} for n, v in scores.items()}) for step, scores in _tests(training)]
        trained = [(line["step"], line["agents"]) for line in training.history]
    tested, trained = _thinned(tested), _thinned(trained)
    curves = []
    for place, metric, dash in CURVES:
        for i, agent in enumerate(training.agents):
            values = [(step, a.get(agent.name, {}).get(metric)) for step, a in (trained if place else tested)]
            points = [(step, value) for step, value in values if value is not None]
            curves.append({
                "type": "scatter", "x": [step for step, _ in points], "y": [value for _, value in points],
                "mode": "lines+markers" if len(points) < 40 else "lines", "marker": {"size": 5}, "name": agent.name,
                "line": {"color": COLORS[i % len(COLORS)], "dash": dash}, "legendgroup": agent.name, "showlegend": place == 1,
                "hovertemplate": f"%{{y:.3f}} {metric}", **panel_axes(place),
            })  # fmt: skip
    return curves


def _interval(count: int) -> int:
    """Return the power of two that keeps at most MAX_POINTS of so many points."""
    return 1 << max(0, math.ceil(math.log2(max(count, 1) / MAX_POINTS)))


def _thinned(points: list) -> list:
    return [*points[: -1 : _interval(len(points))], *points[-1:]]


def layout(training: BackgroundTraining) -> dict[str, Any]:
    """Return the title, and a dotted line in every panel before the first step with a changed setting."""
    with training.lock:
        every, places = _interval(len(training.history)), sorted({line["from_step"] - 0.5 for line in training.changes})
        title = f"{training.first_config.method}: step {training.step} of {training.steps}"
    title += "; dotted: settings changed" if places else ""
    title += f"; every {every}th step and the last one drawn" if every > 1 else ""
    marks = [
        {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "xref": f"x{i}", "yref": f"y{i} domain", "line": DOTTED}
        for x in places for i in ("", *range(2, len(PANELS) + 1))
    ]  # fmt: skip
    return {"title.text": title, "shapes": marks}


def figure(training: BackgroundTraining) -> Figure:
    """Return the four panels: accuracy, reward, capability and importance ratio."""
    around = layout(training)
    fig = panels(around["title.text"], "step", "", list(PANELS), height=300).add_traces(traces(training))
    fig.update_xaxes(rangemode="tozero").update_yaxes(rangemode="tozero").update_layout(yaxis4_rangemode="normal")
    for i, unit in enumerate(PANELS.values(), start=1):
        fig.layout[f"yaxis{i}"].title.text = unit
    above = {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.06, "yanchor": "bottom"}
    return fig.update_layout(shapes=around["shapes"], legend=above, autosize=True, margin={"t": 80})


# ── HTML, in which every text is escaped ─────────────────────────────────────────────────────────────────────────


def status_html(training: BackgroundTraining) -> str:
    """Return status, step, time per step, and an error."""
    with training.lock:
        parts = [f"<b>{STATUS.get(training.status, training.status)}</b>", f"step {training.step} of {training.steps}"]
        if len(recent := training.history[-11:]) > 1:
            first, last = recent[0], recent[-1]
            seconds = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
            left = timedelta(seconds=round(seconds * (training.steps - training.step)))
            parts += [f"{seconds:.2g} s/step", *([f"about {left} left"] if training.running else [])]
        parts.append(f"run folder: <code>{escaped(training.folder.name)}</code>")
        if (error := training.error) is None:
            return literal(" · ".join(parts))
        text = escaped(f"{type(error).__name__}: {error}", 2000)
        failed = f"<b style='color:{COLORS[1]}'>The training failed</b>: <code>{text}</code>"
        resumes = f"Start resumes from the checkpoint of step {training.saved_step}."
        return literal(f"{' · '.join(parts)}<br>{failed} {resumes}")


def table_html(training: BackgroundTraining) -> str:
    """Return the metrics of the last step, one row per agent, with the accuracy of the last test."""
    with training.lock:
        last, tests = history_frame(training.history[-1:]), _tests(training)
    if last.empty:
        return ""
    last = last.set_index("agent")
    # a sum is missing if one of its metrics is
    sums = {name: last.reindex(columns=metrics).sum(axis=1, skipna=False) for name, metrics in COLUMNS.items()}
    accuracy = {f"accuracy (step {step})": pd.Series(scores) for step, scores in tests[-1:]}
    return Table(pd.DataFrame(accuracy | sums).rename_axis("agent").reset_index())._repr_html_()


def warnings_html(training: BackgroundTraining) -> str:
    """Return the warnings of the training; of warnings that differ only in numbers, the last."""
    with training.lock:
        found = list(training.warnings.values())
    lines = [
        f"warning{f' ({count} times, the last)' if count > 1 else ''}: <code>{escaped(message)}</code>"
        for message, count in found[:MAX_WARNINGS]
    ]
    lines += [f"{len(found) - MAX_WARNINGS} further warnings are not shown"] * (len(found) > MAX_WARNINGS)
    return literal("<br>".join(lines)) if lines else ""


def changes_html(training: BackgroundTraining) -> str:
    """Return the changes of settings with their first steps, and the pending ones."""
    with training.lock:
        changes = [(f"from step {c['from_step']}", c["setting"], c["old"], c["new"]) for c in training.changes]
        changes += [("pending", name, getattr(training.config, name), new) for name, new in training.pending.items()]
    lines = [
        f"{when}: <code>{escaped(name)}</code> {escaped(old)} → {escaped(new)}" for when, name, old, new in changes
    ]
    return literal("<br>".join(lines) or "no setting was changed")


def rollouts_html(result: StepResult, problem: int | None = None) -> str:
    """Return the rollouts of one problem side by side, by default of a problem whose rewards differ."""
    return literal(side_by_side(result, result.pool.informative_problem if problem is None else problem))
