"""Measure the sampled tokens/s of both engines on one model, and the share of a step in which vLLM's weights are copied.

    python benchmarks/engines.py FOLDER            # e.g. SmolLM2-135M-Instruct; writes reports/engines.json

The engines alternately sample eight answers to each of the same prompts, so other load slows both. A step is one of GSPO
with as many rollouts as sequences; the copy of the weights is timed separately.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from measuring import surroundings

import hacpo_kit as hk
from hacpo_kit.common.files import write_json
from hacpo_kit.rollouts import Sampling, sample

ROOT = Path(__file__).resolve().parent.parent
GROUP = 8  # answers to each prompt, as in a rollout


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a built-in name, a local folder or a hub id")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "engines.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report = {
        "model": Path(args.model).name, "dtype": args.dtype, "threads": args.threads, "new_tokens": args.new_tokens,
        **compare(args.model, args.dtype, args.sequences, args.new_tokens, args.repeats),
        "repeats": args.repeats, **surroundings(),
    }  # fmt: skip
    write_json(args.out, report)
    for key, value in report.items():
        print(f"{key:26} {value}")


def compare(model: str, dtype: str, sequences: list[int], new_tokens: int, repeats: int) -> dict:
    """Return tokens/s of both engines by number of sequences, the faster one, and the share of a step that a copy takes."""
    agents = {e: hk.load_agent(model, name=e, dtype=dtype, engine=e) for e in ("transformers", "vllm")}
    problems = hk.load_problems("arithmetic", split="train", size=max(sequences))
    speeds = {n: speed(agents, problems[: n // GROUP], new_tokens, repeats) for n in sequences}
    faster = {n: max(s, key=lambda e, s=s: s[e]["median"]) for n, s in speeds.items()}
    ratio = {n: round(s["vllm"]["median"] / s["transformers"]["median"], 2) for n, s in speeds.items()}
    return {
        "tokens_per_second": speeds, "vllm_over_transformers": ratio, "faster": faster,
        "synchronising": synchronising(agents["vllm"], problems[:4], new_tokens, repeats),
    }  # fmt: skip


def speed(agents: dict[str, hk.Agent], problems, new_tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return median, minimum and maximum tokens/s of each engine, without the first round, in which vLLM starts."""
    rates: dict[str, list[float]] = {name: [] for name in agents}
    for k in range(repeats + 1):
        for name, agent in agents.items():
            start = time.perf_counter()
            answers = sample(agent, problems, Sampling(GROUP, max_new_tokens=new_tokens, seed=k))
            rates[name].append(sum(len(r.token_ids) for r in answers) / (time.perf_counter() - start))
    return {
        name: {"median": round(statistics.median(r), 1), "min": round(min(r), 1), "max": round(max(r), 1)}
        for name, r in ((name, some[1:]) for name, some in rates.items())
    }


def synchronising(agent: hk.Agent, problems, new_tokens: int, repeats: int) -> dict[str, float]:
    """Return medians over steps: seconds of a copy of the weights, seconds of a step, gap of the log-probabilities (nats)."""
    config = hk.Config.preset("gspo", n=4, minibatch=16, lr=1e-6, max_new_tokens=new_tokens)
    capability, copies, steps, gaps = hk.Capability(), [], [], []
    for _ in range(repeats):
        start = time.perf_counter()
        result = hk.step(agent, problems, capability, config)  # its rollout copies what the last update changed
        steps.append(time.perf_counter() - start)
        capability = result.capability
        gaps.append({k: v for k, v in result.metrics["agents"][agent.name].items() if k.startswith("engine_gap")})
        start = time.perf_counter()
        agent.engine.synchronise(agent)
        copies.append(time.perf_counter() - start)
    copy, step = statistics.median(copies), statistics.median(steps)
    largest = {k: max(g[k] for g in gaps) for k in gaps[0]}
    return {
        "seconds": round(copy, 3),
        "step_seconds": round(step, 2),
        "share_of_step": round(copy / step, 4),
        **largest,
    }


if __name__ == "__main__":
    main()
