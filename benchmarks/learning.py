"""Do two different agents learn faster together? Several methods and seeds on one built-in set, and the summary.

    python benchmarks/learning.py                       # writes reports/learning/
    python benchmarks/learning.py --seeds 2 --steps 6 --out tried
    python benchmarks/learning.py --settings            # how learning rate and warm-up were chosen

Runs that are finished are not repeated; a stopped one goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.stats import t

import hacpo_kit as hk
from hacpo_kit.saving import versions, write_json

ROOT = Path(__file__).resolve().parent.parent
TRAINING_STEPS = 12  # what the notebooks train by default; the curves here go on, to see what comes after
METHODS = ("hacpo", "gspo", "gspo_x2", "naive")


def main() -> None:
    """Trains, gathers, summarises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="tiny-model-pair")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--test-size", type=int, default=400)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "learning")
    parser.add_argument("--settings", action="store_true", help="the grid behind the default lr and warmup")
    args = parser.parse_args()
    if args.settings:
        return settings_grid(args)
    methods = args.methods.split(",")
    frames = [one_run(args, m, seed) for seed in range(args.seeds) for m in methods]
    curves = pd.concat(frames, ignore_index=True)
    args.out.mkdir(parents=True, exist_ok=True)
    curves.to_parquet(args.out / "curves.parquet", index=False)
    write_json(args.out / "summary.json", summary(curves, args))
    figure = hk.plots.learning_curves(curves, title=f"Two agents on {args.agents}: accuracy against training steps")
    (args.out / "accuracy.png").write_bytes(figure.png())
    print(accuracy_table(curves).round(3).to_string())
    print(json.dumps(summary(curves, args)["claims"], indent=2, ensure_ascii=False))


def settings_grid(args: argparse.Namespace) -> None:
    """Both arms with the same settings, on seeds that the reported runs do not use."""
    args.test_size = 200
    rows = []
    for lr, warmup in itertools.product((1e-4, 1.5e-4, 2e-4), (2, 4, 8)):
        for method, seed in itertools.product(("gspo", "hacpo"), (100, 101)):
            frame = one_run(args, method, seed, lr=lr, warmup=warmup)
            means = frame.groupby("step")["avg@1"].mean()
            rows.append(
                {
                    "lr": lr,
                    "warmup": warmup,
                    "method": method,
                    "seed": seed,
                    **{f"step {s}": v for s, v in means.items()},
                }
            )
    table = pd.DataFrame(rows).groupby(["lr", "warmup", "method"]).mean().drop(columns="seed").round(4)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "settings.json", table.reset_index().to_dict("records"))
    print(table.to_string())


def one_run(args: argparse.Namespace, method: str, seed: int, **settings: float) -> pd.DataFrame:
    """Accuracy of every agent over the steps of one run."""
    config = hk.Config.preset(method, seed=seed, **settings)
    name = "-".join([args.agents, method, str(seed), *map(str, settings.values())])
    run = hk.train(
        hk.load_agents(args.agents),
        hk.load_problems("arithmetic", split="train"),
        config,
        args.steps,
        test=hk.load_problems("arithmetic", split="test", size=args.test_size),
        eval_every=1 if not settings else 2,
        save_every=args.steps,
        out=ROOT / "reports" / "runs" / args.out.name / name,
        progress="off",
    )
    frame = run.to_frame().dropna(subset=["avg@1"])[["step", "rollouts", "tokens", "seconds", "agent", "avg@1"]]
    print(f"{name}: {frame[frame['step'] == args.steps]['avg@1'].mean():.3f}", flush=True)
    return frame.assign(method=method, seed=seed, run=f"{method}-{seed}")


def accuracy_table(curves: pd.DataFrame) -> pd.DataFrame:
    """Mean accuracy of both agents by method and step."""
    return curves.groupby(["method", "step"])["avg@1"].mean().unstack()


def summary(curves: pd.DataFrame, args: argparse.Namespace) -> dict:
    """The table, and what it says about hacpo against gspo."""
    seeds = curves.groupby(["method", "step", "seed"])["avg@1"].mean()
    agents = curves.groupby(["method", "agent", "step"])["avg@1"].mean()
    per_agent = {
        f"{m} · {a}": rows.droplevel([0, 1]).round(4).to_dict() for (m, a), rows in agents.groupby(level=[0, 1])
    }
    out = {
        "agents": args.agents, "seeds": args.seeds, "steps": args.steps, "test_problems": args.test_size,
        "accuracy": {m: accuracy_table(curves).loc[m].round(4).to_dict() for m in accuracy_table(curves).index},
        "accuracy_by_agent": per_agent,
        "machine": {"cores": torch.get_num_threads(), "processor": platform.machine()}, "versions": versions(),
    }  # fmt: skip
    if {"hacpo", "gspo"} <= set(curves["method"]):
        hacpo, gspo = seeds["hacpo"], seeds["gspo"]
        steps = sorted(curves["step"].unique())
        early = [s for s in steps if 4 <= s <= 6]
        others = [m for m in ("hacpo", "naive") if m in set(curves["method"])]
        ends = sorted({s for s in steps if s == TRAINING_STEPS} | {steps[-1]})
        mark = max(s for s in steps if s <= 8)
        rollouts = curves.groupby(["method", "step"])["rollouts"].mean()
        goal = gspo[mark].mean()
        reached = next((s for s in steps if hacpo[s].mean() >= goal), None)
        out["claims"] = {
            **{f"hacpo − gspo at step {s}": difference(hacpo[s], gspo[s]) for s in early},
            f"accuracy of gspo at step {mark}": round(goal, 4),
            "step at which hacpo has it": None if reached is None else int(reached),
            "rollouts of hacpo for it, as a share of gspo's": None
            if reached is None
            else round(float(rollouts["hacpo", reached] / rollouts["gspo", mark]), 3),
            **{f"{m} − gspo at step {s}": difference(seeds[m][s], gspo[s]) for s in ends for m in others},
        }
    return out


def difference(a: pd.Series, b: pd.Series) -> dict[str, float]:
    """Paired difference over seeds with its 95 % t-interval."""
    d = (a - b).to_numpy()
    half = t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / np.sqrt(len(d)) if len(d) > 1 else float("nan")
    return {
        "mean": round(float(d.mean()), 4),
        "low": round(float(d.mean() - half), 4),
        "high": round(float(d.mean() + half), 4),
    }


if __name__ == "__main__":
    main()
