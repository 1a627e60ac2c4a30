"""Measure the peak memory of an update relative to its minimum, for growing numbers of rollouts.

    python benchmarks/update_memory.py FOLDER        # e.g. SmolLM2-135M; writes reports/update_memory.json

The minimum is the sum of weights, gradients, the two moments of AdamW, and the activations of one micro-batch: one forward and
backward pass over as many tokens in a separate process. Rollouts are 128 random tokens each, with random rewards, and scored
by the model, so every one has a gradient. Each number of rollouts runs in a separate process, after an update that creates the
moments. Two peaks are measured: that of the process (Linux) minus that with the libraries alone, which includes freed memory
that the process keeps; and, in a second update, the bytes allocated by PyTorch at once (events of its profiler).
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

import torch
from measuring import memory, surroundings
from torch.profiler import ProfilerActivity, profile

import hacpo_kit as hk
from hacpo_kit.common.files import write_json
from hacpo_kit.records import Pool, Rollout
from hacpo_kit.rollouts import score

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 128  # of a response
MINIBATCH = 64
WANTED = 1.3


def main() -> None:
    """Measure each number of rollouts and one micro-batch, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a built-in agent or a local folder")
    parser.add_argument("--rollouts", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--microbatch-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "update_memory.json")
    parser.add_argument("--alone", type=int, help="(internal) one update with so many rollouts; 0: one micro-batch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.alone is not None:
        print(*alone(args))
        return
    kept, activations = in_a_process(0)
    least = kept + activations
    peaks = {count: in_a_process(count) for count in args.rollouts}
    report = {
        "model": Path(args.model).name, "response_tokens": TOKENS, "microbatch_tokens": args.microbatch_tokens,
        "weights_gradients_moments_bytes": kept, "activations_of_one_microbatch_bytes": activations,
        "rows": [
            {"rollouts": count, "allocated_bytes": given, "process_bytes": process,
             "allocated_to_least": round(given / least, 3), "process_to_least": round(process / least, 3)}
            for count, (given, process) in peaks.items()
        ],
        "wanted": WANTED, **surroundings(),
    }  # fmt: skip
    write_json(args.out, report)
    print(*report["rows"], sep="\n")


def in_a_process(count: int) -> list[int]:
    """Return what `alone` prints in a separate process with the same arguments."""
    done = subprocess.run(
        [sys.executable, *sys.argv, "--alone", str(count)], stdout=subprocess.PIPE, text=True, check=True
    )
    print(f"{count} rollouts: {done.stdout.strip()}", flush=True)
    return [int(number) for number in done.stdout.split()[-2:]]


def alone(args) -> tuple[int, int]:
    """Return the peaks of an update, by allocator and process; for 0 rollouts, the kept bytes and one micro-batch."""
    tiny = hk.load_agent("llama-novice", device="cpu")
    one_update(tiny, random_rollouts(tiny, 8, hk.Config(n=8)), hk.Config(n=8))
    before = memory("VmRSS")
    agent = hk.load_agent(args.model, name="a", device="cpu", dtype="float32")
    weights = sum(p.nbytes for p in agent.model.parameters())
    config = hk.Config.preset(
        "gspo", microbatch_tokens=args.microbatch_tokens, n=8, minibatch=MINIBATCH, lr=1e-6, warmup=0
    )  # fmt: skip
    if not args.alone:
        pool = random_rollouts(agent, -(-args.microbatch_tokens // TOKENS), config)
        width = max(len(r.prompt_ids) for r in pool) + TOKENS
        some = pool.rollouts[: args.microbatch_tokens // width] or pool.rollouts[:1]

        def pass_():
            logp, mask = agent.logprobs([r.prompt_ids for r in some], [r.token_ids for r in some])
            (logp * mask).sum().backward()

        pass_()  # gradients stay, so that what follows are activations only
        return 4 * weights, allocated(pass_)
    one_update(agent, random_rollouts(agent, MINIBATCH, config), config)
    pool = random_rollouts(agent, args.alone, config)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    one_update(agent, pool, config)
    process = memory("VmHWM") - before
    # weights and moments are there before; the allocator's events begin with the update
    return 3 * weights + allocated(lambda: one_update(agent, pool, config)), process


def allocated(work: Callable[[], None]) -> int:
    """Return the peak bytes that PyTorch allocates during the work, minus those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [(e.start_ns(), e.nbytes()) for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(events, key=itemgetter(0))))


def one_update(agent: hk.Agent, pool: Pool, config: hk.Config) -> None:
    """Create the learner's batch from the pool and update."""
    hk.update(agent, hk.advantage(pool, agent, hk.Capability().observe(pool), config), config)


def random_rollouts(agent: hk.Agent, count: int, config: hk.Config) -> Pool:
    """Return rollouts of random tokens, scored by the agent, half of them correct."""
    rng = random.Random(0)
    problems = hk.load_problems("arithmetic", split="train").batch(0, -(-count // config.n))
    allowed = [t for t in range(len(agent.tokenizer)) if t not in agent.control_ids and t not in agent.end_ids]
    rollouts = [
        Rollout(p.id, agent.name, k, "", tuple(agent.encode_prompt(p.prompt)), tuple(rng.choices(allowed, k=TOKENS)), None, False)
        for p in problems
        for k in range(config.n)
    ]  # fmt: skip
    rollouts = score(agent, rollouts, temperature=1.0, tokens=config.microbatch_tokens)
    pool = Pool(tuple(rollouts), tuple(problems), (agent.name,), config.n, 1.0, {agent.name: agent.updates})
    return pool.with_rewards([float(k % 2) for k in range(len(rollouts))], ["made up"] * len(rollouts))


if __name__ == "__main__":
    main()
