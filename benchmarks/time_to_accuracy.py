"""Measure seconds, rollouts and tokens until each method keeps an accuracy on the built-in pairs, over seeds.

    OMP_NUM_THREADS=1 python benchmarks/time_to_accuracy.py      # writes reports/time_to_accuracy.json

Accuracy is the mean of the agents' avg@1 (greedy) on the test problems after every step; a run keeps it from the first step after
which it stays at or above the level. Seconds are those of the steps, without evaluation; the methods alternate, so other
load slows all. A run that does not reach the level counts as infinitely long; medians over seeds are reported. Some methods
need only three steps, so costs are also interpolated `between` steps: where the straight line from the accuracy of the step
before crosses the level. `hacpo_n4` is
hacpo with half of the rollouts per prompt: two agents then have as many answers to a prompt, and as large an update, as one
alone.
"""

from __future__ import annotations

import argparse
import math
import statistics
from itertools import accumulate
from pathlib import Path

import torch
from measuring import PARTS, surroundings

import hacpo_kit as hk
from hacpo_kit.common.files import write_json

ROOT = Path(__file__).resolve().parent.parent
COSTS = ("seconds", "rollouts", "tokens", "seconds_between", "rollouts_between", "tokens_between")
FURTHER = {"hacpo_n4": {"method": "hacpo", "n": 4}}


def main() -> None:
    """Run all and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", nargs="+", default=["tiny-state-pair", "tiny-size-pair", "tiny-model-pair"])
    parser.add_argument("--methods", nargs="+", default=["gspo", "gspo_x2", "hacpo", *FURTHER])
    parser.add_argument("--level", type=float, default=0.8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "time_to_accuracy.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {pair: {method: [] for method in args.methods} for pair in args.agents}  # pair → method → cost of each seed
    for pair in args.agents:
        for seed in range(args.seeds):
            for method in args.methods:
                found[pair][method].append(cost(pair, method, seed, args))
                print(pair, seed, method, found[pair][method][-1], flush=True)
    report = {
        "level": args.level, "median": {pair: medians(found[pair]) for pair in found}, "over_gspo": over(found),
        "runs": found, "steps": args.steps, "seeds": args.seeds, "threads": 1, **surroundings(),
    }  # fmt: skip
    write_json(args.out, report)
    for pair, ratios in report["over_gspo"].items():
        print(pair, ratios)


def cost(pair: str, method: str, seed: int, args) -> dict[str, float] | None:
    """Return the cost of one run until it keeps the level; None if it does not."""
    agents = hk.load_agents(pair, device="cpu")
    problems, test = (
        hk.load_problems("arithmetic", split="train"),
        hk.load_problems("arithmetic", split="test", size=200),
    )
    config = hk.Config.preset(**{"method": method, "seed": seed, **FURTHER.get(method, {})})
    run = hk.train(agents, problems, config, args.steps, test=test, eval_every=1, progress="off")
    accuracy = [statistics.mean(a["avg@1"] for a in line["agents"].values()) for line in run.history]
    held = next((k for k in range(1, len(accuracy)) if min(accuracy[k:]) >= args.level), None)
    if held is None:
        return None
    spent = [sum(line.get(f"seconds_{part}", 0) for part in PARTS) for line in run.history]
    total = {
        "seconds": list(accumulate(spent)),
        **{k: [line[k] for line in run.history] for k in ("rollouts", "tokens")},
    }
    before, after = accuracy[held - 1 : held + 1]
    part = max(0.0, (args.level - before) / (after - before))  # 0: the level was reached before, and lost in between
    costs = {k: round(of[held], 2) for k, of in total.items()}
    between = {f"{k}_between": round(of[held - 1] + part * (of[held] - of[held - 1]), 2) for k, of in total.items()}
    return {"step": held, **costs, **between}


def medians(runs: dict[str, list[dict | None]]) -> dict[str, dict[str, float | None]]:
    """Return the median cost of each method; None if half of the runs do not reach the level."""
    out: dict[str, dict[str, float | None]] = {}
    for method, costs in runs.items():
        middle = {k: statistics.median(math.inf if c is None else c[k] for c in costs) for k in ("step", *COSTS)}
        out[method] = {k: None if math.isinf(v) else v for k, v in middle.items()}
    return out


def over(found) -> dict[str, dict[str, dict[str, float]]]:
    """Return the median over seeds of each method's cost divided by that of gspo with the same seed."""
    out = {}
    for pair, runs in found.items():
        both = {m: [(a, b) for a, b in zip(runs[m], runs["gspo"], strict=True) if a and b] for m in runs if m != "gspo"}
        out[pair] = {
            m: {k: round(statistics.median(a[k] / b[k] for a, b in pairs), 3) for k in COSTS}
            for m, pairs in both.items()
            if pairs
        }
    return out


if __name__ == "__main__":
    main()
