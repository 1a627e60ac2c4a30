"""Test sets with the parameters of their evaluation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo_kit.rollouts import Sampling
from hacpo_kit.runs.evaluation import sampling_of
from hacpo_kit.tasks.arithmetic import ARITHMETIC_SETS
from hacpo_kit.tasks.benchmarks import ANSWER_TOKENS, BENCHMARKS
from hacpo_kit.tasks.loading import load_problems
from hacpo_kit.tasks.problems import Problems


@dataclass(frozen=True)
class EvaluationSet:
    """Problems with the parameters of their evaluation."""

    name: str
    problems: Problems
    k: int
    sampling: Sampling

    @property
    def metric(self) -> str:
        """The metric that stands in the table."""
        return f"best@{self.k}" if self.k > 1 else f"avg@{self.sampling.n}"

    def settings(self) -> dict[str, Any]:
        """Return what must be equal for stored answers to be used again."""
        _, seed = self.sampling.seed
        sampling = {name: getattr(self.sampling, name) for name in ("temperature", "max_new_tokens", "batch_size")}
        about = {"problems": len(self.problems), "fingerprint": self.problems.fingerprint()}
        return {**about, "k": self.k, "samples": self.sampling.n, **sampling, "seed": seed}


def open_sets(
    sets: Sequence[str] | Mapping[str, Problems],
    limit: int | None = None,
    *,
    k: int | None = None,
    samples: int | None = None,
    max_new_tokens: int | None = None,
    **sampling: Any,
) -> list[EvaluationSet]:
    """Load test sets and fill in their settings; arguments as in `evaluate_sets`.

    Raises ValueError for invalid settings and for sets of the same name.
    """
    opened = []
    for source in sets:
        name, problems = (source, sets[source]) if isinstance(sets, Mapping) else _open_set(source, limit)
        problems = problems if isinstance(problems, Problems) else load_problems(list(problems))
        benchmark = BENCHMARKS.get(name)
        count = _first(samples, k, benchmark and benchmark.samples, 1)
        best = _first(k, benchmark and min(benchmark.k, count), 1)
        tokens = _first(max_new_tokens, 32 if problems.name in ARITHMETIC_SETS else ANSWER_TOKENS)
        settings = sampling_of(best, samples=count, max_new_tokens=tokens, **{"batch_size": 128, **sampling})
        opened.append(EvaluationSet(name, problems, best, settings))
    names = [s.name for s in opened]
    if len(set(map(file_name, names))) < len(names) or not names:
        raise ValueError(
            f"need test sets with different names, got {', '.join(names) or 'none'}; rename with NAME=FILE"
        )
    return opened


def file_name(name: str) -> str:
    """Return a name of an agent or set in a form that every file system takes."""
    return re.sub(r"[^\w.+=#-]+", "+", name)


def _open_set(text: str, limit: int | None) -> tuple[str, Problems]:
    """Return name and problems of a set that is named by text."""
    name, mark, source = (text, "", "") if Path(text).exists() else text.partition("=")
    if mark:
        return name, load_problems(source, benchmark=name if name in BENCHMARKS else None, limit=limit)
    if text in ARITHMETIC_SETS:
        return text, load_problems(text, split="test", size=limit)
    return (text if text in BENCHMARKS else Path(text).stem), load_problems(text, limit=limit)


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)
