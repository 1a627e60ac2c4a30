"""Measure what a way to share costs with more agents, and what stored peers keep of the gain of peers that train along.

    OMP_NUM_THREADS=1 python benchmarks/sharing.py      # writes reports/sharing.json

Cost: seconds of the update of all learners with 1 to 6 agents, the time to select rollouts, and the power with which both grow.
Prompts are those of the built-in agents; the rewards are random, so that rescues occur. Gain: accuracy of one agent after a few
steps, minus that of the same agent alone, with peers that train along and with those of a finished run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from measuring import surroundings

import hacpo_kit as hk
from hacpo_kit.common.files import write_json
from hacpo_kit.sharing import drawn_peers, shared_rollouts

ROOT = Path(__file__).resolve().parent.parent
AGENTS = [
    "qwen3-sums",
    "llama-differences",
    "qwen3-differences",
    "llama-weak",
    "qwen3-small-differences",
    "llama-novice",
]
COSTS = {"hacpo": {}, "hacpo, max_peer=8": {"max_peer": 8}, "hacpo_rescue": {}, "graft": {}, "sgt": {}}


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="steps of each measurement, after one as warm-up")
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13, 14, 15])
    parser.add_argument("--steps", type=int, default=4, help="of the runs that measure the gain")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "sharing.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    costs = {name: [cost(name, count, args.repeats) for count in (1, 2, 3, 4, 6)] for name in COSTS}
    gains = {method: [gain(method, seed, args.steps) for seed in args.seeds] for method in ("hacpo", "graft", "sgt")}
    write_json(
        args.out,
        {
            "costs": costs, "growth": {name: growth(rows) for name, rows in costs.items()}, "gains": gains,
            "kept": {method: kept(rows) for method, rows in gains.items()}, "seeds": args.seeds, "steps": args.steps,
            "repeats": args.repeats, **surroundings(),
        },
    )  # fmt: skip


def random_reward(response: str, gold: str) -> float:
    """Return a reward of 1 for about a tenth of the texts, so that whole groups fail."""
    return float(sum(response.encode()) % 10 == 0)


def cost(name: str, count: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of the update of all learners and of the selection, per step."""
    method = name.split(",")[0]
    settings = {"prompts_per_step": 16, "minibatch": 64, "lr": 1e-6, "delta": 1.0, "delta_step": 0.0, "floor": 0.0}
    config = hk.Config.preset(method, **settings, **COSTS[name])
    agents, problems = hk.load_agents(AGENTS[:count], device="cpu"), hk.load_problems("arithmetic", split="train")
    rows = []
    for k in range(repeats + 1):
        problem_batch, start = problems.batch(16 * k, 16), time.perf_counter()
        result = hk.step(agents, problem_batch, hk.Capability(), config, reward_function=random_reward)
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        for agent in agents:
            positions = shared_rollouts(result.pool, agent.name, config)
            drawn_peers([result.pool.rollouts[i] for i in positions], agent.name, config, seed=0)
        selection = time.perf_counter() - start
        used = sum(values["rollouts_used"] for values in result.metrics["agents"].values())
        rows.append([result.metrics["seconds_update"], selection, seconds, used])
    update, selection, step, used = np.median(rows[1:], axis=0).tolist()
    print(
        f"{name}, {count} agents: update {update:.2f} s, selection {1000 * selection:.1f} ms, {used:.0f} rollouts",
        flush=True,
    )
    return {"agents": count, "update": update, "selection": selection, "step": step, "rollouts_used": used}


def growth(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the power with which a quantity grows with the agents, from two agents on: the slope of the logarithms."""
    x = np.log([row["agents"] for row in rows[1:]])
    return {
        name: float(np.polyfit(x, np.log([row[name] for row in rows[1:]]), 1)[0])
        for name in ("update", "rollouts_used")
    }


def gain(method: str, seed: int, steps: int) -> dict[str, float]:
    """Return the accuracy of the first agent of the pair: alone, with a peer that trains along, with the peer's finished run."""
    train, test = (hk.load_problems("arithmetic", split=split) for split in ("train", "test"))
    test = test[:200]

    def accuracy(names: list[str], method: str, out: Path | None = None, peers: Path | None = None) -> float:
        config = hk.Config.preset(method, seed=seed)
        agents = hk.load_agents(names, device="cpu")
        run = hk.train(agents, train, config, steps, out=out, test=test, eval_every=steps, progress="off", peers=peers)
        return run.history[-1]["agents"][names[0]]["avg@1"]

    with tempfile.TemporaryDirectory() as folder:
        partner = Path(folder) / "partner"
        accuracy(AGENTS[1:2], "grpo", partner)
        row = {
            "alone": accuracy(AGENTS[:1], "grpo"),
            "online": accuracy(AGENTS[:2], method),
            "stored": accuracy(AGENTS[:1], method, peers=partner),
        }
    print(f"{method}, seed {seed}: {row}", flush=True)
    return row


def kept(rows: list[dict[str, float]]) -> float:
    """Return the mean gain with stored peers divided by that with peers that train along."""
    gains = {kind: statistics.mean(row[kind] - row["alone"] for row in rows) for kind in ("online", "stored")}
    return gains["stored"] / gains["online"]


if __name__ == "__main__":
    main()
