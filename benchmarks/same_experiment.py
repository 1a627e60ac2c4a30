"""Run one experiment with three engines: transformers in this process, vLLM in this process, transformers in Ray workers.

    OMP_NUM_THREADS=1 python benchmarks/same_experiment.py      # needs both extras; writes reports/same_experiment.json

Agents, problems, seed and settings are equal. Ray's workers must give a bit-identical run; vLLM samples other answers from
the same distribution, so its curve may differ like that of another seed, which other seeds of the first engine show.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from measuring import PARTS, surroundings

import hacpo_kit as hk
from hacpo_kit.common.files import write_json

ROOT = Path(__file__).resolve().parent.parent
WAYS = {"transformers": {}, "vllm": {"engine": "vllm"}, "ray": {"workers": "ray", "threads": 1}}


def main() -> None:
    """Run all and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="tiny-model-pair")
    parser.add_argument("--method", default="hacpo")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--eval-every", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3, help="of transformers and vllm; ray repeats the first")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "same_experiment.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [one(way, seed, args) for seed in range(args.seeds) for way in WAYS if not (way == "ray" and seed)]
    first = {run["way"]: run for run in reversed(runs)}
    report = {
        "agents": args.agents, "method": args.method, "steps": args.steps, "runs": runs,
        "ray_is_transformers_to_the_last_bit": first["ray"]["learned"] == first["transformers"]["learned"],
        "threads_each": 1, **surroundings("ray"),
    }  # fmt: skip
    for run in runs:
        del run["learned"]
    write_json(args.out, report)
    print(f"ray = transformers to the last bit: {report['ray_is_transformers_to_the_last_bit']}; {args.out}")


def one(way: str, seed: int, args) -> dict:
    """Make one run; return mean accuracy of the agents by step, median seconds of a step, gap of the engine (nats)."""
    config = hk.Config.preset(args.method, seed=seed)
    agents = hk.load_agents(args.agents, device="cpu", **WAYS[way])
    problems, test = (
        hk.load_problems("arithmetic", split="train"),
        hk.load_problems("arithmetic", split="test", size=400),
    )
    start = time.perf_counter()
    run = hk.train(agents, problems, config, steps=args.steps, test=test, eval_every=args.eval_every, progress="off")
    seconds = time.perf_counter() - start
    steps = run.history[1:]  # the first line is the evaluation before training
    gaps = [a["engine_gap_mean"] for r in steps for a in r["agents"].values() if "engine_gap_mean" in a]
    spent = {part: [r[f"seconds_{part}"] for r in steps] for part in PARTS}
    found = {
        "way": way, "seed": seed, "accuracy": accuracies(run), "seconds": round(seconds, 1),
        "step_seconds": round(statistics.median(map(sum, zip(*spent.values(), strict=True))), 3),
        "rollout_seconds": round(statistics.median(spent["rollout"]), 3),
        "engine_gap_mean": max(gaps) if gaps else None,
        "learned": [record["agents"] for record in run.history],
    }  # fmt: skip
    print({k: v for k, v in found.items() if k != "learned"}, flush=True)
    return found


def accuracies(run) -> dict[int, float]:
    """Return the mean greedy accuracy of the agents after each evaluated step."""
    values = {r["step"]: [a["avg@1"] for a in r["agents"].values() if "avg@1" in a] for r in run.history}
    return {step: round(statistics.mean(some), 4) for step, some in values.items() if some}


if __name__ == "__main__":
    main()
