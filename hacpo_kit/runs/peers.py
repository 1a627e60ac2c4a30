"""Stored peers: rollouts of other agents that were recorded before, from which a run learns without loading their models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hacpo_kit.config import Config
from hacpo_kit.records import Pool, Rollout
from hacpo_kit.runs.experience import Experience, recorded_steps
from hacpo_kit.tasks.problems import Problem

if TYPE_CHECKING:
    import pandas as pd

NO_LOGP = float("nan")


@dataclass(frozen=True)
class StoredPeers:
    """Rollouts from the folder of a finished run, step by step, or from a Parquet or JSONL file, by prompt.

    A file has the columns prompt and text, and optionally source (the agent's name; default: the name of the file), reward,
    mean_logp (nats per token, of the source) and ended (default: True). Rewards are verified again; with verify=False the
    stored ones are used.

    Raises FileNotFoundError for a path that does not exist, ValueError for a file without these columns.
    """

    path: str
    verify: bool = True

    def __post_init__(self):
        object.__setattr__(self, "path", str(self.path))
        if not Path(self.path).exists():
            raise FileNotFoundError(f"peers={self.path!r}: there is no such run folder or file")
        if self.is_run and not recorded_steps(self.path):
            raise ValueError(
                f"peers={self.path!r}: the folder has no recorded steps; train that run with record_every=1"
            )
        if not self.is_run:
            _ = self._file  # read and checked before training starts

    @property
    def is_run(self) -> bool:
        """Whether the rollouts come from the folder of a run."""
        return Path(self.path).is_dir()

    @cached_property
    def _file(self) -> pd.DataFrame:
        import pandas as pd

        path = Path(self.path)
        if path.suffix not in (".parquet", ".jsonl"):
            raise ValueError(f"peers={self.path!r}: give the folder of a run, or a .parquet or .jsonl file")
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_json(path, lines=True, dtype=False)
        if missing := [name for name in ("prompt", "text") if name not in frame]:
            raise ValueError(
                f"{path} has no column {', '.join(missing)}; there are {', '.join(map(str, frame.columns))}"
            )
        frame["prompt"] = [p if isinstance(p, str) else json.dumps(p, ensure_ascii=False) for p in frame["prompt"]]
        defaults = {"source": path.stem, "reward": None, "mean_logp": NO_LOGP, "ended": True}
        return frame.assign(**{name: value for name, value in defaults.items() if name not in frame})

    def _of_step(self, step: int, problems: Sequence[Problem]) -> pd.DataFrame:
        """Return the rollouts of a step, with the columns problem, source, text, ended, reward and mean_logp."""
        if not self.is_run:
            ids = {p.prompt_text: p.id for p in problems}
            rows = self._file[self._file["prompt"].isin(ids)]
            return rows.assign(problem=rows["prompt"].map(ids))
        if step not in recorded_steps(self.path):
            raise ValueError(
                f"peers={self.path!r} has no record of step {step}; train fewer steps, or that run for longer"
            )
        frame = Experience.of_run(self.path, step).frame
        if different := {p.id for p in problems} ^ set(frame["problem"]):
            raise ValueError(
                f"peers={self.path!r} used other problems in step {step} (such as {min(different)!r}); use the same problems, "
                "seed and prompts_per_step"
            )
        own = frame[frame["own"]]  # each source's rollouts as that source recorded them
        return own.rename(columns={"source_mean_logp": "mean_logp"})

    def join(self, pool: Pool, step: int, config: Config) -> Pool:
        """Return the pool with the stored rollouts of a step, except those of the pool's own agents.

        Raises ValueError if there are none, and if the method needs log-probabilities that are not stored.
        """
        frame = self._of_step(step, pool.problems)
        frame = frame[~frame["source"].isin(pool.agents)]
        if frame.empty:
            raise ValueError(f"peers={self.path!r} has no rollouts of other agents for the problems of step {step}")
        if frame["mean_logp"].isna().any() and config.share != "none" and config.peer_update != "nll":
            raise ValueError(
                f"peers={self.path!r}: rollouts without mean_logp have no importance ratio, which method {config.method!r} "
                "needs; methods with peer_update='nll', such as sgt, do not"
            )
        if not self.verify and frame["reward"].isna().any():
            raise ValueError(f"peers={self.path!r}: verify=False needs a reward for every rollout")
        numbers = frame.groupby(["problem", "source"]).cumcount()
        rollouts = [self._rollout(row, int(k)) for row, k in zip(frame.to_dict("records"), numbers, strict=True)]
        names = tuple(dict.fromkeys(r.source for r in rollouts))
        return replace(pool, rollouts=(*pool.rollouts, *rollouts), agents=(*pool.agents, *names), stored=names)

    def _rollout(self, row: Mapping[str, Any], sample: int) -> Rollout:
        """Return a stored rollout; its only log-probability is the mean, and it has no tokens."""
        mean = np.array([row["mean_logp"]], np.float32)
        stored = Rollout(
            row["problem"], row["source"], sample, row["text"], (), (), mean, bool(row["ended"]), end_length=0
        )
        if self.verify:
            return stored
        return stored.scored(float(row["reward"]), "correct" if row["reward"] > 0 else "wrong")


def stored_peers(peers: str | Path | StoredPeers | None) -> StoredPeers | None:
    """Return the stored peers of a path."""
    return peers if peers is None or isinstance(peers, StoredPeers) else StoredPeers(peers)
