"""What the monitor shows of a background training: curves, status, table, warnings, changes and rollouts."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pandas as pd

from hacpo_kit.records import Rollout, StepResult
from hacpo_kit.runs.run import history_frame
from hacpo_kit.views.background import BackgroundTraining
from hacpo_kit.views.figure import DOTTED, Figure, panel_axes, panels
from hacpo_kit.views.markup import escaped, literal
from hacpo_kit.views.style import COLORS, GREY
from hacpo_kit.views.tables import Table

MAX_POINTS = 200  # of a curve
MAX_ROLLOUTS = 16  # that are shown per agent
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


def _values(training: BackgroundTraining, agent: str, metric: str) -> list[tuple[int, float]]:
    """Return the steps with a value of this metric of an agent, and the values."""
    name = f"avg@{training.options.get('eval_k', 1)}" if metric == "accuracy" else metric
    values = [(line["step"], line["agents"].get(agent, {}).get(name)) for line in training.history]
    return [(step, value) for step, value in values if value is not None]


def traces(training: BackgroundTraining) -> list[dict[str, Any]]:
    """Return the curves of all panels."""
    curves = []
    for place, metric, dash in CURVES:
        for i, agent in enumerate(training.agents):
            with training.lock:
                points = _values(training, agent.name, metric)
            points = [*points[: -1 : _interval(len(points))], *points[-1:]]
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
        last = history_frame(training.history[-1:])
        tests = {agent.name: _values(training, agent.name, "accuracy")[-1:] for agent in training.agents}
    if last.empty:
        return ""
    last = last.set_index("agent")
    # a sum is missing if one of its metrics is
    sums = {name: last.reindex(columns=metrics).sum(axis=1, skipna=False) for name, metrics in COLUMNS.items()}
    accuracy = pd.DataFrame({name: {f"accuracy (step {s})": v for s, v in last} for name, last in tests.items()}).T
    table = pd.concat([accuracy, pd.DataFrame(sums)], axis=1)
    return Table(table.rename_axis("agent").reset_index())._repr_html_()


def warnings_html(training: BackgroundTraining) -> str:
    """Return the warnings of the training; of warnings that differ only in numbers, the last."""
    with training.lock:
        lines = [
            f"warning{f' ({count} times, the last)' if count > 1 else ''}: <code>{escaped(message)}</code>"
            for message, count in training.warnings.values()
        ]
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


def problem_names(result: StepResult) -> list[str]:
    """Return one line per problem: the beginning of the prompt and the mean reward of its rollouts."""
    names = []
    for i, problem in enumerate(result.pool.problems, start=1):
        rewards = [r.reward for r in result.pool if r.problem == problem.id and r.reward is not None]
        prompt = " ".join(problem.prompt_text.split())
        mean = f"mean reward {sum(rewards) / len(rewards):.2f}" if rewards else "not scorable"
        names.append(f"{i}. {prompt[:60]}{'…' if len(prompt) > 60 else ''} ({mean})")
    return names


def rollouts_html(result: StepResult, problem: int | None = None) -> str:
    """Return the rollouts of one problem, one column per agent, by default of a problem whose rewards differ.

    Each has its text, reward and status, and how each learner used it.
    """
    problem = result.pool.problems[result.pool.informative_problem if problem is None else problem]
    uses = _uses(result)
    columns = []
    for place, agent in enumerate(result.pool.agents):
        rollouts = [(i, r) for i, r in enumerate(result.pool) if r.problem == problem.id and r.source == agent]
        cards = "".join(
            _card(r, {name: used.get(i, "not used") for name, used in uses.items()}) for i, r in rollouts[:MAX_ROLLOUTS]
        )
        hidden = len(rollouts) - MAX_ROLLOUTS
        more = f"<div style='color:{GREY}'>{hidden} more are not shown</div>" if hidden > 0 else ""
        head = f"<b style='color:{COLORS[place % len(COLORS)]}'>{escaped(agent)}</b>"
        columns.append(f"<div style='flex:1 1 320px;min-width:260px'>{head}{cards}{more}</div>")
    prompt = f"{_code(problem.prompt_text, 600)} &nbsp; gold answer: {_code(problem.gold, 200)}"
    top = f"<div>step {result.metrics['step']}: {prompt}</div>"
    return literal(f"{top}<div style='display:flex;flex-wrap:wrap;gap:16px'>{''.join(columns)}</div>")


def _uses(result: StepResult) -> dict[str, dict[int, str]]:
    """Return advantage A and importance ratio s for each learner, by the position of the rollout in the pool."""
    uses = {}
    for name, batch in result.batches.items():
        uses[name] = {i: f"A {a:+.2f}" for i, a in zip(batch.index, batch.advantages.tolist(), strict=True)}
        for part in result.stats[name].minibatches:
            for i, ratio, clipped in zip(part.index, part.ratio, part.clipped, strict=True):
                uses[name][int(i)] += f", s {ratio:.3f}{', clipped' if clipped else ''}"
    return uses


def _card(rollout: Rollout, uses: dict[str, str]) -> str:
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    color = COLORS[2] if rollout.reward else GREY
    learners = "".join(f"<div>{escaped(name)}: {use}</div>" for name, use in uses.items())
    cut = "" if rollout.ended else ", cut at the length limit"
    return (
        f"<div style='border-left:3px solid {color};padding:2px 8px;margin:6px 0;line-height:1.35'>"
        f"{_code(rollout.text, 400)}<div style='color:{GREY};font-size:90%'>"
        f"<div><b>{reward}</b>, {escaped(rollout.status)}{cut}</div>{learners}</div></div>"
    )


def _code(text: str, longest: int) -> str:
    return f"<code style='white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate'>{escaped(text, longest)}</code>"
