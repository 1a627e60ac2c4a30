"""Write the generated pages of the documentation and the results table of the README, from the code and from reports/.

python docs/generate.py      write the table of README.md, its figure, and the pages in docs/_generated
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hacpo_kit.common.files import read_json, write_text
from hacpo_kit.config import Config
from hacpo_kit.experiments import compare
from hacpo_kit.runs.metrics import METRICS
from hacpo_kit.views import plots

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "reports"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
# grpo with as many updates per step as hacpo, for two and for three agents
EQUAL_UPDATES = {"grpo · minibatch=64": "grpo, equal updates", "grpo · minibatch=43": "grpo, equal updates"}
BASELINE = "grpo, equal updates"  # the strongest method that trains each agent alone
METHODS = ["gspo", "gspo_x2", "grpo", BASELINE, "naive", "hacpo", "hacpo_equal"]
README_METHODS = ["gspo", "gspo_x2", "grpo", BASELINE, "hacpo"]
README_SETS = ["tiny-state-pair", "tiny-size-pair", "tiny-model-pair", "tiny-trio"]
EARLY = 4  # step


def main() -> None:
    """Write the README's table and the generated pages."""
    path = ROOT / "README.md"
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    write_text(path, f"{before}{BEGIN}\n{readme_results()}\n{END}{rest.split(END)[1]}")
    (REPORTS / "study" / "accuracy.png").write_bytes(picture().png())
    write_pages(ROOT / "docs" / "_generated")


def write_pages(folder: Path) -> None:
    """Write one Markdown file for each generated page."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "settings": settings,
        "presets": presets,
        "metrics": metrics,
        "study": study,
        "speed": speed,
        "robustness": robustness,
        "growth": growth,
        "sharing": sharing,
    }
    for name, page in pages.items():
        write_text(folder / f"{name}.md", page() + "\n")


# ── from the code ────────────────────────────────────────────────────────────────────────────────────────────────────


def settings() -> str:
    """Return the table of all settings."""
    return Config.describe().reset_index().to_markdown(index=False)


def presets() -> str:
    """Return the settings in which each preset differs from the default, and the paper's settings for its pairs."""
    from hacpo_kit.config import METHODS as PRESETS
    from hacpo_kit.config import PAPER_PAIRS

    rows = [{"preset": name, "settings": _assignments(changes) or "the defaults"} for name, changes in PRESETS.items()]
    pairs = [{"pair": name, "settings": _assignments(changes)} for name, changes in PAPER_PAIRS.items()]
    return "\n\n".join(pd.DataFrame(table).to_markdown(index=False) for table in (rows, pairs))


def _assignments(changes: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in changes.items())


def metrics() -> str:
    """Return the table of all logged metrics."""
    rows = [{"metric": f"`{name}`", "meaning": meaning} for name, meaning in METRICS.items()]
    return pd.DataFrame(rows).to_markdown(index=False)


# ── from the study ───────────────────────────────────────────────────────────────────────────────────────────────────


def _study() -> pd.DataFrame:
    frame, _ = compare.usable(compare.load(REPORTS / "study" / "study.parquet"))
    return frame.assign(method=frame["method"].astype(str).replace(EQUAL_UPDATES).astype("category"))


def readme_results() -> str:
    """Return accuracy after 4 and 12 steps of the baselines and hacpo, and the time and memory of a step relative to TRL's."""
    times = {name: _report(f"against_trl-{name}") for name in ("qwen3-sums", "smollm2-sums")}
    ratios = [
        f"{run['time_ratio']:.2f} × the time and {run['memory_ratio']:.2f} × the memory" for run in times.values()
    ]
    sentence = (
        f"A step of gspo takes {ratios[0]}\nof the same step in TRL with the tiny Qwen3 agent, "
        f"and {ratios[1]} with SmolLM2-135M."
    )
    return f"{_accuracy_table(_study(), README_SETS, README_METHODS)}\n\n{sentence}"


def picture():
    """Return the figure of accuracy against rollouts: the baselines and hacpo, one panel per set."""
    curves = compare.accuracy_curves(_study().query("agents in @README_SETS"))
    curves = curves[curves["method"].isin(README_METHODS)]
    return plots.method_curves(curves, x="rollouts", y="accuracy", title="Accuracy against rollouts per agent")


def study() -> str:
    """Return the accuracy of every method on every set."""
    frame = _study()
    found = sorted(set(frame["agents"].astype(str)))
    return _accuracy_table(frame, [*README_SETS, *(name for name in found if name not in README_SETS)], METHODS)


def _accuracy_table(frame: pd.DataFrame, sets: list[str], methods: list[str]) -> str:
    rows, _ = compare.scores(frame)
    rows = rows[rows["agent"] == compare.MEAN]
    table = []
    for agents in sets:
        for step in (EARLY, int(rows["step"].max())):
            of_set = rows[(rows["agents"] == agents) & (rows["step"] == step)]
            means = of_set.groupby("method", observed=True)["value"].mean()
            cells = {m: f"{means[m]:.3f}".lstrip("0") if m in means else "–" for m in methods}
            gain = _difference(frame, agents, step)
            table.append({"agents": agents, "step": step, **cells, "hacpo − grpo, equal updates [95 %]": gain})
    markdown = pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)
    return re.sub(r":?-{4,}", "---", re.sub(r" {2,}", " ", markdown))  # without padding: README lines stay short


def _difference(frame: pd.DataFrame, agents: str, step: int) -> str:
    of_set = frame[frame["agents"] == agents]
    if BASELINE not in set(of_set["method"]):
        return "–"
    rows = compare.paired_differences(of_set, BASELINE, step=step, last=1)
    rows = rows[(rows["method"] == "hacpo") & (rows["agent"] == compare.MEAN)]
    return compare.points(*rows[["mean", "low", "high"]].iloc[0]) if len(rows) else "–"


# ── from the benchmarks ──────────────────────────────────────────────────────────────────────────────────────────────


def _table(*parts: Callable[[], list[dict[str, str]]]) -> str:
    """Return the rows of all parts whose report exists as a Markdown table."""
    rows: list[dict[str, str]] = []
    for part in parts:
        with contextlib.suppress(FileNotFoundError):
            rows += part()
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)


def _report(name: str) -> dict:
    return read_json(REPORTS / f"{name}.json")


def speed() -> str:
    """Return the measured speed: a step, the same step in TRL, time to an accuracy, import."""
    return _table(_step, _against_trl, _to_accuracy, _imports)


def robustness() -> str:
    """Return what was measured of memory, the verifier and killed runs."""
    return _table(_update_memory, _verifier, _chaos)


def _row(what: str, measured: str, command: str) -> dict[str, str]:
    return {"measured": what, "result": measured, "command": command}


def _step() -> list[dict[str, str]]:
    found = _report("step")
    parts = found["split_seconds"]
    result = f"{found['step_seconds']:.2f} s (rollout {parts['rollout']:.2f} s, update {parts['update']:.2f} s)"
    what = f"one step of hacpo: `{found['agents']}`, {found['prompts']} prompts × {found['n']} rollouts"
    return [_row(what, f"{result}, {found['peak_memory_mb']} MB", "`make bench`")]


def _against_trl() -> list[dict[str, str]]:
    models = {"qwen3-sums": "tiny `qwen3-sums`, 32 prompts × 8", "smollm2-sums": "SmolLM2-135M, 16 prompts × 8"}
    rows = []
    for name, description in models.items():
        for rewards, file in ("", f"against_trl-{name}"), (", random rewards", f"against_trl-{name}-random"):
            with contextlib.suppress(FileNotFoundError):
                run = _report(file)
                what = f"one step of gspo, relative to TRL {run['versions']['trl']}: {description}{rewards}"
                rows.append(_row(what, _relative_to_trl(run), "`benchmarks/against_trl.py`"))
    return rows


def _relative_to_trl(run: dict) -> str:
    here, trl = (run["seconds"][who]["median"] for who in ("here", "trl"))
    work, ratios = run["work"]["here"], run["ratio_of_each_pair"]
    with_advantage, different = (work[key] / work["rollouts"] for key in ("with_advantage", "different"))
    return (
        f"time {here:.2f} s to {trl:.2f} s = **{run['time_ratio']:.2f}** "
        f"({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} pairs), peak memory **{run['memory_ratio']:.2f}**; "
        f"{with_advantage:.0%} of the rollouts have a non-zero advantage, {different:.0%} are distinct"
    )


def _to_accuracy() -> list[dict[str, str]]:
    found = _report("time_to_accuracy")
    methods = {"hacpo": "hacpo", "hacpo_n4": "hacpo with n = 4 instead of 8", "gspo_x2": "gspo_x2"}
    rows = []
    for method, description in methods.items():
        cells = [
            f"{agents}: time {ratios[method]['seconds']:.2f}, rollouts {ratios[method]['rollouts']:.2f}"
            for agents, ratios in found["over_gspo"].items()
        ]
        what = (
            f"{description}: cost of holding {found['level']:.0%} accuracy, relative to gspo ({found['seeds']} seeds)"
        )
        rows.append(_row(what, "; ".join(cells), "`benchmarks/time_to_accuracy.py`"))
    return rows


def _imports() -> list[dict[str, str]]:
    ratios = _report("imports")["to_torch"]
    result = f"{ratios['hacpo_kit']:.2f}; {ratios['every name']:.2f} when every public name is used"
    return [_row("`import hacpo_kit`, relative to `import torch`", result, "`benchmarks/imports.py`")]


def _update_memory() -> list[dict[str, str]]:
    found = _report("update_memory")
    ratio = max(row["process_to_least"] for row in found["rows"])
    counts = ", ".join(str(row["rollouts"]) for row in found["rows"])
    what = f"memory of one update of SmolLM2-135M (float32) with {counts} rollouts of {found['response_tokens']} tokens"
    result = f"at most {ratio:.2f} × (weights + gradients + moments + activations of one micro-batch)"
    return [_row(what, result, "`benchmarks/update_memory.py`")]


def _verifier() -> list[dict[str, str]]:
    found = _report("boxed_math")
    rate, hostile = found["answers_per_second"], found["hostile"]
    fast = f"{rate['gsm8k']:,.0f} GSM8K-like, {rate['math']:,.0f} MATH-like"
    verdicts = (
        f"all get a verdict ({hostile['statuses']['timeout']} `timeout`, {hostile['statuses']['error']} `error`); at most "
        f"{hostile['longest_seconds_at_work']:.2f} s on one, limit {hostile['timeout']:g} s"
    )
    return [
        _row(f"verified answers/s, {found['workers']} workers", fast, "`benchmarks/boxed_math.py`"),
        _row(f"{hostile['responses']:,} hostile responses", verdicts, "`benchmarks/boxed_math.py`"),
    ]


def _chaos() -> list[dict[str, str]]:
    runs = _report("chaos")["runs"]
    result = f"{runs['same_end']} end bit-identical to an undisturbed run"
    return [_row(f"{runs['kills']} runs killed at random moments and resumed", result, "`make chaos`")]


def growth() -> str:
    """Return the exponents with which time and memory grow."""
    names = {"step": "step", "rollout": "rollout", "update": "update", "peak_bytes": "memory"}
    labels = {
        "agents": "agents", "n": "rollouts per prompt", "prompts": "prompts", "new_tokens": "tokens per response",
        "width": "model width",
    }  # fmt: skip
    rows = []
    for name, exponents in _report("scaling")["growth"].items():
        # below a fifth the difference between two processes is noise
        cells = {label: "≈ 0" if abs(exponents[key]) < 0.2 else f"{exponents[key]:.2f}" for key, label in names.items()}
        rows.append({"grows": labels.get(name, name), **cells})
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)


def sharing() -> str:
    """Return what each way to share costs with more agents, and the share of its gain that stored peers keep."""
    found, rows = _report("sharing"), []
    for name, costs in found["costs"].items():
        power, most = found["growth"][name], max(row["selection"] / row["step"] for row in costs)
        cells = {
            "method": name, "rollouts in the updates": f"agents^{power['rollouts_used']:.2f}",
            "time of the updates": f"agents^{power['update']:.2f}", "selection, share of a step": f"at most {most:.1%}",
        }  # fmt: skip
        if gains := found["gains"].get(name):
            means = {kind: np.mean([row[kind] for row in gains]) for kind in ("alone", "online", "stored")}
            cells["accuracy alone (grpo)"], cells["with a peer"] = f"{means['alone']:.2f}", f"{means['online']:.2f}"
            cells["with its finished run"] = f"{means['stored']:.2f}"
        rows.append(cells)
    return pd.DataFrame(rows).fillna("–").to_markdown(index=False, disable_numparse=True)


if __name__ == "__main__":
    main()
