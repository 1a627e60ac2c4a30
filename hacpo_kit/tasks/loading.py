"""load_problems: problems from named sets, files, tables in memory and the Hugging Face hub."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import islice
from typing import Any

import numpy as np

from hacpo_kit.tasks.arithmetic import ARITHMETIC_SETS, arithmetic_set
from hacpo_kit.tasks.benchmarks import BENCHMARKS, TEMPLATE
from hacpo_kit.tasks.problems import Message, Problem, Problems
from hacpo_kit.tasks.readers import Row, open_rows, refuse


def load_problems(
    source,
    *,
    split: str | None = None,
    prompt: str | None = None,
    gold: str | None = None,
    id: str | None = None,
    template: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    size: int | None = None,
    config: str | None = None,
    revision: str | None = None,
    benchmark: str | None = None,
) -> Problems:
    r"""Load problems from a named set, a .jsonl, .json, .parquet or .csv file, a table in memory or a Hugging Face dataset.

    Named sets are the generated ones (`ARITHMETIC_SETS`) and the paper's seven benchmarks (`BENCHMARKS`, from the hub);
    benchmark="gsm8k" reads a file or a table with the columns of that benchmark.

    prompt, gold and id name columns (default "prompt", "gold", and "id" if it exists), or fields inside a column, such as
    "reward_model.ground_truth"; other columns become `meta`.
    template wraps every prompt (the last user message of a chat); only `{prompt}` is replaced. limit keeps the first rows
    and does not read later ones. size and seed belong to the generated sets, config and revision to the hub.

    Raises ValueError for a bad row (with its line), column, split or option, FileNotFoundError for a missing file, OSError
    if a hub dataset cannot be loaded. Warns if problems have no reference answer.

    >>> load_problems("arithmetic", split="test", size=100)
    Problems('arithmetic', 100 problems)
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    columns = {"prompt": prompt, "gold": gold, "id": id}
    origin = {"config": config, "revision": revision, "benchmark": benchmark}
    if isinstance(source, str) and source in ARITHMETIC_SETS:
        refuse(f"the set {source!r}", **columns, **origin)
        problems = arithmetic_set(source, split, seed, size)
        problems = _with_template(replace(problems, problems=problems.problems[:limit]), template)
    else:
        refuse("a source other than the generated sets", size=size, seed=seed or None)
        problems = _read(source, split, limit, template, columns, origin)
    if problems.source is not None:
        stored = {**problems.source, "template": template, "limit": limit}
        problems = replace(problems, source={name: value for name, value in stored.items() if value is not None})
    if not all(p.gold for p in problems):
        warnings.warn(f"{problems.name}: {'; '.join(problems.notes)}", stacklevel=2)
    return problems


def _read(
    source, split, limit, template, columns: Mapping[str, str | None], origin: Mapping[str, str | None]
) -> Problems:
    """Load the problems of a source that consists of rows; the parameters are those of `load_problems`."""
    label = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    stored = None if label is None else {"source": label, "split": split, **columns, **origin}
    benchmark, config = origin["benchmark"], origin["config"]
    if benchmark is None and label in BENCHMARKS:
        benchmark, named = label, BENCHMARKS[label]
        source, split, config = named.dataset, split or named.split, config or named.config
        stored |= {"split": split, "config": config}
    elif benchmark is not None and benchmark not in BENCHMARKS:
        raise ValueError(f"there is no benchmark {benchmark!r}; there are {', '.join(map(repr, BENCHMARKS))}")
    name, rows = open_rows(source, split, config, origin["revision"])
    rows = list(islice(rows, limit))
    if not rows:
        raise ValueError(f"{label or name} holds no problems")
    if benchmark is None:
        return _with_template(Problems(_from_columns(rows, name, label or name, columns), name, stored), template)
    refuse("a benchmark, which has its own columns,", **columns)
    problems = Problems(_from_benchmark(rows, benchmark, label or name), benchmark, stored)
    return _with_template(problems, TEMPLATE if template is None else template)


def _from_columns(rows: Sequence[Row], name: str, label: str, columns: Mapping[str, str | None]) -> list[Problem]:
    if all(isinstance(row, Problem) for _, row in rows):
        refuse("a list of Problem", **columns)
        return [row for _, row in rows]
    existing, remedy = _column_names(rows), 'name columns with prompt="…", gold="…" and id="…"'
    existing += [field for field in columns.values() if field not in existing and _has_field(rows, field)]
    prompt = _find_column([columns["prompt"] or "prompt"], existing, label, remedy)
    gold = _find_column([columns["gold"] or "gold"], existing, label, remedy)
    id = "id" if "id" in existing and "id" not in (prompt, gold) else None
    if columns["id"] is not None:
        id = _find_column([columns["id"]], existing, label, remedy)
    problems = []
    for number, (place, row) in enumerate(rows):
        meta = {str(column): value for column, value in row.items() if column not in (prompt, gold, id)}
        try:
            key = f"{name}/{number}" if id is None else _as_text(_field(row, id), id)
            answer = "" if _is_missing(_field(row, gold)) else _as_text(_field(row, gold), gold)
            problems.append(Problem(key, _field(row, prompt), answer if answer.strip() else "", meta))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    return problems


def _from_benchmark(rows: Sequence[Row], name: str, label: str) -> list[Problem]:
    benchmark, existing = BENCHMARKS[name], _column_names(rows)
    remedy = f"these are the columns of {benchmark.title}; without benchmark=, name others with prompt= and gold="
    question = _find_column(benchmark.questions, existing, label, remedy)
    gold = _find_column(list(benchmark.golds), existing, label, remedy)
    problems = []
    for number, (place, row) in enumerate(rows):
        try:
            # a row of JSON may lack a column that other rows have
            problems.append(benchmark.problem(f"{name}/{number}", {question: None, gold: None, **row}, question, gold))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    return problems


def _column_names(rows: Sequence[Row]) -> list[str]:
    for place, row in rows:
        if not isinstance(row, Mapping):
            raise ValueError(f"{place}: expected an object with named columns, found {type(row).__name__}")
    return list(dict.fromkeys(column for _, row in rows for column in row))


def _has_field(rows: Sequence[Row], field: str | None) -> bool:
    """Return whether some row has a field inside a column."""
    return field is not None and any(_field(row, field) is not None for _, row in rows)


def _field(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a field inside a column; None if the row does not have it."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _find_column(candidates: Sequence[str], existing: Sequence[str], label: str, remedy: str) -> str:
    """Return the first candidate that exists."""
    if found := [name for name in candidates if name in existing]:
        return found[0]
    wanted, names = " or ".join(map(repr, candidates)), ", ".join(map(repr, existing))
    raise ValueError(f"{label} has no column {wanted}; it has {names}; {remedy}")


def _is_missing(value: Any) -> bool:
    import pandas

    return pandas.api.types.is_scalar(value) and bool(pandas.isna(value))


def _as_text(value: Any, column: str) -> str:
    """Return a text or number as text: 27.0 → 27, 1e-07 → 0.0000001, -0.0 → 0, ["5"] → 5."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float | np.floating) and np.isfinite(value):
        return np.format_float_positional(value + 0.0, trim="-")
    if isinstance(value, Decimal) and value.is_finite():
        digits = f"{value:f}"  # all of them, without an exponent
        digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
        return "0" if value.is_zero() else digits
    if isinstance(value, list | tuple | np.ndarray) and len(value) == 1:
        return _as_text(value[0], column)
    raise ValueError(f"{column} must be text or a number, not {value!r}")


def _with_template(problems: Problems, template: str | None) -> Problems:
    """Return the problems with each prompt, or the last user message of each chat, inside the template."""
    if template is None:
        return problems
    if "{prompt}" not in template:
        raise ValueError(f"template {template!r} does not contain {{prompt}}")

    def wrap(problem: Problem) -> str | tuple[Message, ...]:
        # str.replace, not str.format: LaTeX contains braces
        if isinstance(problem.prompt, str):
            return template.replace("{prompt}", problem.prompt)
        last = max((i for i, message in enumerate(problem.prompt) if message["role"] == "user"), default=None)
        if last is None:
            raise ValueError(f"problem {problem.id!r} has no user message for the template")
        content = template.replace("{prompt}", problem.prompt[last]["content"])
        return (*problem.prompt[:last], {**problem.prompt[last], "content": content}, *problem.prompt[last + 1 :])

    return replace(problems, problems=[replace(p, prompt=wrap(p)) for p in problems])
