"""Measure the share of the machine's matrix rate that an update of a real model reaches, and sampling by batch size.

    python benchmarks/real_model.py FOLDER            # e.g. SmolLM2-135M-Instruct; writes reports/real_model.json

The machine's rate is that of square bf16 matrix products, measured before and after in the same run. Useful operations are
counted equally for the package and for a plain loop: 6 per weight and token (forward 2, backward 4), with prompt and answer
tokens in the layers, answer tokens alone in the output head; padding does not count.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
from engines import GROUP, speed

import hacpo_kit as hk
from hacpo_kit.common.files import write_json
from hacpo_kit.models.passes import align
from hacpo_kit.runs.record import versions
from hacpo_kit.updates import minibatches

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a local folder or hub id")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "real_model.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    agent = hk.load_agent(args.model, dtype=args.dtype, name="measured")
    problems = hk.load_problems("arithmetic", split="train", size=64)
    rates = [matrix_rate(agent)]
    updates = update_shares(agent, problems[: args.prompts], args)
    rates.append(matrix_rate(agent))
    rollouts = {
        n: speed({"own": agent}, problems[: n // GROUP], args.new_tokens, args.repeats)["own"] for n in (16, 64)
    }
    rate = statistics.mean(r["rate"] for r in rates)
    report = {
        "model": Path(args.model).name, "dtype": args.dtype, "threads": args.threads, "device": str(agent.device),
        "matrix_gflops": [r["rate"] for r in rates], "matrix_sizes": rates[0]["sizes"],
        "update": {
            who: {**v, "share_of_matrix_rate": round(v["gflops"] / rate, 3)} for who, v in updates.items()
        },
        "rollout_tokens_per_second": rollouts,
        "rollout_64_over_16": round(rollouts[64]["median"] / rollouts[16]["median"], 2),
        "repeats": args.repeats, "machine": platform.machine(), "versions": versions(),
    }  # fmt: skip
    write_json(args.out, report)
    for key, value in report.items():
        print(f"{key:26} {value}")


def matrix_rate(agent, sizes=(1024, 2048, 4096)) -> dict:
    """Return the best rate of square matrix products in the agent's precision (10⁹ operations/s), and that of each size."""
    found = {}
    for n in sizes:
        a, b = (torch.randn(n, n, device=agent.device, dtype=agent.model.dtype) for _ in range(2))
        times = [timed(agent, lambda a=a, b=b: a @ b) for _ in range(5)]
        found[n] = round(2 * n**3 / min(times[1:]) / 1e9, 1)
    return {"rate": max(found.values()), "sizes": found}


def update_shares(agent, problems, args) -> dict[str, dict]:
    """Return the speed of `hk.update` and of a plain loop on the same rollouts, measured alternately."""
    config = hk.Config.preset("gspo", minibatch=len(problems) * 4, lr=1e-6, max_new_tokens=args.new_tokens)
    pool = hk.rollout([agent], problems, 8, max_new_tokens=args.new_tokens, progress=False)
    pool = pool.with_rewards(
        [i % 2.0 for i in range(len(pool))], ["measured"] * len(pool)
    )  # every group has a gradient
    batch = hk.advantage(pool, agent, hk.Capability().observe(pool), config)
    operations, tokens = useful(agent, batch)
    start = {k: v.clone() for k, v in agent.model.state_dict().items()}
    times: dict[str, list[float]] = {"hacpo_kit": [], "plain": []}
    for _ in range(args.repeats + 1):
        pool.updates[agent.name] = agent.updates  # the weights are restored below, so these are still its own rollouts
        times["hacpo_kit"].append(timed(agent, lambda: hk.update(agent, batch, config)))
        agent.model.load_state_dict(start)
        agent.optimizer = None
        times["plain"].append(timed(agent, lambda: plain_update(agent, batch, config)))
        agent.model.load_state_dict(start)
    out = {}
    for who, seconds in times.items():
        median = statistics.median(seconds[1:])  # without the warm-up
        out[who] = {"seconds": round(median, 2), "tokens_per_second": round(tokens / median, 1)}
        out[who] |= {
            "gflops": round(operations / median / 1e9, 1),
            "range": [round(min(seconds[1:]), 2), round(max(seconds[1:]), 2)],
        }
    return out


def useful(agent, batch) -> tuple[int, int]:
    """Return the useful operations of an update of this batch, and its tokens."""
    weights = sum(p.numel() for p in agent.model.parameters())
    head = agent.model.get_output_embeddings().weight.numel()
    tied = agent.model.config.tie_word_embeddings
    body = weights - head if tied else weights - 2 * head  # the input embedding is a lookup
    responses = sum(map(len, batch.response_ids))
    tokens = responses + sum(map(len, batch.prompt_ids))
    return 6 * (body * tokens + head * responses), tokens


def plain_update(agent, batch, config) -> None:
    """Update as a short script does: unsorted rows, logits of all tokens, cross entropy, AdamW on the bf16 weights."""
    optimizer = torch.optim.AdamW(agent.model.parameters(), lr=config.lr)
    for rows in minibatches(batch.own, config, seed=0):
        for k in range(0, len(rows), 16):
            some = rows[k : k + 16]
            prompts, responses = [batch.prompt_ids[i] for i in some], [batch.response_ids[i] for i in some]
            ids, attention, mask = (t.to(agent.device) for t in align(prompts, responses, agent.pad_id))
            width = mask.shape[1]
            logits = agent.model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, -width - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits[mask].float(), ids[:, -width:][mask], reduction="sum")
            (loss / len(rows)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def timed(agent, work) -> float:
    """Return the wall time of `work` (s) until the device has finished."""
    if agent.device.type == "cuda":
        torch.cuda.synchronize(agent.device)
    start = time.perf_counter()
    work()
    if agent.device.type == "cuda":
        torch.cuda.synchronize(agent.device)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
