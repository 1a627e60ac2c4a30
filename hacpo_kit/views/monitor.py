"""The monitor: a background training that displays itself, with buttons, live curves, settings and rollouts."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import ipywidgets as w

from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent
from hacpo_kit.records import StepResult
from hacpo_kit.tasks.problems import Problem
from hacpo_kit.views import monitor_panes as panes
from hacpo_kit.views.background import BackgroundTraining
from hacpo_kit.views.figure import Figure
from hacpo_kit.views.live import Live, LiveFigure
from hacpo_kit.views.markup import escaped

# settings with an input; `Monitor.change` can change others too
SETTINGS = {
    "Peer rollouts": ("alpha", "delta", "delta_step", "window"),
    "Update": ("lr", "minibatch", "eps_low", "eps_high"),
    "Rollout": ("temperature", "n", "prompts_per_step", "max_new_tokens"),
}
DRAW_INTERVAL = 0.25  # seconds between two updates of the page
TYPING_DELAY = 0.15  # seconds: a typed value may reach the kernel after the click that followed it


def monitor(
    agents: Agent | Sequence[Agent],
    problems: Sequence[Problem],
    config: Config,
    steps: int,
    *,
    out: str | Path,
    test: Sequence[Problem] | None = None,
    autostart: bool = False,
    **options: Any,
) -> Monitor:
    """Return a training that runs in the background of the notebook, with live curves and settings that can change.

    Display it and use its buttons, or call `start()`, `pause()`, `stop()`, `change(lr=3e-5)` and `wait()`. It runs `train`
    in a thread with the same `options` (`eval_every`, `save_every`, `callbacks`, …) and the same run folder `out`. A second
    call with the same `out`, also in another kernel, resumes from there. `autostart` starts at once.

    Raises TypeError for an option that `train` does not have.
    """
    made = Monitor(agents, problems, config, steps, out=out, test=test, **options)
    return made.start() if autostart else made


class Monitor(BackgroundTraining, Live):
    """A background training with a widget, whose buttons call its methods."""

    def start(self) -> Self:
        """Start or resume the training; see `BackgroundTraining.start`."""
        thread = self._thread
        super().start()
        if self._thread is not thread:
            threading.Thread(target=self._keep_drawing, args=(self._thread,), name="monitor", daemon=True).start()
        return self

    def change(self, **settings: Any) -> Self:
        """Change settings from the next step on; see `BackgroundTraining.change`."""
        super().change(**settings)
        self._draw()
        return self

    def figure(self) -> Figure:
        """Return the curves as a static figure."""
        return panes.figure(self)

    def html(self) -> str:
        """Return what stands below the static figure."""
        blocks = [panes.status_html(self), panes.table_html(self), panes.warnings_html(self)]
        blocks.append(f"<b>Changes</b><br>{panes.changes_html(self)}")
        if self.last is not None:
            blocks.append(f"<b>Rollouts of the last step</b><br>{panes.rollouts_html(self.last)}")
        return "".join(f"<div style='margin:8px 0'>{block}</div>" for block in blocks if block)

    # ── the widget ───────────────────────────────────────────────────────────────────────────────────────────────

    def build(self) -> w.Box:
        """Return the widget: buttons, status, curves, table, warnings, rollouts and settings."""
        self._drawing = threading.RLock()  # the page and the drawing thread may draw at the same time
        self._shown: StepResult | None = None  # the step whose rollouts are shown
        self._curves = LiveFigure(self.figure(), panes.traces(self), panes.layout(self)).add_class("hacpo-curves")
        self._progress = w.IntProgress(min=0, max=self.steps, layout={"width": "220px"})
        names = ("status", "table", "warnings", "changes", "refused", "rollouts")
        self._html = {name: w.HTML().add_class(f"hacpo-{name}") for name in names}
        self._buttons = [
            self._button("start", "Start", "Train in the background; the page stays usable", self.start, icon="play"),
            self._button("pause", "Pause", "End after this step with a checkpoint", self.pause, icon="pause"),
            self._button("stop", "Stop", "End after this step with a checkpoint", self.stop, icon="stop"),
        ]
        panels = w.Accordion([self._rollouts_panel(), self._settings_panel()], selected_index=0)
        panels.titles = ("Rollouts of the last step", "Settings for the next step")
        buttons = w.HBox([*self._buttons, self._progress], layout={"align_items": "center"})
        parts = [buttons, self._html["status"], self._curves, self._html["table"], self._html["warnings"], panels]
        self._root = w.VBox(parts).add_class("hacpo-monitor")
        self._draw()
        return self._root

    def _button(self, name: str, label: str, tooltip: str, command: Callable, **style: Any) -> w.Button:
        button = w.Button(description=label, tooltip=tooltip, **style).add_class(f"hacpo-{name}")
        button.on_click(lambda _: self._do(command))
        return button

    def _rollouts_panel(self) -> w.Widget:
        self._problem = w.Dropdown(description="Problem", layout={"width": "520px"}).add_class("hacpo-problem")
        self._problem.observe(lambda _: self._show_problem(), "index")
        self._hold = w.ToggleButton(description="Hold this step", tooltip="Keep these rollouts").add_class("hacpo-hold")
        self._hold.observe(lambda _: self._draw(), "value")
        return w.VBox([w.HBox([self._problem, self._hold]), self._html["rollouts"]])

    def _settings_panel(self) -> w.Widget:
        self._inputs: dict[str, w.Widget] = {}
        columns = w.HBox([self._column(*group) for group in SETTINGS.items()], layout={"flex_flow": "row wrap"})
        apply = lambda: threading.Timer(TYPING_DELAY, self._do, [self._apply_inputs]).start()  # noqa: E731
        buttons = [
            self._button("apply", "Apply at the next step", "Record the change", apply, layout={"width": "200px"}),
            self._button("reset", "Reset", "Show the settings in force", self._fill),
        ]
        self._fill()
        changes = [w.HTML("<b>Changes</b>"), self._html["changes"]]
        return w.VBox([columns, w.HBox(buttons), self._html["refused"], *changes])

    def _column(self, title: str, names: Sequence[str]) -> w.Widget:
        rows: list[w.Widget] = [w.HTML(f"<b>{title}</b>")]
        for name in names:
            value, about = getattr(self.config, name), Config.model_fields[name]
            if math.isfinite(value):  # an input for numbers has no infinity
                kind = w.IntText if isinstance(value, int) else w.FloatText
                field = kind(description=name, style={"description_width": "120px"}, layout={"width": "240px"})
                self._inputs[name] = field.add_class(f"hacpo-set-{name}")
                style = "opacity:.75;font-size:85%;width:300px;line-height:1.2"
                rows += [field, w.HTML(f"<div style='{style}'>{escaped(about.description)}</div>")]
        return w.VBox(rows, layout={"margin": "0 16px 8px 0"})

    def _do(self, command: Callable) -> None:
        """Run the command of a button, show why it was refused, and draw."""
        self._html["refused"].value = ""
        try:
            command()
        except (ValueError, TypeError) as error:
            self._html["refused"].value = f"<b>Not changed:</b> <code>{escaped(error, 2000)}</code>"
        self._draw()

    def _apply_inputs(self) -> None:
        values = {name: field.value for name, field in self._inputs.items()}
        # a pending setting that was set back is a change too
        self.change(**{k: v for k, v in values.items() if v != getattr(self.config, k) or k in self.pending})

    def _fill(self) -> None:
        for name, field in self._inputs.items():
            field.value = self.pending.get(name, getattr(self.config, name))

    # ── drawing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _keep_drawing(self, thread: threading.Thread) -> None:
        """Draw every change until the training thread ends, in a thread of its own so that drawing does not delay training."""
        while thread.is_alive():
            if self.changed.wait(0.5):
                self.changed.clear()
                self._draw()
                time.sleep(DRAW_INTERVAL)
        self._draw()
        if "_root" in vars(self):
            with contextlib.suppress(Exception):  # the page may be closed
                self._display_picture(update=True)

    def _draw(self) -> None:
        """Bring the widget up to date, if there is one, with one message for the curves."""
        if "_root" not in vars(self):
            return
        with self._drawing:
            start, pause, stop = self._buttons
            start.description = "Resume" if self.step else "Start"
            start.disabled = (self.running and self.status == "running") or self.status == "finished"
            pause.disabled = stop.disabled = not self.running
            self._progress.value = self.step
            for name in ("status", "table", "warnings", "changes"):
                self._html[name].value = getattr(panes, f"{name}_html")(self)
            self._curves.send(panes.traces(self), panes.layout(self))
            if self.last not in (None, self._shown) and not (self._hold.value and self._shown):
                self._shown = self.last
                self._problem.options = panes.problem_names(self.last)
                self._problem.index = self.last.pool.informative_problem
                self._show_problem()

    def _show_problem(self) -> None:
        with self._drawing:
            if self._problem.index is not None:
                self._html["rollouts"].value = panes.rollouts_html(self._shown, self._problem.index)
