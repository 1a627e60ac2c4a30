"""Recorded experience: what each learner computed for each rollout of a step, as a table that is read without a model.

A run writes one Parquet file per recorded step, such as experience/step-000004.parquet. `Replay` recomputes advantages and
gradient weights from it, and `widgets.explorer` shows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hacpo_kit.advantages import Capability, advantage
from hacpo_kit.common.files import replacing
from hacpo_kit.common.seeds import derive_seed
from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent, as_list
from hacpo_kit.models.passes import microbatches
from hacpo_kit.objective import lower_bound
from hacpo_kit.records import Batch, MiniBatch, Pool, Rollout, StepResult, StepStats
from hacpo_kit.sharing import encode_for, shared_rollouts
from hacpo_kit.updates import minibatches, objective_of

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "experience"  # in a run folder
KEPT_STEPS = 100  # mean rewards kept per agent, so that any window up to this size can be tried

# the columns of the table: one row per learner and rollout, in the order in which training added them up
COLUMNS = {
    "learner": "the agent that is updated",
    "source": "the agent that sampled the rollout",
    "problem": "id of the problem",
    "prompt": "the prompt; chat messages as JSON",
    "gold": "the reference answer",
    "sample": "0 … n−1 within problem and source",
    "text": "the response",
    "ended": "False: cut at the length limit",
    "reward": "verified reward; missing: unscorable",
    "status": "status of the verification",
    "own": "True: the learner sampled it",
    "minibatch": "m, the learner's updates in this step before the one that used the rollout; missing: excluded",
    "excluded": "the reason why the rollout was excluded; empty: it was used",
    "source_mean_logp": "mean log-probability under the source (nats per token)",
    "ratio": "importance ratio s(learner, source) in its update",
    "advantage": "advantage A in training",
    "weight": "ω(source, learner) in training, 1 for own rollouts",
    "clipped": "True: clipping removed the gradient",
    "lower": "lower bound of the peer clipping range in its update",
}


@dataclass(frozen=True, eq=False, repr=False)
class Experience:
    """What every learner computed for the rollouts of one step; `frame` has the columns `COLUMNS`."""

    frame: pd.DataFrame
    capability: Capability  # after this step's rollouts, as used by the advantages
    config: Config
    step: int | None = None
    trained: bool = True  # False: the ratios are those before any update of the step

    def __repr__(self) -> str:
        step = "" if self.step is None else f"step {self.step}, "
        rows = f"{len(self.frame)} rows for the learners {', '.join(map(repr, self.learners))}"
        return f"Experience({step}{rows}{'' if self.trained else ', before training'})"

    @cached_property
    def learners(self) -> list[str]:
        """Names of the learners."""
        return self.frame["learner"].unique().tolist()

    def of_learner(self, learner: str) -> pd.DataFrame:
        """Return the rows of one learner, numbered from 0; raises ValueError for another name."""
        rows = self.frame[self.frame["learner"] == learner]
        if rows.empty:
            raise ValueError(f"there is no learner {learner!r}; the learners are {', '.join(map(repr, self.learners))}")
        return rows.reset_index(drop=True)

    # ── from a step ──────────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    def of_step(cls, result: StepResult, agents: Agent | Sequence[Agent], step: int | None = None) -> Experience:
        """Return the experience of a step that `step` or `train` (`Run.last`) returned."""
        return cls.of_pool(result.pool, agents, result.capability, result.config, result.stats, step=step)

    @classmethod
    def of_pool(
        cls,
        pool: Pool,
        agents: Agent | Sequence[Agent],
        capability: Capability,
        config: Config,
        stats: StepStats | Mapping[str, StepStats] | None = None,
        *,
        step: int | None = None,
    ) -> Experience:
        """Return the experience of `agents` with a pool that has rewards.

        With the `stats` of `update`, the importance ratios are those of training. Without, every rollout is scored with the
        learner's present weights, in the mini-batch in which `update` would use it.

        Raises ValueError for a pool without rewards, and for agents without rollouts in it or without stats.
        """
        import pandas as pd

        agents, trained = as_list(agents), stats is not None
        if isinstance(stats, StepStats):
            stats = {stats.learner: stats}
        if trained and (missing := [agent.name for agent in agents if agent.name not in stats]):
            raise ValueError(f"no stats of {', '.join(map(repr, missing))}; stats has {', '.join(stats)}")
        each = [stats[a.name] if trained else planned(pool, a, capability, config) for a in agents]
        frames = [_rows(pool, agent, config, of_agent) for agent, of_agent in zip(agents, each, strict=True)]
        config = config.replace(window=capability.window)
        return cls(pd.concat(frames, ignore_index=True), capability, config, step, trained)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    def of_run(cls, folder: str | Path, step: int | None = None) -> Experience:
        """Return a recorded step of a run, by default the last; raises FileNotFoundError if it is not recorded."""
        steps = recorded_steps(folder)
        if not steps:
            raise FileNotFoundError(f"{folder} holds no recorded experience; train with out= and record_every=1")
        step = steps[-1] if step is None else step
        if step not in steps:
            raise FileNotFoundError(f"step {step} of {folder} is not recorded; recorded steps: {steps}")
        return cls.load(path_of(folder, step))

    @classmethod
    def load(cls, path: str | Path) -> Experience:
        """Read a file of `save`; raises FileNotFoundError, or ValueError for other content and for an older version."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {path}")
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            about = json.loads((table.schema.metadata or {})[b"hacpo_kit"])
            config = Config.from_dict(about["config"])
            if missing := [name for name in COLUMNS if name not in table.column_names]:
                raise ValueError(f"it has no column {', '.join(missing)}")
            past = {name: tuple(values) for name, values in about["capability"]["history"].items()}
            capability = Capability(about["capability"]["window"], past)
            # the types of the columns, without pandas' metadata, which has no checksum
            frame = table.select(list(COLUMNS)).to_pandas(ignore_metadata=True).astype({"minibatch": "Int32"})
            return cls(frame, capability, config, about["step"], about["trained"])
        except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not readable as experience ({type(error).__name__}: {error})") from None

    def save(self, path: str | Path) -> Path:
        """Write a Parquet file, which appears under its name when it is complete; raises OSError if it cannot."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path, keep = Path(path), max(KEPT_STEPS, self.capability.window)
        recent = {name: past[-keep:] for name, past in self.capability.history.items()}
        capability = replace(self.capability, history=recent).to_dict()
        about = {"step": self.step, "trained": self.trained, "config": self.config.to_dict(), "capability": capability}
        table = pa.Table.from_pandas(self.frame, preserve_index=False)
        table = table.replace_schema_metadata({**table.schema.metadata, "hacpo_kit": json.dumps(about)})
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            # checksums: a file that is damaged later is refused
            pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)
        return path


def path_of(folder: str | Path, step: int) -> Path:
    """Return the file of a recorded step."""
    return Path(folder) / FOLDER / f"step-{step:06d}.parquet"


def recorded_steps(folder: str | Path) -> list[int]:
    """Return the recorded steps of a run, in order."""
    names = [re.fullmatch(r"step-(\d+)\.parquet", p.name) for p in (Path(folder) / FOLDER).glob("step-*.parquet")]
    return sorted(int(name[1]) for name in names if name)


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def planned(pool: Pool, agent: Agent, capability: Capability, config: Config) -> StepStats:
    """Return the mini-batches that `update` would use now, with ratios and clipping at the learner's present weights.

    Loss, gradient norm and learning rate are NaN. Nothing is changed.
    """
    batch, config = advantage(pool, agent, capability, config), config.replace(beta=0.0)
    order = minibatches(batch.own, config, seed=derive_seed("order", config.seed, agent.name, agent.updates))
    parts = tuple(_scored(agent, batch.part(rows), m, config) for m, rows in enumerate(order))
    return StepStats(agent.name, parts, batch.excluded, tuple(r.source for r in pool))


def _scored(agent: Agent, batch: Batch, m: int, config: Config) -> MiniBatch:
    ratio, clipped = np.empty(len(batch), np.float32), np.empty(len(batch), bool)
    with torch.no_grad():
        for rows in microbatches(batch.prompt_ids, batch.response_ids, config.microbatch_tokens):
            _, s, hit, _ = objective_of(agent, batch, rows, m, config)
            ratio[rows], clipped[rows] = s.cpu().numpy(), hit.cpu().numpy()
    unknown = float("nan")
    return MiniBatch(
        updates_made=m, lower=lower_bound(m, config), index=np.array(batch.index), own=batch.own.numpy(), ratio=ratio,
        clipped=clipped, advantages=batch.advantages.numpy(), weights=batch.weights.numpy(),
        loss=unknown, grad_norm=unknown, lr=unknown, kl=None,
    )  # fmt: skip


def _rows(pool: Pool, agent: Agent, config: Config, stats: StepStats) -> pd.DataFrame:
    """Return one learner's part of the table."""
    if agent.name not in pool.agents:
        raise ValueError(f"agent {agent.name!r} has no rollouts in this pool, which is of {', '.join(pool.agents)}")
    used = stats.to_frame().set_index("index").rename(columns={"updates_made": "minibatch"})
    # a rollout that was excluded has no row in `used`
    columns = ["minibatch", "ratio", "clipped", "advantage", "weight", "lower"]
    shared = shared_rollouts(pool, agent.name, config)
    replaced = [i for i, r in enumerate(pool) if r.source == agent.name and i not in {*shared}]
    frame = pool.to_frame().iloc[[*shared, *replaced]].join(used[columns])
    rollouts = [pool.rollouts[i] for i in frame.index]
    frame = frame.assign(
        learner=agent.name,
        own=frame["source"] == agent.name,
        prompt=[pool.problem(r.problem).prompt_text for r in rollouts],
        source_mean_logp=[r.mean_logp(config.count_eos or r.source == agent.name) for r in rollouts],
        clipped=frame["clipped"].eq(True),
        excluded="",
    )
    excluded = frame["minibatch"].isna()
    frame.loc[excluded, "excluded"] = _reasons(pool, agent, config, [pool.rollouts[i] for i in frame.index[excluded]])
    types = {"sample": "int32", "reward": "float64", "minibatch": "Int32", "source_mean_logp": "float32"}
    return frame[list(COLUMNS)].astype(types).reset_index(drop=True)


def _reasons(pool: Pool, agent: Agent, config: Config, rollouts: Sequence[Rollout]) -> list[str]:
    """Return why `advantage` excluded rollouts from this learner's batch."""
    encoded = encode_for(agent, pool, rollouts, config.count_eos)
    reasons = [
        tokens if isinstance(tokens, str) else "replaced" if r.source == agent.name else "not_drawn or masked"
        for r, tokens in zip(rollouts, encoded, strict=True)
    ]
    return ["unscorable" if r.reward is None else reason for r, reason in zip(rollouts, reasons, strict=True)]
