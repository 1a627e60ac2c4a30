"""Measure how step time and memory grow with agents, rollouts per prompt, prompts, length and model size.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py      # writes reports/scaling.json and reports/scaling.png

One quantity varies at a time around a base. Agents, rollouts and prompts are varied with the built-in agents, which learn from
each other; length and width with one model with random weights, whose answers have the maximum length and whose rewards are
random. The growth of each part is the slope of log seconds against log quantity, over the larger half of the values, where
fixed costs matter less: 1 is linear, 2 quadratic. Every value is measured in separate processes, one in each of
several rounds over all values, so other load slows all; the median is reported. Memory is the peak in a step (Linux) minus
that after a small step without these agents. δ_step is 0, because the clipping range would otherwise narrow with more
mini-batches, and peer rollouts would cost less.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from measuring import PARTS, memory, random_reward, surroundings
from transformers import AutoModelForCausalLM

import hacpo_kit as hk
from hacpo_kit.common.files import write_json
from hacpo_kit.rewards import boxed_math

ROOT = Path(__file__).resolve().parent.parent
BASE = {"agents": 2, "n": 8, "prompts": 16, "new_tokens": 24, "width": 0}  # width 0: the built-in agents
RANDOM = {**BASE, "agents": 1, "width": 64}
VARIED = {
    "agents": (BASE, [1, 2, 3, 4]), "n": (BASE, [4, 8, 16, 32]), "prompts": (BASE, [8, 16, 32, 64]),
    "new_tokens": (RANDOM, [12, 24, 48, 96]), "width": (RANDOM, [64, 128, 256, 512]),
}  # fmt: skip
TOLD = {
    "agents": "agents", "n": "rollouts per prompt", "prompts": "prompts", "new_tokens": "tokens of an answer", "width": "width",
}  # fmt: skip
ONES = ("qwen3-sums", "llama-differences", "qwen3-small-differences", "llama-novice")


def main() -> None:
    """Measure, fit and write the JSON and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="steps in a process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "scaling.json")
    args = parser.parse_args()
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for round_ in range(args.rounds):
        for name, (base, values) in VARIED.items():
            for value in values:
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                    one = process.submit(alone, **{**base, name: value}, repeats=args.repeats).result()
                found.setdefault((name, value), []).append(one)
                print(round_, name, value, {k: round(v, 4) for k, v in one.items()}, flush=True)
    rows = [{"varies": name, "value": value, **middle(ones)} for (name, value), ones in found.items()]
    frame = pd.DataFrame(rows)
    report = {
        "base": BASE, "base_random": RANDOM, "rows": rows,
        "growth": {name: growth(frame[frame["varies"] == name]) for name in VARIED},
        "repeats": args.repeats, "rounds": args.rounds, "threads": 1, **surroundings(),
    }  # fmt: skip
    write_json(args.out, report)
    args.out.with_suffix(".png").write_bytes(picture(frame).png())
    print(pd.DataFrame(report["growth"]).round(2).to_string())


def random_agent(width: int) -> hk.Agent:
    """Return an agent with random weights of this width and the tokenizer of a built-in agent."""
    like = hk.load_agent(ONES[0], device="cpu")
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 3, "head_dim": 32}
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 32}
    config = type(like.model.config)(vocab_size=like.model.config.vocab_size, **shape, **heads)
    torch.manual_seed(0)
    return hk.Agent(AutoModelForCausalLM.from_config(config, dtype=torch.float32), like.tokenizer, name="random")


def alone(repeats: int, **setting: int) -> dict[str, float]:
    """Return the result of `one_step` in a new process, after a small step as warm-up."""
    torch.set_num_threads(1)
    one_step(**{**BASE, "prompts": 2}, repeats=1)
    return one_step(**setting, repeats=repeats)


def one_step(agents: int, n: int, prompts: int, new_tokens: int, width: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of each part of a HACPO step, and its peak memory (bytes)."""
    gc.collect()
    before = memory("VmRSS")
    ours = [random_agent(width)] if width else hk.load_agents(ONES[:agents], device="cpu")
    paid = random_reward if width else boxed_math
    problems = hk.load_problems("arithmetic", split="train")
    config = hk.Config.preset(
        "hacpo" if agents > 1 else "gspo", n=n, prompts_per_step=prompts, max_new_tokens=new_tokens, lr=1e-6, minibatch=64,
        microbatch_tokens=4096, rollout_batch=64, delta_step=0.0,
    )  # fmt: skip
    found: list[dict[str, float]] = []
    for k in range(repeats + 1):
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        start = time.perf_counter()
        result = hk.step(ours, problems.batch(k * prompts, prompts), hk.Capability(), config, reward_function=paid)
        found.append({"step": time.perf_counter() - start, "peak_bytes": memory("VmHWM") - before})
        found[-1] |= {part: result.metrics[f"seconds_{part}"] for part in PARTS}
    some = found[1:]  # the first creates the optimisers' states
    return middle(some) | {
        "rollouts": len(result.pool), "rollouts_learned": sum(a["rollouts_used"] for a in result.metrics["agents"].values()),
    }  # fmt: skip


def middle(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each number."""
    return {key: statistics.median(f[key] for f in found) for key in found[0]}


def growth(frame: pd.DataFrame) -> dict[str, float]:
    """Return the slope of log quantity against log value, by part, over the larger half."""
    late = frame.iloc[len(frame) // 2 - 1 :]
    parts = [part for part in ("step", "rollout", "update", "peak_bytes") if (late[part] > 0).all()]
    return {part: round(float(np.polyfit(np.log(late["value"]), np.log(late[part]), 1)[0]), 2) for part in parts}


def picture(frame: pd.DataFrame):
    """Draw the step time against each quantity, both relative to the base."""
    base = {name: base[name] for name, (base, _) in VARIED.items()}
    at = {
        name: rows.set_index(rows["value"] / base[name])["step"] for name, rows in frame.groupby("varies", sort=False)
    }
    curves = pd.DataFrame({TOLD[name]: values / values.loc[1.0] for name, values in at.items()})
    curves.index.name = "quantity / its base value"
    figure = hk.plots.lines(
        curves, title="Time of a step, one thing varied at a time", y="step time / that of the base", log="xy"
    )
    figure.update_xaxes(tickvals=[0.5, 1, 2, 4, 8], ticktext=["½", "1", "2", "4", "8"])
    figure.update_yaxes(tickvals=[0.5, 1, 2, 4, 8, 16], ticktext=["½", "1", "2", "4", "8", "16"])
    return figure


if __name__ == "__main__":
    main()
