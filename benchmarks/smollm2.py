"""Write the report on SmolLM2-135M from its two runs: curves, sampled rollouts, accuracy by kind of problem.

    python benchmarks/smollm2.py reports/runs smollm2      # the runs smollm2-gspo and smollm2-hacpo; the prepared agents

Writes reports/smollm2: metrics and sampled rollouts of both runs, three pictures, and evaluation.json with the greedy accuracy
of the agents before and after, on all test problems, on sums and on differences.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pandas as pd

import hacpo_kit as hk
from hacpo_kit.common.files import read_lines, write_json
from hacpo_kit.runs.evaluation import evaluate

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("gspo", "hacpo")
PICTURES = {
    "reward": ("mean reward of sampled answers", "reward", "reward"),
    "length": ("length of an answer", "length", "tokens"),
    "accuracy": ("greedy accuracy on the test problems", "avg@1", "avg@1"),
}


def main() -> None:
    """Copy the data, draw the pictures, evaluate the agents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the folder with the runs")
    parser.add_argument("agents", type=Path, help="what data/prepare_smollm2.py made")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "smollm2")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lines = {}
    for method in METHODS:
        for name in ("metrics", "samples"):
            shutil.copyfile(args.runs / f"smollm2-{method}" / f"{name}.jsonl", args.out / f"{method}-{name}.jsonl")
        lines[method] = read_lines(args.out / f"{method}-metrics.jsonl")
    for name, (title, metric, y) in PICTURES.items():
        curves = pd.DataFrame({method: mean(lines[method], metric) for method in METHODS})
        curves.index.name = "rollouts of both agents"
        figure = hk.plots.lines(curves, title=f"SmolLM2-135M, mean of two agents: {title}", y=y)
        (args.out / f"{name}.png").write_bytes(figure.png())
    write_json(args.out / "evaluation.json", evaluation(args.runs, args.agents))


def mean(lines: list[dict], metric: str) -> pd.Series:
    """Return the agents' mean of a metric by rollouts so far, at the steps that measured it."""
    values = {line["rollouts"]: [a[metric] for a in line["agents"].values() if metric in a] for line in lines}
    return pd.Series({rollouts: sum(some) / len(some) for rollouts, some in values.items() if some})


def evaluation(runs: Path, agents: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return state → agent → kind of problem → greedy accuracy."""
    test = hk.load_problems(str(agents / "test.jsonl"))
    sets = {
        "all": list(test), **{f"{k}s": [p for p in test if p.meta["kind"] == k] for k in ("sum", "difference")}
    }  # fmt: skip
    states = {"before": agents} | {
        m: max((runs / f"smollm2-{m}" / "checkpoints").glob("step-*")) / "agents" for m in METHODS
    }
    out: dict[str, dict[str, dict[str, float]]] = {}
    for state, folder in states.items():
        out[state] = {}
        for name in ("smollm2-sums", "smollm2-differences"):
            agent = hk.load_agent(str(folder / name), name=name, device="cpu", dtype="float32")
            result = evaluate([agent], sets["all"], max_new_tokens=40, batch_size=64, progress=False)
            right = {r.problem: r.reward == 1 for r in result.answers}
            out[state][name] = {kind: sum(right[p.id] for p in some) / len(some) for kind, some in sets.items()}
            print(state, name, out[state][name], flush=True)
    return out


if __name__ == "__main__":
    main()
