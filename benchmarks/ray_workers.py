"""Compare a step with two Ray workers of one thread each to a step in one process with one thread.

    OMP_NUM_THREADS=1 python benchmarks/ray_workers.py      # writes reports/ray.json

Both make the same steps on the same problems, alternately and from equal agents. Reported are medians after warm-up, the
bytes sent, and whether the weights are bit-identical.
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


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--agents", default="tiny-model-pair")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "ray.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = hk.Config.preset("hacpo", prompts_per_step=args.prompts)
    problems = hk.load_problems("arithmetic", split="train")
    kinds = {
        "one_process": hk.load_agents(args.agents, device="cpu"),
        "two_workers": hk.load_agents(args.agents, workers="ray", threads=1, device="cpu"),
    }
    capability = dict.fromkeys(kinds, hk.Capability())
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    split: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    metrics: dict[str, dict] = {}
    travelled: list[int] = []
    for k in range(args.warm_up + args.repeats):
        drawn = problems.batch(k * args.prompts, args.prompts)
        for kind in list(kinds)[:: 1 if k % 2 else -1]:  # the order alternates
            before = moved(kinds[kind])
            start = time.perf_counter()
            result = hk.step(kinds[kind], drawn, capability[kind], config)
            spent = time.perf_counter() - start
            capability[kind], metrics[kind] = result.capability, result.metrics["agents"]
            if k >= args.warm_up:
                seconds[kind].append(spent)
                split[kind].append([result.metrics[f"seconds_{part}"] for part in PARTS])
                if kind == "two_workers":
                    travelled.append(moved(kinds[kind]) - before)
    middle = {kind: statistics.median(values) for kind, values in seconds.items()}
    report = {
        "step_seconds": {kind: round(value, 3) for kind, value in middle.items()},
        "step_seconds_range": {kind: [round(min(v), 3), round(max(v), 3)] for kind, v in seconds.items()},
        "split_seconds": {
            kind: {part: round(statistics.median(r[i] for r in rows), 3) for i, part in enumerate(PARTS)}
            for kind, rows in split.items()
        },
        "share_of_one_process": round(middle["two_workers"] / middle["one_process"], 3),
        "bytes_travelled_per_step": statistics.median(travelled),
        "bytes_of_weights": sum(
            p.numel() * p.element_size() for a in kinds["one_process"] for p in a.model.parameters()
        ),
        "same_result": metrics["one_process"] == metrics["two_workers"],
        "repeats": args.repeats,
        "agents": args.agents,
        "prompts_per_step": args.prompts,
        "rollouts_per_prompt": config.rollouts_per_prompt,
        "threads_each": 1,
        **surroundings("ray"),
    }
    write_json(args.out, report)
    print(f"one process {middle['one_process']:.2f} s, two workers {middle['two_workers']:.2f} s a step:", end=" ")
    print(f"{report['share_of_one_process']:.0%}; {report['bytes_travelled_per_step']:,.0f} bytes travelled")
    print(f"same result: {report['same_result']}; load average {report['load_average']}; {args.out}")


def moved(agents) -> int:
    """Return the bytes sent to and from the workers so far."""
    return sum(agent.sent + agent.received for agent in agents if agent.workers)


if __name__ == "__main__":
    main()
