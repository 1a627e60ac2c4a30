"""The state of a run, and what `train` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo_kit.advantages import Capability
from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent
from hacpo_kit.records import Pool, StepResult

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class State:
    """The state of a run between two steps; with the agents, it determines how the run continues."""

    step: int = 0
    capability: Capability = field(default_factory=Capability)
    position: int = 0  # problems drawn so far
    rollouts: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def totals(self) -> dict[str, float]:
        """The counts at the beginning of a line of metrics."""
        return {name: getattr(self, name) for name in ("step", "rollouts", "tokens", "seconds")}

    def after(self, capability: Capability, pool: Pool, seconds: float) -> State:
        """Return the state one step later, `seconds` of run time after the start of the run."""
        position = self.position + len(pool.problems) + pool.discarded.get("problems", 0)
        return State(
            self.step + 1, capability, position, self.rollouts + pool.sampled, self.tokens + pool.tokens, seconds
        )


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """The result of `train`: the trained agents and one line of metrics per step (step 0: before training)."""

    agents: Sequence[Agent]
    config: Config  # after all changes of the run
    history: tuple[dict[str, Any], ...]
    state: State
    folder: Path | None
    stopped: bool  # stopped before its last step by Ctrl-C or a callback
    last: StepResult | None

    def __repr__(self) -> str:
        names = ", ".join(repr(a.name) for a in self.agents)
        folder = f", in {str(self.folder)!r}" if self.folder else ""
        return f"Run({self.config.method}: {self.state.step} steps of {names}{', stopped' * self.stopped}{folder})"

    @property
    def capability(self) -> Capability:
        """Capability after the last step."""
        return self.state.capability

    def to_frame(self) -> pd.DataFrame:
        """Return one row per step and agent, with the metrics as columns."""
        return history_frame(self.history)


def history_frame(history: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return lines of metrics as a table with one row per step and agent."""
    import pandas as pd

    rows = [
        {**{k: v for k, v in line.items() if k not in ("agents", "omega")}, "agent": name, **values}
        for line in history
        for name, values in line["agents"].items()
    ]
    return pd.DataFrame(rows)
