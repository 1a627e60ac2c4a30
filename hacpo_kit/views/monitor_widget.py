"""The monitor's widget: buttons, curves, settings and rollouts. Every command is a method of the training."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import ipywidgets as w

from hacpo_kit.config import Config
from hacpo_kit.records import StepResult
from hacpo_kit.views import monitor_panes as panes
from hacpo_kit.views.background import BackgroundTraining
from hacpo_kit.views.live import LiveFigure
from hacpo_kit.views.markup import escaped
from hacpo_kit.views.rollout_view import problem_names

# settings with an input; `monitor.change` can change others too
SETTINGS = {
    "Peer rollouts": ("alpha", "delta", "delta_step", "window"),
    "Update": ("lr", "minibatch", "eps_low", "eps_high"),
    "Rollout": ("temperature", "n", "prompts_per_step", "max_new_tokens"),
}
TYPING_DELAY = 0.15  # seconds: a typed value may reach the kernel after the click that followed it


class MonitorWidget:
    """The widgets of one training: `root` holds them all, `draw` brings them up to date."""

    def __init__(self, training: BackgroundTraining):
        self.training = training
        self._lock = threading.RLock()  # the page and the drawing thread may draw at the same time
        self.result: StepResult | None = None  # the step whose rollouts are shown
        figure = panes.figure(training)
        self.curves = LiveFigure(figure, panes.traces(training), panes.layout(training)).add_class("hacpo-curves")
        self.progress = w.IntProgress(min=0, max=training.steps, layout=w.Layout(width="220px"))
        names = ("status", "table", "warnings", "changes", "refused", "rollouts")
        self.html = {name: w.HTML().add_class(f"hacpo-{name}") for name in names}
        self.start = self._button("start", "play", "Train in the background; the page stays usable", training.start)
        self.pause = self._button("pause", "pause", "End after this step with a checkpoint", training.pause)
        self.stop = self._button("stop", "stop", "End after this step with a checkpoint", training.stop)
        self.pause.description, self.stop.description = "Pause", "Stop"
        buttons = w.HBox([self.start, self.pause, self.stop, self.progress], layout=w.Layout(align_items="center"))
        panels = w.Accordion([self._rollouts_panel(), self._settings_panel()], selected_index=0)
        panels.titles = ("Rollouts of the last step", "Settings for the next step")
        parts = [buttons, self.html["status"], self.curves, self.html["table"], self.html["warnings"], panels]
        self.root = w.VBox(parts).add_class("hacpo-monitor")
        self.draw()

    def _button(self, name: str, icon: str, tooltip: str, command: Callable) -> w.Button:
        button = w.Button(icon=icon, tooltip=tooltip, layout=w.Layout(width="120px")).add_class(f"hacpo-{name}")
        button.on_click(lambda _: self.do(command))
        return button

    def _rollouts_panel(self) -> w.Widget:
        self.problem = w.Dropdown(description="Problem", layout=w.Layout(width="520px")).add_class("hacpo-problem")
        self.problem.observe(lambda _: self._show_problem(), "index")
        self.hold = w.ToggleButton(description="Hold this step", tooltip="Keep these rollouts while training continues")
        self.hold.add_class("hacpo-hold").observe(lambda _: self.draw(), "value")
        return w.VBox([w.HBox([self.problem, self.hold]), self.html["rollouts"]])

    def _settings_panel(self) -> w.Widget:
        self.inputs: dict[str, w.Widget] = {}
        columns = w.HBox([self._column(*group) for group in SETTINGS.items()], layout=w.Layout(flex_flow="row wrap"))
        self.apply = w.Button(
            description="Apply at the next step", button_style="primary", layout=w.Layout(width="200px")
        )
        self.apply.on_click(lambda _: threading.Timer(TYPING_DELAY, self.do, [self._apply]).start())
        reset = w.Button(description="Reset", tooltip="Show the current settings").add_class("hacpo-reset")
        reset.on_click(lambda _: self._fill())
        self._fill()
        buttons = w.HBox([self.apply.add_class("hacpo-apply"), reset])
        return w.VBox([columns, buttons, self.html["refused"], w.HTML("<b>Changes</b>"), self.html["changes"]])

    def _column(self, title: str, names: Sequence[str]) -> w.Widget:
        rows: list[w.Widget] = [w.HTML(f"<b>{title}</b>")]
        for name in names:
            value, about = getattr(self.training.config, name), Config.model_fields[name]
            if not math.isfinite(value):
                continue  # an input for numbers has no infinity
            kind = w.IntText if isinstance(value, int) else w.FloatText
            field = kind(description=name, style={"description_width": "120px"}, layout=w.Layout(width="240px"))
            self.inputs[name] = field.add_class(f"hacpo-set-{name}")
            unit = about.json_schema_extra["unit"]
            meaning = escaped(about.description + (f" ({unit})" if unit != "–" else ""))
            style = "opacity:.75;font-size:85%;width:300px;line-height:1.2"
            rows += [field, w.HTML(f"<div style='{style}'>{meaning}</div>")]
        return w.VBox(rows, layout=w.Layout(margin="0 16px 8px 0"))

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────

    def do(self, command: Callable) -> None:
        """Run a command, show why it was refused, and draw."""
        self.html["refused"].value = ""
        try:
            command()
        except (ValueError, TypeError) as error:
            self.html["refused"].value = f"<b>Not changed:</b> <code>{escaped(error, 2000)}</code>"
        self.draw()

    def _apply(self) -> None:
        current, pending = self.training.config, self.training.pending
        values = {name: field.value for name, field in self.inputs.items()}
        # a pending setting that was set back is a change too
        self.training.change(**{k: v for k, v in values.items() if v != getattr(current, k) or k in pending})

    def _fill(self) -> None:
        for name, field in self.inputs.items():
            field.value = self.training.pending.get(name, getattr(self.training.config, name))

    # ── drawing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def draw(self) -> None:
        """Bring everything up to date, with one message for the curves."""
        with self._lock:
            training = self.training
            self.start.description = "Resume" if training.step else "Start"
            self.start.disabled = (training.running and training.status == "running") or training.status == "finished"
            self.pause.disabled = self.stop.disabled = not training.running
            self.progress.value = training.step
            for name in ("status", "table", "warnings", "changes"):
                self.html[name].value = getattr(panes, f"{name}_html")(training)
            self.curves.send(panes.traces(training), panes.layout(training))
            if training.last not in (None, self.result) and not (self.hold.value and self.result):
                self.result = training.last
                self.problem.options = problem_names(self.result)
                self.problem.index = self.result.pool.informative_problem
                self._show_problem()

    def _show_problem(self) -> None:
        with self._lock:
            if self.problem.index is not None:
                self.html["rollouts"].value = panes.rollouts_html(self.result, self.problem.index)
