"""The record of a step's experience: what each learner saw of each rollout, in one table that needs no model to read.

A run writes one Parquet file a step (`experience/step-000004.parquet`); `whatif` recomputes from it, `widgets.explorer`
shows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hacpo_kit.advantages import Capability, advantage
from hacpo_kit.common.files import remove_leftovers, replacing
from hacpo_kit.common.seeds import derive_seed
from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent, as_list, microbatches
from hacpo_kit.objective import lower_bound
from hacpo_kit.records import Batch, MiniBatch, Pool, StepResult, StepStats
from hacpo_kit.sharing import encode_for, shared_rollouts
from hacpo_kit.updates import minibatches, objective_of

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "experience"  # in a run folder
VERSION = 1  # of the stored form
KEPT_STEPS = 100  # of the history of mean rewards, at least the window: enough for any window to try

# the columns of the table: one row a learner and rollout, in the order in which training summed them
COLUMNS = {
    "learner": "the agent that learns",
    "source": "the agent that wrote the rollout",
    "problem": "id of the problem",
    "prompt": "what was asked; chat messages as JSON",
    "gold": "the right answer",
    "sample": "0 … n−1 within problem and source",
    "text": "the answer",
    "ended": "False: cut at the length limit",
    "reward": "verified reward; missing: not scorable",
    "status": "the verdict",
    "own": "the learner wrote it",
    "minibatch": "m, the learner's updates in this step before it used the rollout; missing: it never did",
    "excluded": "why the learner never used it; empty: it did",
    "source_mean_logp": "mean log-probability under its source (nats per token)",
    "ratio": "importance ratio s(learner, source) when it was used",
    "advantage": "A as trained",
    "weight": "ω(source, learner) as trained, 1 for own rollouts",
    "clipped": "the clip was active: no gradient",
    "lower": "lower bound of the band of its mini-batch",
}


@dataclass(frozen=True, eq=False, repr=False)
class Experience:
    """What every learner saw of one step's rollouts; `frame` has the columns of `COLUMNS`."""

    frame: pd.DataFrame
    capability: Capability  # after this step's rollouts, as the advantages used it
    config: Config
    step: int | None = None
    trained: bool = True  # False: the ratios are those before any update of the step

    def __repr__(self) -> str:
        where = "" if self.step is None else f"step {self.step}, "
        rows = f"{len(self.frame)} rows for the learners {', '.join(map(repr, self.learners))}"
        return f"Experience({where}{rows}{'' if self.trained else ', before training'})"

    @cached_property
    def learners(self) -> list[str]:
        """Names of the learners."""
        return self.frame["learner"].unique().tolist()

    @property
    def learner_mean_logp(self) -> pd.Series:
        """Mean log-probability of each row's rollout under its learner, when it was used (nats per token)."""
        # log s + mean_t log π_j,old(y_t), eq. 11 the other way round
        return np.log(self.frame["ratio"]) + self.frame["source_mean_logp"]

    def of_learner(self, learner: str) -> pd.DataFrame:
        """The rows of one learner, numbered from 0. Raises ValueError for a name that is no learner's."""
        rows = self.frame[self.frame["learner"] == learner]
        if rows.empty:
            raise ValueError(f"{learner!r} is no learner here; there are {', '.join(map(repr, self.learners))}")
        return rows.reset_index(drop=True)

    # ── from what was just sampled or trained ────────────────────────────────────────────────────────────────────

    @classmethod
    def of_step(cls, result: StepResult, agents: Agent | Sequence[Agent], step: int | None = None) -> Experience:
        """The experience of a step as `step` and `train` return it (`Run.last`), with the settings of that step."""
        return cls.of_pool(result.pool, agents, result.capability, result.config, result.stats, step=step)

    @classmethod
    def of_pool(
        cls,
        pool: Pool,
        agents: Agent | Sequence[Agent],
        capability: Capability,
        config: Config,
        stats: StepStats | Sequence[StepStats] | Mapping[str, StepStats] | None = None,
        *,
        step: int | None = None,
    ) -> Experience:
        """The experience of the `agents` with a scored pool.

        With the `stats` that `update` returned it holds the importance ratios of training. Without, every rollout is scored
        once by the learner's present weights, and stands in the mini-batch in which `update` would use it.

        Raises ValueError for a pool without rewards, agents that wrote nothing in it, or agents without stats (named).
        """
        import pandas as pd

        agents = as_list(agents)
        given = {s.learner: s for s in ([stats] if isinstance(stats, StepStats) else _values(stats))}
        if stats is not None and (missing := [a.name for a in agents if a.name not in given]):
            raise ValueError(f"no stats of {', '.join(map(repr, missing))}; there are those of {', '.join(given)}")
        frames = []
        for agent in agents:
            parts = given[agent.name].minibatches if given else planned(pool, agent, capability, config)
            frames.append(_rows(pool, agent, config, parts))
        config = config.replace(window=capability.window)
        return cls(pd.concat(frames, ignore_index=True), capability, config, step, trained=bool(given))

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    def of_run(cls, folder: str | Path, step: int | None = None) -> Experience:
        """A recorded step of a run, by default the last. Raises FileNotFoundError, with a remedy, if it was not recorded."""
        found = recorded_steps(folder)
        if not found:
            raise FileNotFoundError(
                f"{folder} holds no recorded experience: train(..., out=…, record_every=1) writes it"
            )
        step = found[-1] if step is None else step
        if step not in found:
            raise FileNotFoundError(f"step {step} of {folder} was not recorded; there are the steps {_ranges(found)}")
        return cls.load(path_of(folder, step))

    @classmethod
    def load(cls, path: str | Path) -> Experience:
        """Reads what `save` wrote. Raises ValueError for another file, FileNotFoundError where there is none."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {path}")
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            about = json.loads((table.schema.metadata or {})[b"hacpo_kit"])
            if about["version"] != VERSION:
                raise ValueError(f"it has version {about['version']}, this program reads version {VERSION}")
            if missing := [name for name in COLUMNS if name not in table.column_names]:
                raise ValueError(f"the columns {', '.join(missing)} are missing")
            past = {name: tuple(values) for name, values in about["capability"]["history"].items()}
            return cls(
                frame=table.select(list(COLUMNS)).to_pandas().set_axis(list(COLUMNS), axis=1),  # names may be damaged
                capability=Capability(about["capability"]["window"], past),
                config=Config.from_dict(about["config"]),
                step=about["step"],
                trained=about["trained"],
            )
        except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no recorded experience ({type(error).__name__}: {error})") from None

    def save(self, path: str | Path) -> Path:
        """Writes a Parquet file that appears under its name only when it is whole. Raises OSError, naming it, if it cannot."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path, keep = Path(path), max(KEPT_STEPS, self.capability.window)
        recent = {name: past[-keep:] for name, past in self.capability.history.items()}
        about = {
            "version": VERSION, "step": self.step, "trained": self.trained, "config": self.config.to_dict(),
            "capability": replace(self.capability, history=recent).to_dict(),
        }  # fmt: skip
        table = pa.Table.from_pandas(self.frame, preserve_index=False)
        table = table.replace_schema_metadata({**table.schema.metadata, "hacpo_kit": json.dumps(about)})
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(path) as temporary:
                # with checksums, a file that was damaged later is refused instead of read
                pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)
        except OSError as error:
            raise OSError(error.errno, f"the experience cannot be written ({error})", str(path)) from None
        return path


def path_of(folder: str | Path, step: int) -> Path:
    """Where a run records a step."""
    return Path(folder) / FOLDER / f"step-{step:06d}.parquet"


def recorded_steps(folder: str | Path) -> list[int]:
    """The steps that a run recorded, in order."""
    names = [re.fullmatch(r"step-(\d+)\.parquet", p.name) for p in (Path(folder) / FOLDER).glob("step-*.parquet")]
    return sorted(int(name[1]) for name in names if name)


def drop_after(folder: Path, step: int) -> None:
    """Removes what a stopped run recorded after its last checkpoint; those steps are made again."""
    for later in (s for s in recorded_steps(folder) if s > step):
        path_of(folder, later).unlink()
    remove_leftovers(folder / FOLDER)


def planned(pool: Pool, agent: Agent, capability: Capability, config: Config) -> list[MiniBatch]:
    """The mini-batches that `update` would make now, with ratios and clips at the learner's present weights.

    Changes nothing. Loss, gradient norm and learning rate, which only an update has, are NaN.
    """
    batch = advantage(pool, agent, capability, config)
    if not len(batch):
        return []
    order = minibatches(batch.own, config, seed=derive_seed("order", config.seed, agent.name, agent.updates))
    return [_scored(agent, batch, rows, m, config.replace(beta=0.0)) for m, rows in enumerate(order)]


def _scored(agent: Agent, batch: Batch, rows: list[int], m: int, config: Config) -> MiniBatch:
    ratio, clipped = np.empty(len(rows), np.float32), np.empty(len(rows), bool)
    with torch.no_grad():
        for micro in microbatches(*batch.tokens(rows), config.microbatch_tokens):
            _, s, hit, _ = objective_of(agent, batch, [rows[i] for i in micro], m, config)
            ratio[micro], clipped[micro] = s.cpu().numpy(), hit.cpu().numpy()
    part, unknown = batch.part(rows), float("nan")
    return MiniBatch(
        updates_made=m, lower=lower_bound(m, config), index=np.array(part.index), own=part.own.numpy(), ratio=ratio,
        clipped=clipped, advantages=part.advantages.numpy(), weights=part.weights.numpy(),
        loss=unknown, grad_norm=unknown, lr=unknown, kl=None,
    )  # fmt: skip


def _rows(pool: Pool, agent: Agent, config: Config, parts: Sequence[MiniBatch]) -> pd.DataFrame:
    """The part of the table that belongs to one learner."""
    import pandas as pd

    if agent.name not in pool.agents:
        raise ValueError(
            f"agent {agent.name!r} wrote nothing in this pool; it holds {', '.join(map(repr, pool.agents))}"
        )
    offered = shared_rollouts(pool, agent.name, config)
    where = {int(i): row for row, i in enumerate(np.concatenate([p.index for p in parts]) if parts else ())}
    row_of = np.array([where.get(i, -1) for i in offered])
    rollouts = [pool.rollouts[i] for i in offered]

    def seen(of: Any, missing: Any, dtype: Any) -> np.ndarray:
        """One value a rollout, by its mini-batch; those never used have the missing one."""
        values = [*(v for p in parts for v in np.broadcast_to(of(p), len(p.index))), missing]
        return np.array(values, dtype)[row_of]

    used, problems = row_of >= 0, {p.id: p for p in pool.problems}
    own = [r.source == agent.name for r in rollouts]
    reasons = _reasons(pool, agent, config, [r for u, r in zip(used, rollouts, strict=True) if not u])
    columns = {
        "learner": agent.name,
        "source": [r.source for r in rollouts],
        "problem": [r.problem for r in rollouts],
        "prompt": [problems[r.problem].prompt_text for r in rollouts],
        "gold": [problems[r.problem].gold for r in rollouts],
        "sample": np.array([r.sample for r in rollouts], np.int32),
        "text": [r.text for r in rollouts],
        "ended": [r.ended for r in rollouts],
        "reward": np.array([np.nan if r.reward is None else r.reward for r in rollouts], np.float64),
        "status": [r.status for r in rollouts],
        "own": own,
        "minibatch": pd.array(seen(lambda p: p.updates_made, -1, np.int32), dtype="Int32"),
        "excluded": ["" if u else next(reasons) for u in used],
        "source_mean_logp": np.array(
            [r.mean_logp(config.count_eos or mine) for r, mine in zip(rollouts, own, strict=True)], np.float32
        ),
        "ratio": seen(lambda p: p.ratio, np.nan, np.float32),
        "advantage": seen(lambda p: p.advantages, np.nan, np.float32),
        "weight": seen(lambda p: p.weights, np.nan, np.float32),
        "clipped": seen(lambda p: p.clipped, False, bool),
        "lower": seen(lambda p: p.lower, np.nan, np.float64),
    }
    frame = pd.DataFrame(columns)[list(COLUMNS)]
    frame.loc[~used, "minibatch"] = pd.NA
    return frame


def _reasons(pool: Pool, agent: Agent, config: Config, rollouts: Sequence[Any]) -> Iterator[str]:
    """Yield the reasons for which `advantage` excluded rollouts from this learner's batch."""
    for rollout, tokens in zip(rollouts, encode_for(agent, pool, rollouts, config.count_eos), strict=True):
        if rollout.reward is None:
            yield "unscorable"
        else:
            yield tokens if isinstance(tokens, str) else "not in these stats"


def _values(stats: Any) -> Sequence[StepStats]:
    return list(stats.values() if isinstance(stats, Mapping) else stats or ())


def _ranges(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 7] → "1-3, 7"."""
    out: list[list[int]] = []
    for n in numbers:
        if out and out[-1][-1] == n - 1:
            out[-1] = [out[-1][0], n]
        else:
            out.append([n])
    return ", ".join("-".join(map(str, part)) for part in out)


__all__ = ["COLUMNS", "Experience", "drop_after", "path_of", "planned", "recorded_steps"]
