"""Runs made for tests: rows of the table of read_runs, and run folders."""

import json

import nbformat
import pandas as pd

from hacpo_kit.config import METHODS, Config

T1, T2 = 12.706205, 4.302653  # 97.5 % quantile of t with 1 and 2 degrees of freedom
PAIR = ["qwen3-sums", "llama-differences"]


def run(method, seed, values, *, agents="pair", finished=True, metric="avg@1", steps=None, **settings):
    """Rows of one run of agents A and B: `values` is step → (A, B), 10 rollouts per step and agent (gspo_x2: 20)."""
    config = Config.from_dict({"method": method, **METHODS.get(method, {}), **settings, "seed": seed}).to_dict()
    del config["version"]
    name = "-".join([agents, method, str(seed), *map(str, settings.values()), str(steps or "")])
    rows = [
        {"run": name, "step": step, "agent": agent, "metric": metric, "value": value,
         "rollouts": 20 * step * config["oversample"], "tokens": 100 * step, "seconds": 1.0 * step}
        for step, pair in values.items() for agent, value in zip("AB", pair, strict=True) if value is not None
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(**config, agents=agents, steps=steps or max(values), finished=finished)


def together(*runs):
    frame = pd.concat(runs, ignore_index=True)
    return frame.astype(dict.fromkeys(("run", "agent", "metric", "method", "agents"), "category"))


def line(*points):
    """The same value for both agents at steps 0, 1, 2, …"""
    return {step: (value, value) for step, value in enumerate(points)}


def study():
    return together(
        run("gspo", 0, {0: (0.0, 0.2), 1: (0.2, 0.4), 2: (0.4, 0.6)}),
        run("gspo", 1, {0: (0.0, 0.2), 1: (0.2, 0.6), 2: (0.6, 0.8)}),
        run("hacpo", 0, {0: (0.0, 0.2), 1: (0.6, 0.8), 2: (0.8, 0.8)}),
        run("hacpo", 1, {0: (0.0, 0.2), 1: (0.4, 0.8), 2: (0.8, 1.0)}),
    )


def write_run(folder, experiment, *, last=None, agents=PAIR, scores=None):
    """Write a run folder with notebook and HTML, as a run that reached step `last` leaves it."""
    last = experiment.steps if last is None else last
    folder.mkdir(parents=True, exist_ok=True)
    record = {"steps": experiment.steps, "agents": [{"name": a, "origin": a} for a in agents]}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "config.json").write_text(json.dumps(experiment.config().to_dict()))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(last + 1):
            row = {"step": step, "rollouts": 8 * step, "tokens": 60 * step, "seconds": 0.5 * step}
            if step:
                row |= {"seconds_update": 0.1, "omega": {a: {b: 2.0 for b in agents if b != a} for a in agents}}
            row["agents"] = {a: {"avg@1": 0.25 * (k + 1), **(scores or {})} for k, a in enumerate(agents)}
            file.write(json.dumps(row) + "\n")
    for step in (1, 2):
        (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True, exist_ok=True)
    notebook = nbformat.v4.new_notebook(metadata={"papermill": {"end_time": "now", "exception": None}})
    nbformat.write(notebook, folder.with_name(f"{folder.name}.ipynb"))
    folder.with_name(f"{folder.name}.html").write_text("<html>")
