"""The interactive views, for notebooks: `hk.widgets.explorer` and `hk.widgets.monitor`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo_kit.common.console import unattended
from hacpo_kit.views.explorer import Explorer, explorer
from hacpo_kit.views.live import Live

if TYPE_CHECKING:
    from hacpo_kit.config import Config
    from hacpo_kit.models.agents import Agent
    from hacpo_kit.tasks.problems import Problem
    from hacpo_kit.views.monitor import Monitor


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
    """A training that runs beside the notebook, with start, pause and stop, live curves, and settings that can change.

    Display it, and click; or call `start()`, `pause()`, `stop()`, `change(lr=3e-5)`, `wait()`. It is `train` in a thread:
    `options` are train's own (`eval_every`, `save_every`, `callbacks`, …), the run folder `out` is the same, and a second
    call with the same `out` goes on from there, also in another kernel. `autostart` starts it at once.

    Raises TypeError for an option that train does not have.
    """
    from hacpo_kit.views.monitor import Monitor

    made = Monitor(agents, problems, config, steps, out=out, test=test, **options)
    return made.start() if autostart else made


__all__ = ["Explorer", "Live", "explorer", "monitor", "unattended"]
