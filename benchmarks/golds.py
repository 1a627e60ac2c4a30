r"""Measure whether the verifier accepts the gold answers of benchmark files, and refuses those of other problems.

    python benchmarks/golds.py FOLDER      # with gsm8k.jsonl, math500.parquet, … : any benchmark's name and file type

Every gold is put into a box and must score 1 against itself; then each is scored against the golds of other problems, five
times, and must score 0. Prints a table, and every gold that fails with the reason; exit status 1 if a set misses 99 %
right or 0.5 % wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from pathlib import Path

import hacpo_kit as hk
from hacpo_kit.rewards import score
from hacpo_kit.tasks.benchmarks import BENCHMARKS
from hacpo_kit.tasks.readers import FILE_READERS

SHUFFLES = 5


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    files = {name: args.folder / f"{name}{kind}" for name in BENCHMARKS for kind in FILE_READERS}
    found = {
        name: file for name in BENCHMARKS for kind in FILE_READERS if (file := args.folder / f"{name}{kind}").is_file()
    }
    if not found:
        sys.exit(f"{args.folder} holds none of {', '.join(path.name for path in files.values())}")
    print(f"| {'set':13} | rows | no gold | own accepted  | others accepted | seconds |\n|---|---|---|---|---|---|")
    results = {name: check(name, file) for name, file in found.items()}
    for name, (_, notes) in results.items():
        print(*(f"{name}: {line}" for line in notes), sep="\n" if notes else "", end="\n" if notes else "")
    sys.exit(not all(good for good, _ in results.values()))


def check(name: str, file: Path) -> tuple[bool, list[str]]:
    """Print one line of the table; return whether the set passes, and notes on it."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows without gold are counted below
        problems = hk.load_problems(file, benchmark=name)
    usable = [p for p in problems if p.gold]
    own = score([(boxed(p.gold), p.gold) for p in usable])
    notes = list(problems.notes)
    failed = [(p, v) for p, v in zip(usable, own, strict=True) if v.reward != 1]
    notes += [f"{p.id} has the gold {p.gold!r}, which boxed gives {v.status} {v.detail}".rstrip() for p, v in failed]
    pairs = [(p, q) for seed in range(SHUFFLES) for p, q in shuffled(usable, seed)]
    others = score([(boxed(p.gold), q.gold) for p, q in pairs])
    accepted = [(p, q) for (p, q), v in zip(pairs, others, strict=True) if v.reward]
    notes += [f"{p.id}'s gold {p.gold!r} is accepted for {q.id}, {q.gold!r}" for p, q in dict.fromkeys(accepted)]
    right, wrong = 1 - len(failed) / len(usable), len(accepted) / max(1, len(pairs))
    print(
        f"| {name:13} | {len(problems):4} | {len(problems) - len(usable):7} | {right:13.1%} | {wrong:15.2%} "
        f"| {time.perf_counter() - start:7.1f} |",
        flush=True,
    )
    return right >= 0.99 and wrong <= 0.005, notes


def boxed(gold: str) -> str:
    r"""Return the gold as an answer, without its tolerance."""
    return rf"\boxed{{{gold.partition(' (tolerance ')[0]}}}"


def shuffled(problems: list, seed: int) -> list[tuple]:
    """Return pairs of problems with different golds."""
    others = random.Random(seed).sample(problems, len(problems))
    return [(p, q) for p, q in zip(problems, others, strict=True) if p.gold != q.gold]


if __name__ == "__main__":
    main()
