"""Compare one GSPO step of hacpo_kit with one of TRL's GRPOTrainer: seconds, peak memory, and the work done.

    pip install trl accelerate datasets                        # beside hacpo_kit, in an environment of its own
    python benchmarks/against_trl.py                           # the tiny Qwen3-shaped model: 32 prompts × 8, 24 tokens
    python benchmarks/against_trl.py --model FOLDER --prompts 16 --new-tokens 64        # e.g. SmolLM2-135M

Writes reports/against_trl-NAME.json. After each step of TRL, hacpo_kit makes the same step from equal weights,
on the same prompts with the same settings and verifier, so other load on the machine slows both. The random numbers differ, so
tokens, updates, rewards and rollouts with an advantage are counted. For a rollout with advantage 0, hacpo_kit computes only the
forward pass, TRL also the backward pass: with `--rewards random` nearly every rollout has an advantage, which excludes this
saving. Memory is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from measuring import memory, random_reward, surroundings

import hacpo_kit as hk
from hacpo_kit.common.files import write_json
from hacpo_kit.rewards import boxed_math, score

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure pairs of steps, then memory, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-sums", help="a built-in agent or a local folder")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--updates", type=int, default=2, help="in each step")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-6, help="small: the work must not change while it is measured")
    parser.add_argument("--problems", help="a problem file; default: the built-in arithmetic")
    parser.add_argument(
        "--rewards", choices=["verified", "random"], default="verified", help="random: 0 or 1, from the text"
    )
    parser.add_argument("--memory", choices=["trl", "here"], help="(internal) one of the two alone; prints its peak")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory:
        alone(args)
        return
    peaks = {who: peak(who) for who in ("trl", "here")}  # first, while this process holds no model
    print("peak bytes", peaks, flush=True)
    report = measured(args)
    report["peak_bytes"] = peaks
    report["memory_ratio"] = round(report["peak_bytes"]["here"] / report["peak_bytes"]["trl"], 3)
    report |= {
        "settings": {k: v for k, v in vars(args).items() if k not in ("memory", "out")} | {"model": Path(args.model).name},
        **surroundings("trl"),
    }  # fmt: skip
    marked = "-random" * (args.rewards == "random")
    out = args.out or ROOT / "reports" / f"against_trl-{Path(args.model).name}{marked}.json"
    write_json(out, report)
    print(json.dumps({k: report[k] for k in ("seconds", "time_ratio", "peak_bytes", "memory_ratio", "work")}, indent=1))


# ── here ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Here:
    """hacpo_kit's step for one agent alone."""

    def __init__(self, args):
        self.agent = hk.load_agent(args.model, name="here", device="cpu", dtype="float32")
        self.problems = problems(args)
        self.config = hk.Config.preset(
            "gspo", prompts_per_step=args.prompts, n=args.n, max_new_tokens=args.new_tokens, lr=args.lr, warmup=0,
            minibatch=args.prompts * args.n // args.updates,
        )  # fmt: skip
        self.capability, self.prompts, self.reward = hk.Capability(), args.prompts, REWARDS[args.rewards]

    def step(self, k: int) -> dict[str, float]:
        """Make step k; return its seconds and counts."""
        drawn = self.problems.batch(k * self.prompts, self.prompts)
        start = time.perf_counter()
        result = hk.step(self.agent, drawn, self.capability, self.config, reward_function=self.reward)
        seconds = time.perf_counter() - start
        self.capability = result.capability
        own, pool = result.metrics["agents"]["here"], result.pool
        return {
            "seconds": seconds, "rollouts": len(pool), "sampled_tokens": pool.tokens,
            "prompt_tokens": sum(len(r.prompt_ids) for r in pool), "updates": own["updates"], "reward": own["reward"],
            "with_advantage": int((result.batches["here"].advantages != 0).sum()),
            "different": len({(r.prompt_ids, r.token_ids) for r in pool}),
        }  # fmt: skip


REWARDS = {"verified": boxed_math, "random": random_reward}


def problems(args) -> hk.Problems:
    """Return the problems of both."""
    return hk.load_problems(args.problems) if args.problems else hk.load_problems("arithmetic", split="train")


# ── TRL ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def trainer(args, steps: int, after):
    """Return TRL's trainer for this number of steps; it calls `after(facts)` with seconds and counts after each."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    agent = hk.load_agent(args.model, name="trl", device="cpu", dtype="float32")
    drawn = [p for k in range(steps) for p in problems(args).batch(k * args.prompts, args.prompts)]
    prompts = [agent.tokenizer.decode(agent.encode_prompt(p.prompt)) for p in drawn]
    for p, prompt in zip(drawn, prompts, strict=True):
        if agent.tokenizer(prompt)["input_ids"] != list(agent.encode_prompt(p.prompt)):
            raise SystemExit(f"TRL would read another prompt than this package for problem {p.id!r}: {prompt!r}")
    rows = args.prompts * args.n
    facts: dict[str, float] = {}

    def reward(completions, completion_ids, gold, prompts, **_):
        paid = [v.reward for v in score(list(zip(completions, gold, strict=True)), fn=REWARDS[args.rewards])]
        groups = [paid[i : i + args.n] for i in range(0, rows, args.n)]
        ends = agent.end_ids
        facts.update(
            rollouts=len(paid), reward=sum(paid) / len(paid), with_advantage=args.n * sum(len(set(g)) > 1 for g in groups),
            prompt_tokens=sum(len(agent.tokenizer(p)["input_ids"]) for p in prompts),
            different=len({(p, tuple(ids)) for p, ids in zip(prompts, completion_ids, strict=True)}),
            sampled_tokens=sum(next((i + 1 for i, t in enumerate(ids) if t in ends), len(ids)) for ids in completion_ids),
        )  # fmt: skip
        return paid

    class Clock(TrainerCallback):
        start = None

        def on_step_begin(self, arguments, state, control, **_):
            if state.global_step % args.updates == 0:
                self.start = time.perf_counter()

        def on_step_end(self, arguments, state, control, **_):
            if state.global_step % args.updates == 0:
                after({"seconds": time.perf_counter() - self.start, "updates": args.updates, **facts})

    settings = GRPOConfig(
        output_dir="/nowhere", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, seed=0, max_steps=steps * args.updates, learning_rate=args.lr,
        lr_scheduler_type="constant", optim="adamw_torch", adam_beta2=0.99, max_grad_norm=1.0,
        per_device_train_batch_size=rows // args.updates, gradient_accumulation_steps=1,
        steps_per_generation=args.updates, num_generations=args.n, max_completion_length=args.new_tokens,
        shuffle_dataset=False, temperature=1.0, beta=0.0, importance_sampling_level="sequence", loss_type="grpo",
        epsilon=3e-4, epsilon_high=4e-4, scale_rewards="group", dataloader_num_workers=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(agent.model.config, dtype=torch.float32)
    model.load_state_dict(agent.model.state_dict())
    data = Dataset.from_list([{"prompt": prompt, "gold": p.gold} for p, prompt in zip(drawn, prompts, strict=True)])
    return GRPOTrainer(
        model=model, reward_funcs=reward, args=settings, train_dataset=data, processing_class=agent.tokenizer,
        callbacks=[Clock()],
    )  # fmt: skip


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────


def measured(args) -> dict:
    """Return medians over the pairs after the warm-up, their ratio, and the work of both."""
    here, pairs = Here(args), []

    def after(facts: dict[str, float]) -> None:
        pairs.append((facts, here.step(len(pairs))))
        print(f"step {len(pairs)}: TRL {facts['seconds']:.2f} s, here {pairs[-1][1]['seconds']:.2f} s", flush=True)

    trainer(args, args.warm_up + args.pairs, after).train()
    pairs = pairs[args.warm_up :]
    by = {"trl": [t for t, _ in pairs], "here": [h for _, h in pairs]}
    middle = {who: statistics.median(f["seconds"] for f in facts) for who, facts in by.items()}
    return {
        "seconds": {
            who: {"median": round(middle[who], 3), "all": [round(f["seconds"], 3) for f in facts]} for who, facts in by.items()
        },
        "time_ratio": round(middle["here"] / middle["trl"], 3),
        "ratio_of_each_pair": [round(h["seconds"] / t["seconds"], 3) for t, h in pairs],
        "work": {
            who: {key: round(statistics.mean(f[key] for f in facts), 3) for key in facts[0] if key != "seconds"}
            for who, facts in by.items()
        },
    }  # fmt: skip


def alone(args) -> None:
    """Make two steps with one of them and print the peak memory of the process (bytes)."""
    if args.memory == "trl":
        trainer(args, 2, lambda facts: None).train()
    else:
        here = Here(args)
        for k in range(2):
            here.step(k)
    print(memory("VmHWM"))


def peak(who: str) -> int:
    """Return the peak memory of a separate process with the same arguments (bytes)."""
    done = subprocess.run([sys.executable, *sys.argv, "--memory", who], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
