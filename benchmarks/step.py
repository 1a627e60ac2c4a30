"""Measure the parts of one HACPO step, and a plain loop that only generates and trains.

    python benchmarks/step.py            # writes reports/step.json

The plain loop processes the same tokens without scoring by sources, verifier, advantages and records. Both run alternately
in one process; medians are reported.
"""

from __future__ import annotations

import argparse
import platform
import resource
import statistics
import time
from pathlib import Path

import torch
from measuring import PARTS

import hacpo_kit as hk
from hacpo_kit.common.files import write_json
from hacpo_kit.models.passes import align
from hacpo_kit.runs.record import versions
from hacpo_kit.updates import minibatches

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--agents", default="tiny-model-pair")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "step.json")
    args = parser.parse_args()
    agents, config = hk.load_agents(args.agents, device="cpu"), hk.Config()
    problems, capability = hk.load_problems("arithmetic", split="train"), hk.Capability()
    totals, plain, parts = [], [], []
    for k in range(args.repeats + 2):
        drawn = problems.batch(k * config.prompts_per_step, config.prompts_per_step)
        start = time.perf_counter()
        result = hk.step(agents, drawn, capability, config)
        total = time.perf_counter() - start
        capability = result.capability
        bare = plain_loop(agents, drawn, result, config)
        if k >= 2:  # without two steps of warm-up of allocators, kernels and verifier processes
            totals.append(total)
            plain.append(bare)
            parts.append([result.metrics[f"seconds_{part}"] for part in PARTS])
    split = {name: statistics.median(p[i] for p in parts) for i, name in enumerate(PARTS)}
    step_seconds, plain_seconds = statistics.median(totals), statistics.median(plain)
    report = {
        "step_seconds": round(step_seconds, 3),
        "split_seconds": {k: round(v, 3) for k, v in split.items()},
        "unexplained_by_split": round(1 - sum(split.values()) / step_seconds, 3),
        "plain_loop_seconds": round(plain_seconds, 3),
        "share_beyond_plain_loop": round(1 - plain_seconds / step_seconds, 3),
        "step_seconds_range": [round(min(totals), 3), round(max(totals), 3)],
        "agents": args.agents, "prompts": config.prompts_per_step, "n": config.n, "repeats": args.repeats,
        "threads": torch.get_num_threads(), "machine": platform.machine(),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "versions": versions(),
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out, report)
    for key, value in report.items():
        print(f"{key:26} {value}")


def plain_loop(agents, problems, result, config) -> float:
    """Generate with every agent, then forward, backward and step on the same mini-batches; the agents stay unchanged."""
    before = [{k: v.clone() for k, v in a.model.state_dict().items()} for a in agents]
    start = time.perf_counter()
    for agent in agents:
        prompts = [agent.encode_prompt(p.prompt) for p in problems for _ in range(config.n)]
        width = max(map(len, prompts))
        ids = torch.tensor([[agent.pad_id] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        how = {"do_sample": True, "top_k": 0, "max_new_tokens": config.max_new_tokens}
        with torch.no_grad():
            agent.model.generate(input_ids=ids, attention_mask=mask, **how)
    for agent in agents:
        optimizer = torch.optim.AdamW(agent.model.parameters(), lr=1e-6)
        batch = result.batches[agent.name]
        for rows in minibatches(batch.own, config, seed=0):
            ids, attention, mask = align(
                [batch.prompt_ids[i] for i in rows], [batch.response_ids[i] for i in rows], agent.pad_id
            )
            width = mask.shape[1]
            logits = agent.model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, -width - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits[mask], ids[:, -width:][mask])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - start
    for agent, weights in zip(agents, before, strict=True):
        agent.model.load_state_dict(weights)
    return seconds


if __name__ == "__main__":
    main()
