"""The monitor's widget: buttons, curves, settings, rollouts. Every command is a method of the monitor."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from hacpo_kit.config import Config
from hacpo_kit.views.livefigure import LiveFigure
from hacpo_kit.views.markup import escaped
from hacpo_kit.views.rollout_view import problem_names

if TYPE_CHECKING:
    from hacpo_kit.records import StepResult
    from hacpo_kit.views.monitor import Monitor

# setting → least, greatest and step of its input; others of Config can be changed with monitor.change(...)
SETTINGS: dict[str, dict[str, tuple[float, float, float]]] = {
    "What others teach": {
        "alpha": (0, 20, 0.1), "delta": (0, 1, 0.05), "delta_step": (0, 1, 0.005), "window": (1, 1000, 1),
    },
    "Update": {
        "lr": (0, 1, 1e-5), "minibatch": (1, 1e6, 1), "eps_low": (0, 10, 1e-4), "eps_high": (0, 10, 1e-4),
    },
    "Rollout": {
        "temperature": (0.01, 10, 0.05), "n": (1, 1024, 1), "prompts_per_step": (1, 1e6, 1), "max_new_tokens": (1, 1e6, 1),
    },
}  # fmt: skip
SETTLES = 0.15  # seconds: what was typed last may reach the kernel after the click that followed it


class View:
    """The widgets of one monitor, `root` around them, and `draw`, which brings them up to date."""

    def __init__(self, monitor: Monitor):
        self.monitor = monitor
        self._lock = threading.RLock()  # the page and the painter may draw at once
        self.held: StepResult | None = None  # the step whose rollouts are shown
        self._filling = False  # options are being replaced: nobody has chosen anything
        self.curves = LiveFigure(monitor.figure()).add_class("hacpo-curves")
        self._marks = monitor.marks()  # as drawn
        self.progress = w.IntProgress(min=0, max=monitor.steps, layout=w.Layout(width="220px"))
        self.status, self.table, self.notes = (w.HTML().add_class(f"hacpo-{n}") for n in ("status", "table", "notes"))
        self.root = w.VBox([self._buttons(), self.status, self.curves, self.table, self.notes, self._panes()])
        self.root.add_class("hacpo-monitor")
        self.draw()

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _buttons(self) -> w.Widget:
        def button(css: str, icon: str, told: str, command) -> w.Button:
            made = w.Button(icon=icon, tooltip=told, layout=w.Layout(width="120px")).add_class(f"hacpo-{css}")
            made.on_click(lambda _: self._do(command))
            return made

        m = self.monitor
        self.start = button("start", "play", "Trains in the background; the page stays usable", m.start)
        self.pause = button("pause", "pause", "Ends after this step and saves; Resume goes on", m.pause)
        self.stop = button("stop", "stop", "Ends after this step and saves", m.stop)
        self.pause.description, self.stop.description = "Pause", "Stop"
        return w.HBox([self.start, self.pause, self.stop, self.progress], layout=w.Layout(align_items="center"))

    def _panes(self) -> w.Accordion:
        self.changes, self.refused = w.HTML().add_class("hacpo-changes"), w.HTML().add_class("hacpo-refused")
        self.inputs: dict[str, w.Widget] = {}
        columns = [self._column(title, names) for title, names in SETTINGS.items()]
        apply = w.Button(description="Apply at the next step", button_style="primary", layout=w.Layout(width="200px"))
        apply.add_class("hacpo-apply").on_click(lambda _: threading.Timer(SETTLES, self._do, [self._apply]).start())
        reset = w.Button(description="As they are now", layout=w.Layout(width="150px")).add_class("hacpo-reset")
        reset.on_click(lambda _: self._do(self.fill))
        settings = w.VBox(
            [w.HBox(columns, layout=w.Layout(flex_flow="row wrap")), w.HBox([apply, reset]), self.refused]
        )
        self.problem = w.Dropdown(description="Problem", layout=w.Layout(width="520px")).add_class("hacpo-problem")
        self.problem.observe(self._chosen, "index")
        self.hold = w.ToggleButton(
            description="Hold this step", tooltip="Keeps these rollouts while training goes on", icon="thumb-tack"
        ).add_class("hacpo-hold")
        self.hold.observe(lambda _: self._do(self._rollouts), "value")
        self.rollouts = w.HTML().add_class("hacpo-rollouts")
        answers = w.VBox([w.HBox([self.problem, self.hold]), self.rollouts])
        changed = w.VBox([w.HTML("<b>Changes</b>"), self.changes])
        panes = w.Accordion([answers, w.VBox([settings, changed])], selected_index=0)
        panes.titles = ("Rollouts of the last step", "Settings for the next step")
        self.fill()
        return panes

    def _column(self, title: str, names: dict[str, tuple[float, float, float]]) -> w.Widget:
        about = Config.model_fields
        rows: list[w.Widget] = [w.HTML(f"<b>{title}</b>")]
        for name, (least, greatest, step) in names.items():
            value = getattr(self.monitor.config, name)
            if not math.isfinite(value):
                continue  # an input for numbers has no infinity
            kind, number = (w.BoundedIntText, int) if isinstance(value, int) else (w.BoundedFloatText, float)
            field = kind(
                value, min=number(min(least, value)), max=number(max(greatest, value)), step=number(step),
                description=name, style={"description_width": "120px"}, layout=w.Layout(width="240px"),
            ).add_class(f"hacpo-set-{name}")  # fmt: skip
            unit = about[name].json_schema_extra["unit"]
            told = about[name].description + (f" ({unit})" if unit != "–" else "")
            field.tooltip = told
            self.inputs[name] = field
            rows += [
                field,
                w.HTML(f"<div style='opacity:.75;font-size:85%;width:300px;line-height:1.2'>{escaped(told)}</div>"),
            ]
        return w.VBox(rows, layout=w.Layout(margin="0 16px 8px 0"))

    # ── what somebody does ───────────────────────────────────────────────────────────────────────────────────────

    def _do(self, command) -> None:
        """A click: what cannot be is told in place; then all is drawn."""
        self.refused.value = ""
        try:
            command()
        except (ValueError, TypeError) as error:
            self.refused.value = f"<b>Not changed:</b> <code>{escaped(error, 2000)}</code>"
        self.draw()

    def _apply(self) -> None:
        now = self.monitor.config
        wanted = {name: field.value for name, field in self.inputs.items()}
        # a setting put back before its step came is a change too: of what waits
        waits = {name: v for name, v in wanted.items() if v != getattr(now, name) or name in self.monitor.pending}
        self.monitor.change(**waits)

    def fill(self) -> None:
        """The inputs show what is in force, or waits for the next step."""
        for name, field in self.inputs.items():
            field.value = self.monitor.pending.get(name, getattr(self.monitor.config, name))

    def _chosen(self, _: Any) -> None:
        if not self._filling:
            self._show_problem()

    # ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────

    def draw(self) -> None:
        """Brings everything up to date; one message for the curves."""
        with self._lock:
            m = self.monitor
            working = m.running
            self.start.description = {"ready": "Start", "paused": "Resume"}.get(
                m.status, "Go on" if m.step else "Start"
            )
            self.start.disabled = (working and m.status == "running") or m.status == "finished"
            self.pause.disabled = self.stop.disabled = not working
            self.progress.value = m.step
            self.status.value, self.table.value = m.status_html(), m.table_html()
            self.notes.value, self.changes.value = m.notes_html(), m.changes_html()
            self._curves()
            if not (self.hold.value and self.held):
                self._rollouts()

    def _curves(self) -> None:
        marks = self.monitor.marks()
        with self.curves.batch_update():
            for drawn, now in zip(self.curves.data, self.monitor.traces(), strict=True):
                if list(drawn.x or ()) != now["x"] or list(drawn.y or ()) != now["y"]:
                    drawn.update(now)
            if self.curves.layout.title.text != self.monitor.title():
                self.curves.layout.title.text = self.monitor.title()
            if marks != self._marks:
                self.curves.layout.shapes = self._marks = marks

    def _rollouts(self) -> None:
        last = self.monitor.last
        if last is None or last is self.held or (self.hold.value and self.held):
            return
        self.held = last
        names = problem_names(last)
        self._filling = True
        try:
            self.problem.options = names
            self.problem.index = last.pool.informative_problem
        finally:
            self._filling = False
        self._show_problem()

    def _show_problem(self) -> None:
        if self.held is not None and self.problem.index is not None:
            with contextlib.suppress(IndexError):  # the step changed under the choice
                self.rollouts.value = self.monitor.rollouts_html(self.problem.index, self.held)


__all__ = ["View"]
