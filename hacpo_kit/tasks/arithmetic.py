"""The generated problem sets: sums and differences, reproducible from a seed, without repetitions."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from hacpo_kit.tasks.order import bit_generator, shuffled_indices
from hacpo_kit.tasks.problems import Problem, Problems

# name → kinds of problems, which alternate
ARITHMETIC_SETS = {
    "arithmetic": ("add", "sub"),  # two-digit numbers: 37+58=, 83-27=
    "sums": ("add",),
    "differences": ("sub",),
    "larger": ("add", "sub"),  # three-digit numbers: 437+258=
    "mixed": ("add-add", "add-sub", "sub-add", "sub-sub"),  # three two-digit numbers: 12+34-15=
}
# Sets for testing only, and their smallest and largest operands
_OPERAND_RANGES = {"larger": (100, 999), "mixed": (10, 99)}
_LARGEST_TEST_SET = 10_000
_DEFAULT_SIZES = {"train": 2_000, "test": 400}
_SIGNS = {"add": "+", "sub": "-"}


def arithmetic_set(name: str, split: str | None = None, seed: int = 0, size: int | None = None) -> Problems:
    """Return `size` problems of a set in ARITHMETIC_SETS, in an order given by `seed`.

    No test problem is a training problem, whatever the seed: a two-digit problem belongs to "test" if the crc32 of its
    text is divisible by 5.

    Raises ValueError for an unknown split, and for more problems than the set has.

    >>> [p.prompt for p in arithmetic_set("arithmetic", size=4)]
    ['36+68=', '85-16=', '53+90=', '51-32=']
    """
    kinds, testing_only = ARITHMETIC_SETS[name], name in _OPERAND_RANGES
    splits = ["test"] if testing_only else ["train", "test"]
    split = splits[0] if split is None else split
    if split not in splits:
        raise ValueError(f"the set {name!r} has no split {split!r}; it has {', '.join(map(repr, splits))}")
    available = _LARGEST_TEST_SET
    if not testing_only:
        available = len(kinds) * min(len(_universe(kind, split)) for kind in kinds)
    size = _DEFAULT_SIZES[split] if size is None else size
    if not 1 <= size <= available:
        raise ValueError(f"size={size}: the set {name!r} has 1 to {available} problems in split {split!r}")
    operands = {kind: _operands(name, kind, split, seed, -(-size // len(kinds))) for kind in kinds}
    problems = []
    for index in range(size):
        turn, which = divmod(index, len(kinds))
        kind = kinds[which]
        problems.append(_problem(f"{name}/{split}/{seed}/{index}", kind, operands[kind][turn]))
    return Problems(problems, name, {"source": name, "split": split, "seed": seed, "size": size})


def _problem(id: str, kind: str, operands: Sequence[int]) -> Problem:
    text = str(operands[0]) + "".join(f"{sign}{n}" for sign, n in zip(_signs(kind), operands[1:], strict=True))
    meta = {"kind": kind, **dict(zip("abc", operands, strict=False))}
    return Problem(id, f"{text}=", str(_partial_results(kind, operands)[-1]), meta)


def _signs(kind: str) -> list[str]:
    return [_SIGNS[word] for word in kind.split("-")]


def _partial_results(kind: str, operands: Sequence[int]) -> list[int]:
    terms = (n if sign == "+" else -n for sign, n in zip(_signs(kind), operands[1:], strict=True))
    return list(accumulate(terms, initial=operands[0]))


def _operands(name: str, kind: str, split: str, seed: int, count: int) -> list[tuple[int, ...]]:
    """Return `count` different operands of one kind; a smaller count gives the first of them."""
    if name not in _OPERAND_RANGES:
        universe = _universe(kind, split)
        return [universe[i] for i in shuffled_indices(len(universe), "arithmetic", kind, split, seed)[:count]]
    low, high = _OPERAND_RANGES[name]
    generator, length = bit_generator("arithmetic", name, kind, seed), len(_signs(kind)) + 1
    found: dict[tuple[int, ...], None] = {}  # a dict keeps the order and removes repetitions
    while len(found) < count:
        operands = tuple(low + int(word) % (high - low + 1) for word in generator.random_raw(length))
        if min(_partial_results(kind, operands)) >= 0:
            found[operands] = None
    return list(found)


@lru_cache
def _universe(kind: str, split: str) -> list[tuple[int, int]]:
    """All two-digit problems of one kind in one split."""
    pairs = ((a, b) for a in range(10, 100) for b in range(10, 100) if kind == "add" or a >= b)
    is_test = split == "test"
    return [(a, b) for a, b in pairs if (zlib.crc32(f"{a}{_SIGNS[kind]}{b}".encode()) % 5 == 0) == is_test]
