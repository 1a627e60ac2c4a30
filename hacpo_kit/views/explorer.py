"""The explorer: controls over recorded experience that show the effect of other settings. `whatif` computes the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as w
import numpy as np
import pandas as pd

from hacpo_kit.advantages import Capability
from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent
from hacpo_kit.records import Pool, StepStats
from hacpo_kit.runs.experience import Experience, recorded_steps
from hacpo_kit.runs.run import Run
from hacpo_kit.views.explorer_controls import Controls, changes_text, config_of, control_values
from hacpo_kit.views.explorer_figure import Panels
from hacpo_kit.views.figure import Figure
from hacpo_kit.views.live import Live, LiveFigure
from hacpo_kit.views.markup import escaped, plain
from hacpo_kit.views.style import GREY
from hacpo_kit.views.tables import Table
from hacpo_kit.views.whatif import Replay, WhatIf

ROWS = 12  # of the table
ORDERS = {
    "largest gradient": "rollouts with the largest gradient contribution |∂ objective / ∂ mean log π|",
    "clipped": "clipped rollouts, by the gradient contribution that they would have without clipping",
    "changed most": "rollouts whose gradient contribution differs most from the recorded one",
}
NOTE = (
    "Rollouts, rewards and log-probabilities are as recorded. Training with other settings would also have moved the weights "
    "differently, and with them the ratios of later mini-batches and all later steps. The peer share of the gradient assumes "
    "that ∇ mean log π has the same norm for every rollout; gradients.gradient_parts measures the actual gradients."
)
# what changes inside a part does not lay out the whole page again
STYLE = "<style>.hk-explorer-plot, .hk-explorer-table {contain: content}</style>"


def explorer(
    source: Pool | Experience | Run | str | Path,
    agent: Agent | str | None = None,
    capability: Capability | None = None,
    config: Config | None = None,
    *,
    stats: StepStats | None = None,
    step: int | None = None,
) -> Explorer:
    """Return an interactive view of one step: the effect of other settings on the same rollouts, without a model.

    `source` is a run folder or a `Run` (any recorded `step`, by default the last), an `Experience`, or a scored pool. A
    pool needs `agent` (the learner) and `capability`, and `config` unless it is the default. Without the `stats` that
    `update` returned, the learner's current weights score the pool once. For recorded experience, `agent` names the
    learner that is shown first.

    Raises ValueError or TypeError for arguments that are missing or do not fit, FileNotFoundError without a record.
    """
    learner = agent.name if isinstance(agent, Agent) else agent
    if isinstance(source, Pool):
        if not isinstance(agent, Agent) or capability is None:
            raise TypeError("a pool needs the learner and the capability: explorer(pool, agents[0], capability)")
        source = Experience.of_pool(source, agent, capability, config or Config(), stats, step=step)
    elif not (config is stats is capability is None):
        raise TypeError("capability=, config= and stats= belong to a pool; recorded experience has its own")
    if isinstance(source, Run):
        run, source = source, source.folder
        if source is None or not recorded_steps(source):  # only the last step is in memory
            if run.last is None or step not in (None, run.state.step):
                raise FileNotFoundError("this run has no recorded experience; call train with out=… and record_every=1")
            source = Experience.of_step(run.last, run.agents, run.state.step)
    if isinstance(source, Experience):
        return Explorer(lambda _: source, [source.step], learner)
    if not isinstance(source, (str, Path)):
        raise TypeError(f"source={source!r}: explorer takes a run folder, a Run, an Experience or a Pool")
    step = Experience.of_run(source, step).step
    return Explorer(lambda s: Experience.of_run(source, s), recorded_steps(source), learner, step)


class Explorer(Live):
    """The view that `explorer` returns. `move` sets the controls from code; `now` and `table` hold what is shown."""

    def __init__(self, load: Callable, steps: Sequence[int | None], learner: str | None, step: int | None = None):
        self._load, self.steps, self.order = load, list(steps), next(iter(ORDERS))
        self._open(self.steps[-1] if step is None else step, learner)

    def _open(self, step: int | None, learner: str | None) -> None:
        """Show a step and a learner with the recorded settings."""
        experience = self._load(step)
        replay = Replay(experience, learner)
        panels = Panels(replay)
        # everything that can fail is above: after an error the old step is still shown
        self.experience, self.replay, self.panels = experience, replay, panels
        self.step, self.learner = step, replay.learner
        self.recorded_values = self.values = control_values(experience.config)
        self.recorded = self.now = panels.recorded
        self._draw()

    @property
    def config(self) -> Config:
        """The settings that the controls stand for."""
        return config_of(self.values, self.experience.config)

    def move(self, **values: Any) -> Explorer:
        """Set controls: alpha, delta, delta_step, window, m (None: each rollout's own mini-batch), and the four switches.

        Raises TypeError for an unknown control, and what `Replay.at` raises; then nothing changes.

        >>> view.move(alpha=3.0, clipping=False)  # doctest: +SKIP
        """
        if unknown := set(values) - set(self.values):
            raise TypeError(f"unknown control {', '.join(sorted(unknown))}; there are {', '.join(self.values)}")
        self._set({**self.values, **values})
        return self

    def _set(self, values: Mapping[str, Any]) -> None:
        self.now = self.replay.at(config_of(values, self.experience.config), updates_made=values["m"])
        self.values = dict(values)
        self._draw()

    @property
    def title(self) -> str:
        """The learner, the step and the changed settings in one line."""
        step = "" if self.step is None else f" in step {self.step}"
        changes = changes_text(self.values, self.recorded_values)
        return f"Gradient of {plain(self.learner, 60)}{step}: {changes or 'the recorded settings'}"

    def figure(self) -> Figure:
        """Return the figure as it is shown, with the recorded settings for comparison."""
        return self.panels.figure(self.now, self.title)

    def table(self, order: str | None = None) -> Table:
        """Return the rollouts that come first in one of the `ORDERS`, by default the one that is shown."""
        return _table(self.panels, self.now, order or self.order)

    def html(self) -> str:
        """Return summary and table, with every text escaped."""
        return f"{_summary(self.panels, self.now)}<p>{ORDERS[self.order]}</p>{self.table()._repr_html_()}"

    # ── the widget ───────────────────────────────────────────────────────────────────────────────────────────────

    def build(self) -> w.Box:
        """Return the widget: controls, summary, figure and table."""
        figure = self.figure().update_layout(showlegend=False, margin_t=70, height=600)
        self._plot = LiveFigure(figure, self.panels.traces(self.now), self.panels.layout(self.now, self.title))
        self._plot.add_class("hk-explorer-plot")
        self._controls = Controls(
            self.steps,
            on_move=lambda values: self._from_page(self._set, values),
            on_open=lambda step, learner: self._from_page(self._open, step, learner),
        )
        self._order = w.Dropdown(
            options=list(ORDERS), value=self.order, description="rollouts, sorted by:",
            layout={"width": "420px"}, style={"description_width": "180px"},
        ).add_class("hk-order")  # fmt: skip
        self._order.observe(self._sorted, "value")
        self._summary, self._list = w.HTML().add_class("hk-explorer-summary"), w.HTML().add_class("hk-explorer-table")
        self._write()
        legend = w.HTML(self.panels.legend()).add_class("hk-explorer-legend")
        style = w.HTML(STYLE, layout={"display": "none"})
        parts = [style, self._controls.box, self._summary, legend, self._plot, self._order, self._list]
        return w.VBox(parts, layout={"width": "100%", "max_width": "1280px"}).add_class("hk-explorer")

    def _draw(self) -> None:
        if "widget" in vars(self):
            self._plot.send(self.panels.traces(self.now), self.panels.layout(self.now, self.title))
            self._write()

    def _write(self) -> None:
        self._controls.show(self.values, self.replay, self.step)
        self._summary.value = _summary(self.panels, self.now)
        self._list.value = self.table()._repr_html_()

    def _sorted(self, change: Any) -> None:
        self.order = change.new
        self._write()

    def _from_page(self, action: Callable, *arguments: Any) -> None:
        """Do what a control asks for; if it cannot be shown, say why and reset the controls."""
        try:
            action(*arguments)
        except (ValueError, KeyError, OSError) as error:
            self._write()
            reason = error.args[0] if isinstance(error, KeyError) else error
            self._summary.value = f"<b>Cannot be shown:</b> {escaped(reason)}"


def _summary(panels: Panels, now: WhatIf) -> str:
    """Return the effect of the settings in a few numbers, and the limits of a what-if, as HTML."""
    excluded = ", ".join(f"{count} {escaped(reason, 40)}" for reason, count in panels.replay.excluded.items())
    parts = [f"<b>{len(now.row):,} rollouts</b>{f' (excluded: {excluded})' if excluded else ''}"]
    for source in sorted(set(now.source[~now.own])):
        omega = now.weight[now.source == source][0]
        parts.append(f"ω({escaped(source, 40)}, {escaped(now.learner, 40)}) = {omega:.3f}")
    if (peer := ~now.own).any():
        unclipped = [f"{(~x.clipped[peer]).mean():.0%}" for x in (now, panels.recorded)]
        share = [f"{1 - x.loc[now.learner].sum():.0%}" for x in (now.shares(), panels.recorded_shares)]
        parts.append("peer rollouts not clipped: {} (recorded {})".format(*unclipped))
        parts.append("peer share of the gradient: {} (recorded {})".format(*share))
    else:
        parts.append("this learner used its own rollouts only, so no control has an effect")
    trained = panels.replay.experience.trained
    before = "" if trained else " Scored before the first update of this step: own ratios are 1."
    numbers = " · ".join(f"<span style='white-space:nowrap'>{part}</span>" for part in parts)
    return f"<div style='line-height:1.5'>{numbers}<br><span style='color:{GREY}'>{NOTE}{before}</span></div>"


def _table(panels: Panels, now: WhatIf, order: str) -> Table:
    unclipped = np.abs(now.advantage) * now.weight * now.ratio
    recorded = panels.recorded.coefficient
    key = {
        "largest gradient": np.abs(now.coefficient),
        "clipped": np.where(now.clipped, unclipped, 0.0),
        "changed most": np.abs(now.coefficient - recorded),
    }[order]
    top = np.argsort(-key, kind="stable")[:ROWS]
    top = top[key[top] > 0]
    texts = panels.replay.frame.iloc[now.row[top]]
    columns = {"reward": now.reward, "A": now.advantage, "s": now.ratio, "ω": now.weight, "m": now.minibatch,
               "clipped": now.clipped, "gradient": now.coefficient, "recorded gradient": recorded}  # fmt: skip
    frame = {name: texts[name].to_numpy() for name in ("source", "prompt", "text")}
    return Table(pd.DataFrame(frame | {name: values[top] for name, values in columns.items()}), limit=ROWS)
