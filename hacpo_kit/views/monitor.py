"""The monitor: a background training that displays itself, with buttons, live curves, settings and rollouts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import ipywidgets as w

from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent
from hacpo_kit.tasks.problems import Problem
from hacpo_kit.views import monitor_panes as panes
from hacpo_kit.views.background import BackgroundTraining
from hacpo_kit.views.figure import Figure
from hacpo_kit.views.live import Live
from hacpo_kit.views.monitor_widget import MonitorWidget

DRAW_INTERVAL = 0.25  # seconds between two updates of the page


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
    """A background training with a widget. Every button is a method."""

    _displayed = False

    def start(self) -> Self:
        """Start or resume the training; see `BackgroundTraining.start`."""
        thread = self._thread
        super().start()
        if self._thread is not thread:
            threading.Thread(target=self._keep_drawing, args=(self._thread,), name="monitor", daemon=True).start()
        return self

    def resume(self) -> Self:
        """As `start`."""
        return self.start()

    def change(self, **settings: Any) -> Self:
        """Change settings from the next step on; see `BackgroundTraining.change`."""
        super().change(**settings)
        if not self.running:
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

    def build(self) -> w.Box:
        """Return the widget."""
        self._view = MonitorWidget(self)
        return self._view.root

    def _display_picture(self, update: bool = False) -> None:
        self._displayed = True
        super()._display_picture(update)

    def _keep_drawing(self, thread: threading.Thread) -> None:
        """Draw every change until the training thread ends, outside of that thread so that drawing does not delay it."""
        while thread.is_alive():
            if self.changed.wait(0.5):
                self.changed.clear()
                self._draw()
                time.sleep(DRAW_INTERVAL)
        self._draw()
        if self._displayed:
            with contextlib.suppress(Exception):  # the page may be closed
                self._display_picture(update=True)

    def _draw(self) -> None:
        if "widget" in vars(self):
            self._view.draw()
