"""Problems: what the agents are asked, from one call and any source.

    load_problems("arithmetic", "sums", … │ file │ table │ Hugging Face id)  →  Problems  →  .sample / .batch  →  rollout

Whatever a source holds is kept or refused with its row; what is kept but cannot pay is counted in `Problems.notes`.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import os
import re
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any

import numpy as np

from hacpo_kit.tasks.benchmarks import BENCHMARKS, TEMPLATE, find_columns, read_row

Message = Mapping[str, str]
DEFAULT_SIZES = {"train": 2_000, "test": 400}
SIGNS = {"add": "+", "sub": "-"}
# The sets that load_problems makes up, and what each is good for
ARITHMETIC_SETS = {
    "arithmetic": "sums and differences of two-digit numbers, taking turns: 37+58=, 83-27=",
    "sums": "the sums among them: the partner's skill for an agent that is strong on differences",
    "differences": "the differences among them: the partner's skill for an agent that is strong on sums",
    "larger": "sums and differences of three-digit numbers, 437+258=: for testing only, never trained on",
    "mixed": "three two-digit terms, 12+34-15=, no partial result below zero: for testing only, never trained on",
}
FILE_TYPES = (".jsonl", ".json", ".parquet", ".csv")
LONGEST_LINE = 16 * 2**20  # bytes; a line beyond it is a mistake, and would fill the memory before anybody could say so
LARGEST_JSON = 256 * 2**20  # bytes of a .json file, which can only be read as a whole


_HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Problem:
    """One question with its answer; a chat prompt is a tuple of {"role", "content"} messages, gold "" means unknown.

    Raises ValueError for an empty prompt, an empty id, a gold that is not text, and half a character in any of them.
    `meta` takes no part in equality.

    >>> Problem("sums/0", "37+58=", gold="95").gold
    '95'
    """

    id: str
    prompt: str | tuple[Message, ...] = field(hash=False)
    gold: str
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self):
        if not isinstance(self.id, str) or not self.id:
            raise ValueError(f"id must be text that is not empty, not {self.id!r}")
        if not isinstance(self.gold, str):
            raise ValueError(f"gold must be text, not {self.gold!r}; load_problems turns numbers into text")
        object.__setattr__(self, "prompt", _as_prompt(self.prompt))
        said = (
            [self.prompt]
            if isinstance(self.prompt, str)
            else [m[key] for m in self.prompt for key in ("role", "content")]
        )
        for name, text in (("id", self.id), ("gold", self.gold), *(("prompt", text) for text in said)):
            if half := _HALF.search(text):
                raise ValueError(f"{name} holds half a character (U+{ord(half[0]):04X}), which no file can store")
        object.__setattr__(self, "meta", dict(self.meta))

    @property
    def prompt_text(self) -> str:
        """The prompt as one text, for tables: chat messages as JSON."""
        if isinstance(self.prompt, str):
            return self.prompt
        return json.dumps(self.prompt, ensure_ascii=False, default=dict)


@dataclass(frozen=True, repr=False)
class Problems(Sequence):
    """An immutable sequence of Problem; `load_problems(**source)` gives the same again, unless `source` is None.

    Raises ValueError if two problems share an id. Two are equal if they hold equal problems in the same order.

    >>> sums = load_problems("arithmetic", kinds=["add"], size=8)
    >>> len(sums[2:5]), sums.sample(2, seed=1) == sums.sample(2, seed=1)
    (3, True)
    """

    problems: tuple[Problem, ...]
    name: str = field(default="problems", compare=False)
    source: Mapping[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "problems", tuple(self.problems))
        repeated = [id for id, times in Counter(p.id for p in self.problems).items() if times > 1]
        if repeated:
            raise ValueError(
                f"{self.name}: {len(repeated)} ids occur more than once: {_listed(repeated)}; name a unique column with id=, "
                "or remove the id column to number the rows"
            )

    def __len__(self) -> int:
        return len(self.problems)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.problems)

    def __getitem__(self, index):
        return Problems(self.problems[index], self.name) if isinstance(index, slice) else self.problems[index]

    def __repr__(self) -> str:
        return f"Problems({self.name!r}, {len(self)} problems)"

    @property
    def notes(self) -> tuple[str, ...]:
        """What was kept but deserves a look: problems without gold, and repeated prompts.

        >>> Problems([Problem("a", "1+1=", "2"), Problem("b", "1+1=", "")]).notes
        ('1 of 2 rows have no gold; they pay nobody', '1 of 2 rows repeat an earlier prompt')
        """
        reasons: dict[str, list[str]] = {}
        for p in self:
            if not p.gold and "no_gold" in p.meta:
                reasons.setdefault(p.meta["no_gold"], []).append(p.id)
        no_gold = sum(not p.gold for p in self)
        repeats = len(self) - len({json.dumps(p.prompt, sort_keys=True, default=str) for p in self})
        told = ((no_gold, "have no gold; they pay nobody"), (repeats, "repeat an earlier prompt"))
        named = (f"no gold because {why}: {_listed(ids)}" for why, ids in reasons.items())
        return (*(f"{count} of {len(self)} rows {what}" for count, what in told if count), *named)

    def sample(self, k: int, seed: int = 0) -> Problems:
        """k different problems in random order, the same ones for the same seed.

        Raises ValueError if there are fewer than k.

        >>> len({p.id for p in load_problems("arithmetic").sample(32, seed=0)})
        32
        """
        if not 0 <= k <= len(self):
            raise ValueError(f"cannot sample {k} of {len(self)} problems in {self.name}; ask for 0 to {len(self)}")
        return Problems([self.problems[i] for i in _shuffle(len(self), "sample", seed)[:k]], self.name)

    def batch(self, position: int, size: int, seed: int = 0) -> Problems:
        """The problems at positions position … position+size-1 of an endless stream, reshuffled every epoch.

        A pure function of its arguments: a run resumes from a stored position. Batches of one size laid end to end
        use every problem once an epoch, and no batch holds a problem twice. For that, the start of an epoch puts off
        what the batch across the border already holds, so how an epoch is shuffled depends on size and position % size.

        Raises ValueError if size exceeds the number of problems.

        >>> sums = load_problems("arithmetic", size=6)
        >>> len({p.id for p in sums.batch(0, 3)} | {p.id for p in sums.batch(3, 3)})
        6
        """
        if position < 0 or size < 1:
            raise ValueError(f"position must be at least 0 and size at least 1, not {position} and {size}")
        if size > len(self):
            raise ValueError(
                f"a batch of {size} would repeat problems: {self.name} has {len(self)}; "
                f"ask for at most {len(self)} a step (Config's prompts_per_step), or load more problems"
            )
        epoch, start = divmod(position, len(self))
        chosen = _epoch_order(len(self), seed, epoch, size, position % size)[start : start + size]
        if len(chosen) < size:  # across the border; size ≤ len, so into the next epoch and no further
            later = _epoch_order(len(self), seed, epoch + 1, size, position % size)[: size - len(chosen)]
            chosen = np.concatenate([chosen, later])
        return Problems([self.problems[i] for i in chosen], self.name)

    def to_frame(self):
        """A pandas DataFrame: id, prompt, gold and one column per meta key (`meta.gold` where a name is taken).

        >>> list(load_problems("arithmetic", size=2).to_frame().columns)
        ['id', 'prompt', 'gold', 'kind', 'a', 'b']
        """
        import pandas as pd

        def row(p: Problem) -> dict:
            own = {"id": p.id, "prompt": p.prompt, "gold": p.gold}
            return own | {f"meta.{key}" if key in own else key: value for key, value in p.meta.items()}

        return pd.DataFrame(map(row, self), columns=None if len(self) else ["id", "prompt", "gold"])

    def fingerprint(self) -> str:
        """16 hex digits of ids, prompts and golds in order: a resumed run that sees other problems notices.

        >>> sums = load_problems("arithmetic")
        >>> sums.fingerprint() == load_problems(**sums.source).fingerprint() != sums[1:].fingerprint()
        True
        """
        rows = json.dumps([[p.id, p.prompt, p.gold] for p in self], sort_keys=True, default=str)
        return hashlib.sha256(rows.encode()).hexdigest()[:16]


def _listed(ids: Sequence[str]) -> str:
    return ", ".join(map(repr, ids[:5])) + (f", … ({len(ids)} in all)" if len(ids) > 5 else "")


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
    kinds: Sequence[str] | None = None,
    config: str | None = None,
    revision: str | None = None,
    benchmark: str | None = None,
) -> Problems:
    r"""Problems from a named set, a .jsonl, .json, .parquet or .csv file, a table in memory or a Hugging Face dataset.

    Named sets: those of `ARITHMETIC_SETS`, which are made up here, and the paper's seven benchmarks (`BENCHMARKS`), which
    come from the hub; benchmark="gsm8k" reads a file or a table in the form of that benchmark.

    prompt, gold, id name columns (default "prompt", "gold", and "id" where there is one); the others become `meta`.
    template wraps each prompt (the last user message of a chat): only `{prompt}` is replaced. limit keeps the first
    rows and does not look at later ones. size, seed belong to the arithmetic sets ("arithmetic", "sums", "differences",
    "larger", "mixed"), kinds to "arithmetic"; config, revision to the hub.

    Raises ValueError for a bad row (with its line), column, split or option, FileNotFoundError for a missing file,
    OSError if a hub dataset cannot be had. Warns if rows have no gold.

    >>> load_problems([{"q": "6*7?", "a": 42.0}], prompt="q", gold="a", template=r"{prompt} Use \boxed{}.")[0].prompt
    '6*7? Use \\boxed{}.'
    >>> load_problems("arithmetic", split="test", size=100)
    Problems('arithmetic', 100 problems)
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    if template is not None and "{prompt}" not in template:
        raise ValueError(f"template {template!r} has no {{prompt}} where the prompt should go")
    options = {"split": split, "prompt": prompt, "gold": gold, "id": id, "template": template, "limit": limit}
    if isinstance(source, str) and source in ARITHMETIC_SETS:
        _refuse(
            f"the set {source!r}",
            prompt=prompt,
            gold=gold,
            id=id,
            config=config,
            revision=revision,
            benchmark=benchmark,
        )
        name, found, own = _load_arithmetic(source, split, seed, size, kinds, limit)
        again = {"source": source, **options, **own}
    else:
        _refuse("a source other than the arithmetic sets", size=size, kinds=kinds, seed=seed or None)
        by_name = benchmark is None and isinstance(source, str) and source in BENCHMARKS
        if by_name:
            benchmark, named = source, BENCHMARKS[source]
            source, config, split = named.dataset, config or named.config, split or named.split
        name, rows, again = _open(source, split, config, revision)
        rows = list(islice(rows, limit))
        if benchmark is None:
            found = _from_rows(name, rows, again, prompt, gold, id)
        else:
            _refuse("a benchmark, which has its own columns,", prompt=prompt, gold=gold, id=id)
            name, found = benchmark, _from_benchmark(benchmark, name, rows)
            template = TEMPLATE if template is None else template
        own = {
            "split": split,
            "config": config,
            "revision": revision,
            "benchmark": None if by_name else benchmark,
        }
        again = again and {**again, **options, **own, "source": benchmark if by_name else again["source"]}
    if template is not None:
        found = [replace(p, prompt=_apply(template, p)) for p in found]
    again = again and {key: value for key, value in again.items() if value is not None}
    problems = Problems(found, name, again)
    if any(not p.gold for p in problems):
        warnings.warn(f"{name}: {'; '.join(note for note in problems.notes if 'gold' in note)}", stacklevel=2)
    return problems


# ── the arithmetic family ────────────────────────────────────────────────────────────────────────────────────────────


def _load_arithmetic(source, split, seed, size, kinds, limit) -> tuple[str, list[Problem], dict[str, Any]]:
    """Name, problems, and the options under which `load_problems` makes them again."""
    if source in _OUTSIDE:
        _refuse(f"the set {source!r}", kinds=kinds)
        if split not in (None, "test"):
            raise ValueError(f"{source!r} has no split {split!r}: it is made for testing only, so there is only 'test'")
        size = DEFAULT_SIZES["test"] if size is None else size
        found = _outside_problems(source, size, seed)
        return source, found[:limit], {"split": "test", "seed": seed, "size": size}
    if source != "arithmetic":
        _refuse(f"the set {source!r}", kinds=kinds)
        kinds = [kind for kind in SIGNS if _SET_OF_KIND[kind] == source]
    kinds, split = _kinds(kinds), "train" if split is None else split
    size = _arithmetic_size(size, split, kinds)
    family = (arithmetic_problem(i, split, seed, kinds) for i in range(size))
    own = {"split": split, "seed": seed, "size": size} | ({"kinds": list(kinds)} if source == "arithmetic" else {})
    return _family(kinds), list(islice(family, limit)), own


def arithmetic_problem(
    index: int, split: str = "train", seed: int = 0, kinds: Sequence[str] = ("add", "sub")
) -> Problem:
    """Problem number `index` of the family: sums and differences of two-digit numbers, the kinds taking turns.

    The seed shuffles each kind's finite universe, so no problem comes twice. A problem belongs to "test" if crc32 of
    its text is divisible by 5, whatever the seed, so no test problem is ever trained on.

    Raises ValueError for an unknown split or kind, IndexError where a kind is used up.

    >>> p = arithmetic_problem(17, "train", seed=0)
    >>> p.id, p.prompt, p.gold
    ('arithmetic/train/0/17', '96-48=', '48')
    """
    kinds = _kinds(kinds)
    turn, kind = divmod(index, len(kinds))
    kind = kinds[kind]
    universe = _universe(kind, split)
    if not 0 <= turn < len(universe):
        raise IndexError(f"no problem {index} in split {split!r}: it has {len(universe)} of kind {kind!r}")
    a, b = universe[_arithmetic_order(kind, split, seed)[turn]]
    answer = a + b if kind == "add" else a - b
    meta = {"kind": kind, "a": a, "b": b}
    return Problem(f"{_family(kinds)}/{split}/{seed}/{index}", f"{a}{SIGNS[kind]}{b}=", str(answer), meta)


@lru_cache
def _universe(kind: str, split: str) -> tuple[tuple[int, int], ...]:
    if split not in DEFAULT_SIZES:
        raise ValueError(f"arithmetic has no split {split!r}; it has {', '.join(map(repr, DEFAULT_SIZES))}")
    pairs = ((a, b) for a in range(10, 100) for b in range(10, 100) if kind == "add" or a >= b)
    is_test = split == "test"
    return tuple((a, b) for a, b in pairs if (zlib.crc32(f"{a}{SIGNS[kind]}{b}".encode()) % 5 == 0) == is_test)


@lru_cache
def _arithmetic_order(kind: str, split: str, seed: int) -> np.ndarray:
    return _shuffle(len(_universe(kind, split)), "arithmetic", kind, split, seed)


def _kinds(kinds: Sequence[str] | None) -> tuple[str, ...]:
    asked = tuple(SIGNS) if kinds is None else (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if not asked or set(asked) - set(SIGNS):
        raise ValueError(f"arithmetic kinds are {', '.join(map(repr, SIGNS))}; asked for {asked!r}")
    return tuple(kind for kind in SIGNS if kind in asked)


_SET_OF_KIND = {"add": "sums", "sub": "differences"}


def _family(kinds: tuple[str, ...]) -> str:
    # A family of one kind has its own ids, so that equal ids mean equal problems.
    return "arithmetic" if len(kinds) == len(SIGNS) else _SET_OF_KIND[kinds[0]]


def _arithmetic_size(size: int | None, split: str, kinds: tuple[str, ...]) -> int:
    available = len(kinds) * min(len(_universe(kind, split)) for kind in kinds)
    size = DEFAULT_SIZES[split] if size is None else size
    if not 1 <= size <= available:
        raise ValueError(f"{_family(kinds)} has 1 to {available} problems in split {split!r}, not {size}")
    return size


# sets that no agent is trained on: kinds, smallest and largest operand
_OUTSIDE = {
    "larger": (("add", "sub"), 100, 999),
    "mixed": (("add-add", "add-sub", "sub-add", "sub-sub"), 10, 99),
}
_OUTSIDE_LIMIT = 10_000


def _outside_problems(name: str, size: int, seed: int) -> list[Problem]:
    """The first `size` problems of a set that is only for testing; its kinds take turns."""
    if not 1 <= size <= _OUTSIDE_LIMIT:
        raise ValueError(f"{name} has 1 to {_OUTSIDE_LIMIT} problems, not {size}")
    kinds, low, high = _OUTSIDE[name]
    drawn = {kind: _outside_operands(name, kind, low, high, seed, -(-size // len(kinds))) for kind in kinds}
    found = []
    for index in range(size):
        turn, kind = divmod(index, len(kinds))
        kind = kinds[kind]
        signs = [SIGNS[word] for word in kind.split("-")]
        operands = drawn[kind][turn]
        text = str(operands[0]) + "".join(f"{sign}{n}" for sign, n in zip(signs, operands[1:], strict=True))
        meta = {"kind": kind, **dict(zip("abc", operands, strict=False))}
        found.append(
            Problem(f"{name}/test/{seed}/{index}", f"{text}=", str(_partial_results(signs, operands)[-1]), meta)
        )
    return found


def _outside_operands(name: str, kind: str, low: int, high: int, seed: int, count: int) -> list[tuple[int, ...]]:
    """Different operands, none of whose partial results is negative; fewer are always the first of more."""
    signs = [SIGNS[word] for word in kind.split("-")]
    words = np.random.PCG64(_digest("arithmetic", name, kind, seed))
    found: dict[tuple[int, ...], None] = {}  # a dict keeps the order and drops what comes twice
    while len(found) < count:
        operands = tuple(low + int(word) % (high - low + 1) for word in words.random_raw(len(signs) + 1))
        if min(_partial_results(signs, operands)) >= 0:
            found[operands] = None
    return list(found)


def _partial_results(signs: Sequence[str], operands: Sequence[int]) -> list[int]:
    steps = (n if sign == "+" else -n for sign, n in zip(signs, operands[1:], strict=True))
    return list(accumulate(steps, initial=operands[0]))


# ── order ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _shuffle(n: int, *key) -> np.ndarray:
    # numpy promises that PCG64's words stay the same between releases; it does not promise so for permutation().
    return np.argsort(np.random.PCG64(_digest(*key)).random_raw(n), kind="stable")


def _digest(*key) -> int:
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest(), "big")


@lru_cache(maxsize=8)
def _epoch_order(n: int, seed: int, epoch: int, size: int, phase: int) -> np.ndarray:
    # Batches begin at phase, phase + size, …; `held` problems of the batch across the border are from the epoch before.
    first = epoch
    while first > 0 and (first * n - phase) % size:
        first -= 1  # back to a border that no batch crosses: from there on, each epoch's start depends on the last end
    order = _shuffle(n, "batch", seed, first)
    for later in range(first + 1, epoch + 1):
        held = (later * n - phase) % size
        fresh = _shuffle(n, "batch", seed, later)
        head = fresh[~np.isin(fresh, order[n - held :])][: size - held]
        order = np.concatenate([head, fresh[~np.isin(fresh, head)]])
    return order


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _refuse(what: str, **options) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(f"{what} does not take {', '.join(f'{name}=' for name in given)}")


def _from_rows(name: str, rows: list[tuple[str, Any]], again: dict | None, prompt, gold, id) -> list[Problem]:
    told = again["source"] if again else name
    if not rows:
        raise ValueError(f"{told} holds no problems")
    if all(isinstance(row, Problem) for _, row in rows):
        _refuse("a list of Problem", prompt=prompt, gold=gold, id=id)
        return [row for _, row in rows]
    for where, row in rows:
        if not isinstance(row, Mapping):
            raise ValueError(f"{where}: expected an object with named columns, found {type(row).__name__}")
    columns = list(dict.fromkeys(key for _, row in rows for key in row))
    prompt, gold = prompt or "prompt", gold or "gold"
    for option, column in (("prompt", prompt), ("gold", gold), ("id", id)):
        if column is not None and column not in columns:
            listed = ", ".join(map(repr, columns))
            raise ValueError(f'{told} has no column {column!r}; it has {listed}. Name one with {option}="…"')
    id = id or ("id" if "id" in columns and "id" not in (prompt, gold) else None)
    found = []
    for number, (where, row) in enumerate(rows):
        meta = {str(key): value for key, value in row.items() if key not in (prompt, gold, id)}
        try:
            answer = "" if _missing(row.get(gold)) else _as_text(row[gold], gold)
            key = f"{name}/{number}" if id is None else _as_text(row.get(id), id)
            found.append(Problem(key, row.get(prompt), answer if answer.strip() else "", meta))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return found


def _from_benchmark(benchmark: str, name: str, rows: list[tuple[str, Any]]) -> list[Problem]:
    """Problems numbered in the order of the rows; a row without a question is refused, one without a gold is kept."""
    if benchmark not in BENCHMARKS:
        raise ValueError(f"there is no benchmark {benchmark!r}; there are {', '.join(map(repr, BENCHMARKS))}")
    if not rows:
        raise ValueError(f"{name} holds no problems")
    for where, row in rows:
        if not isinstance(row, Mapping):
            raise ValueError(f"{where}: expected an object with named columns, found {type(row).__name__}")
    columns = list(dict.fromkeys(str(key) for _, row in rows for key in row))
    question, gold = find_columns(BENCHMARKS[benchmark], columns, name)
    found = []
    for number, (where, row) in enumerate(rows):
        filled = {question: None, gold: None, **row}  # a row of JSON may lack a column that others have
        try:
            found.append(Problem(f"{benchmark}/{number}", *read_row(BENCHMARKS[benchmark], filled, question, gold)))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return found


def _missing(value) -> bool:
    if isinstance(value, (str, Sequence, Mapping, np.ndarray)):
        return False
    try:
        return value is None or bool(value != value)  # NaN differs from itself
    except TypeError:  # pandas' NA refuses to say
        return True


def _as_text(value, column: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (float, np.floating)) and np.isfinite(value):
        return np.format_float_positional(value + 0.0, trim="-")  # 27.0 → 27, 1e-07 → 0.0000001, -0.0 → 0
    if isinstance(value, (list, tuple, np.ndarray)) and len(value) == 1:
        return _as_text(value[0], column)  # some benchmarks put their one answer in a list
    raise ValueError(f"{column} must be text or a number, not {value!r}")


def _as_prompt(value) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        said = value
    elif isinstance(value, (list, tuple, np.ndarray)):
        for message in value:
            texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"a chat message needs text under 'role' and 'content', not {message!r}")
        # Parquet gives every message every key, None where it was not there.
        value = tuple({key: item for key, item in message.items() if item is not None} for message in value)
        try:
            further = [{k: item for k, item in m.items() if k not in ("role", "content")} for m in value]
            json.dumps(further, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"a chat message must be JSON ({error}), not {value!r}") from None
        said = "".join(message["content"] for message in value)
    elif _missing(value):
        said = ""
    else:
        raise ValueError(f"prompt must be text or a list of chat messages, not {value!r}")
    if not said.strip():
        raise ValueError("the prompt is missing or empty")
    return value


def _apply(template: str, problem: Problem) -> str | tuple[Message, ...]:
    # str.replace and not str.format: LaTeX is full of braces.
    if isinstance(problem.prompt, str):
        return template.replace("{prompt}", problem.prompt)
    last = max((i for i, message in enumerate(problem.prompt) if message["role"] == "user"), default=None)
    if last is None:
        raise ValueError(f"problem {problem.id!r} has no user message for the template")
    said = {**problem.prompt[last], "content": template.replace("{prompt}", problem.prompt[last]["content"])}
    return (*problem.prompt[:last], said, *problem.prompt[last + 1 :])


# ── sources ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _open(source, split, config, revision) -> tuple[str, Iterable[tuple[str, Any]], dict | None]:
    """Name, rows with where each was found, and what to store of the source so that it can be opened again."""
    name, again = type(source).__name__, None
    if isinstance(source, (str, os.PathLike)):
        path, again = Path(source), {"source": os.fspath(source)}
        if path.suffix.lower() in FILE_TYPES and not path.is_dir():
            _refuse(f"the file {path}", split=split, config=config, revision=revision)
            return path.stem, _read_file(path), again
        if path.is_dir():
            name, source = path.name, _load_folder(path)
        elif isinstance(source, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) and not path.exists():
            name, source = source, _load_hub(source, split, config, revision)
            split = config = revision = None
        else:
            raise ValueError(
                f"cannot load {str(source)!r}: give {', '.join(map(repr, [*ARITHMETIC_SETS, *BENCHMARKS]))}, a file "
                f"({', '.join(FILE_TYPES)}), a folder written by save_to_disk, a Hugging Face id 'owner/name', or a "
                "table in memory"
            )
    # Whoever passes a table has imported its library, so this need not.
    datasets, pandas = sys.modules.get("datasets"), sys.modules.get("pandas")
    if datasets and isinstance(source, datasets.DatasetDict):
        split = next(iter(source)) if split is None and len(source) == 1 else split
        if split not in source:
            raise ValueError(f"{name} has no split {split!r}; choose split= from {', '.join(map(repr, source))}")
        source, split = source[split], None
    _refuse(name, split=split, config=config, revision=revision)
    if datasets and isinstance(source, datasets.Dataset):
        source = source.with_format(None)
    elif pandas and isinstance(source, pandas.DataFrame):
        if not source.columns.is_unique:
            raise ValueError(f"{name} has columns of the same name: {list(source.columns)}")
        source = source.to_dict("records")
    elif isinstance(source, Problems):
        name = source.name
    elif not isinstance(source, (list, tuple)):
        raise TypeError(
            f"cannot load problems from {name}; give a path, a Hugging Face id, a list of dicts or of Problem, "
            "a pandas DataFrame, or a datasets.Dataset"
        )
    return name, ((f"{name}, row {number}", row) for number, row in enumerate(source, start=1)), again


def _load_folder(path: Path):
    import datasets

    if not any((path / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
        raise ValueError(f"the folder {path} was not written by save_to_disk; name one file ({', '.join(FILE_TYPES)})")
    return datasets.load_from_disk(str(path))


def _load_hub(source: str, split, config, revision):
    import datasets

    # From version 4 on, datasets has no way to run a repository's own code; an older one is told not to.
    safe = {} if int(datasets.__version__.split(".")[0]) >= 4 else {"trust_remote_code": False}
    try:
        return datasets.load_dataset(source, config, split=split, revision=revision, **safe)
    except Exception as error:  # network, credentials, name, split and format all arrive as different types
        raise OSError(
            f"could not load the Hugging Face dataset {source!r} (config={config!r}, split={split!r}, "
            f"revision={revision!r}), and there is no such local path. {type(error).__name__}: {error}. "
            "Without network, fetch it elsewhere, store it with to_json, to_parquet or save_to_disk, and give that path"
        ) from error


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} (looked from {Path.cwd()}); check its spelling and folder")
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    return readers[path.suffix.lower()](path)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, one at a time and with their ends, so that a large file is never in memory as a whole."""
    with path.open("rb") as file:
        for number in count(1):
            line = file.readline(LONGEST_LINE + 1)
            if len(line) > LONGEST_LINE:
                raise ValueError(
                    f"{path}, line {number}: longer than {LONGEST_LINE:,} bytes, which is no problem that an agent can read; "
                    "a .jsonl file has one object a line, and a quote that is never closed makes one cell of all that follows"
                )
            if not line:
                return
            yield _decoded(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, path, number)


def _decoded(data: bytes, path: Path, number: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, byte = number + before.count(b"\n"), error.start - before.rfind(b"\n")
        value = f"byte {byte} (0x{data[error.start]:02x})"
        raise ValueError(f"{path}, line {line}: {value} is not UTF-8; save the file as UTF-8") from None


def _parsed(text: str) -> Any:
    """A JSON value; raises ValueError, also for what json itself takes: a name given twice, of which it keeps the last."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"{twice!r} is given twice in one object")
    return found


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    # Lines end at a line feed only: JSON strings may hold U+2028. Blank lines are no records.
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            try:
                yield f"{path}, line {number}", _parsed(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not valid JSON ({error})") from None


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    if path.stat().st_size > LARGEST_JSON:
        raise ValueError(
            f"{path}: {path.stat().st_size:,} bytes are too many to be read at once; store it as .jsonl, one object a line"
        )
    text = _decoded(path.read_bytes().removeprefix(codecs.BOM_UTF8), path, 1)
    try:
        rows = _parsed(text)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); one object a line belongs in a .jsonl file") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of objects, found {type(rows).__name__}")
    yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


def _read_csv(path: Path) -> Iterator[tuple[str, Any]]:
    # a carriage return alone ends a line, too, as in files of old spreadsheets
    lines = (part for line in _lines(path) for part in re.split(r"(?<=\r)(?!\n)(?=.)", line, flags=re.DOTALL))
    reader, columns, start = csv.reader(lines, strict=True), None, 1
    try:
        for cells in reader:
            if cells and columns is None:
                columns = cells
                if len(set(columns)) < len(columns):
                    raise ValueError(f"{path}, line {start}: columns of the same name: {columns}")
            elif cells:
                if len(cells) != len(columns):
                    raise ValueError(f"{path}, line {start}: {len(cells)} cells for {len(columns)} columns")
                yield f"{path}, line {start}", dict(zip(columns, cells, strict=True))
            start = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {start}: not valid CSV ({error})") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            # Arrow's own Python values, not pandas': integers with gaps stay integers. In parts, so that `limit` reads few.
            rows = (row for part in file.iter_batches(batch_size=1_000) for row in part.to_pylist())
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: not readable as Parquet ({error})") from None
