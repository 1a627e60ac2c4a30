"""Writes what README.md quotes from the reports, and the study's pictures.

    python benchmarks/readme.py

Every sentence between the marks in README.md is computed, from reports/study/study.parquet and from the JSON of other scripts;
a test holds that it is what this script would write.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pandas as pd
from scaling import TOLD

from hacpo_kit.common.files import read_json, write_text
from hacpo_kit.experiments import compare
from hacpo_kit.views import plots

ROOT = Path(__file__).resolve().parent.parent
STUDY = ROOT / "reports" / "study" / "study.parquet"
PICTURE = ROOT / "reports" / "study" / "accuracy.png"
BEGIN, END = "<!-- from the study: begin -->", "<!-- from the study: end -->"
MEASURED = "<!-- measured: begin -->", "<!-- measured: end -->"
METHODS = ["gspo", "gspo_x2", "naive", "hacpo", "hacpo_equal"]
KINDS = ["tiny-state-pair", "tiny-size-pair", "tiny-model-pair"]
EARLY = 4  # step


def main() -> None:
    """Puts text and picture in their places."""
    frame, _ = compare.usable(compare.load(STUDY))
    PICTURE.write_bytes(picture(frame).png())
    (ROOT / "reports" / "stages.png").write_bytes(plots.stages().png)
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    for (begin, end), new in (((BEGIN, END), block(frame)), (MEASURED, measured())):
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{new}\n{end}{rest.split(end)[1]}"
    write_text(path, text)


def picture(frame: pd.DataFrame):
    """Accuracy against rollouts for the three kinds of heterogeneity and the trio."""
    curves = compare.accuracy_curves(frame[frame["agents"].isin([*KINDS, "tiny-trio"])])
    return plots.method_curves(
        curves[curves["method"].isin(METHODS)], x="rollouts", y="accuracy (share right)",
        title="Together, agents need fewer rollouts",
    )  # fmt: skip


def block(frame: pd.DataFrame) -> str:
    """The table and the sentences below it."""
    return "\n\n".join([table(frame), *sentences(frame)])


def table(frame: pd.DataFrame) -> str:
    """Accuracy early and after the last step, mean over agents and seeds."""
    rows, _ = compare.scores(frame)
    rows = rows[rows["agent"] == compare.MEAN]
    end = int(rows["step"].max())
    lines = [
        f"| agents | step | {' | '.join(METHODS)} | hacpo − gspo, points [95 %] |",
        "|---" * (len(METHODS) + 3) + "|",
    ]
    for agents in sets(frame):
        for step in (EARLY, end):
            here = (
                rows[(rows["agents"] == agents) & (rows["step"] == step)]
                .groupby("method", observed=True)["value"]
                .mean()
            )
            cells = [f"{here[m]:.3f}".lstrip("0") if m in here else "–" for m in METHODS]
            gain = difference(frame, agents, "hacpo", "gspo", step)
            lines.append(f"| {agents if step == EARLY else ''} | {step} | {' | '.join(cells)} | {gain} |")
    return "\n".join(lines)


def sets(frame: pd.DataFrame) -> list[str]:
    """The sets of agents, the three kinds first."""
    found = sorted(set(frame["agents"].astype(str)))
    return [*(k for k in KINDS if k in found), *(s for s in found if s not in KINDS)]


def difference(
    frame: pd.DataFrame, agents: str, method: str, against: str, step: int | str, agent: str = compare.MEAN
) -> str:
    """A paired difference with its interval, in points."""
    rows = compare.paired_differences(frame[frame["agents"] == agents], against, step=step, last=1)
    rows = rows[(rows["method"] == method) & (rows["agent"] == agent)]
    return compare.points(*rows[["mean", "low", "high"]].iloc[0]) if len(rows) else "–"


def sentences(frame: pd.DataFrame) -> list[str]:
    """What the paper claims and what our setting is for, as found."""
    return [early(frame), rollouts(frame), ends(frame), own_setting(frame)]


def early(frame: pd.DataFrame) -> str:
    """How far ahead sharing is after a third of the training."""
    gains = {a: difference(frame, a, "hacpo", "gspo", EARLY) for a in KINDS}
    told = ", ".join(f"{g} on {a}" for a, g in gains.items())
    return f"**Early**, at step {EARLY}, hacpo minus gspo is {told} (points [95 % interval])."


def rollouts(frame: pd.DataFrame) -> str:
    """How many rollouts an accuracy costs."""
    goals = {a: g for a, g in compare.targets(frame).items() if a in KINDS}
    reach = compare.rollouts_to_reach(frame[frame["agents"].isin(goals)], goals).set_index(["agents", "method"])[
        "median"
    ]
    told = ", ".join(f"{reach[a, 'hacpo'] / reach[a, 'gspo']:.0%} on {a}" for a in goals)
    double = ", ".join(f"{reach[a, 'hacpo'] / reach[a, 'gspo_x2']:.0%}" for a in goals)
    return (
        f"**Rollouts**: nine tenths of the way that gspo comes cost hacpo, of gspo's rollouts, {told}; "
        f"and of the rollouts of gspo_x2, which samples twice as much in a step, {double} (medians)."
    )


def ends(frame: pd.DataFrame) -> str:
    """The agents that hacpo and our setting leave better or worse than alone, after the last step."""
    table = compare.paired_differences(frame, "gspo", last=1)
    table = table[table["agent"] != compare.MEAN]

    def count(method: str) -> str:
        rows = table[table["method"] == method]
        better, worse = int((rows["low"] > 0).sum()), int((rows["high"] < 0).sum())
        return (
            f"with {method}, of {len(rows)} agents in all sets {better} end clearly better than alone, {worse} clearly worse, "
            f"{len(rows) - better - worse} cannot be told apart; the mean difference is {100 * rows['mean'].mean():+.1f} points"
        )

    return f"**At the end**: {count('naive')}; {count('hacpo')}; {count('hacpo_equal')}."


def own_setting(frame: pd.DataFrame) -> str:
    """The agent that loses most by sharing, with and without our setting."""
    table = compare.paired_differences(frame, "gspo", last=1)
    table = table[table["agent"] != compare.MEAN]
    told = []
    for method in ("hacpo", "hacpo_equal"):
        row = table.loc[table[table["method"] == method]["mean"].idxmin()]
        told.append(f"{method} {compare.points(*row[['mean', 'low', 'high']])} ({row['agent']} in {row['agents']})")
    return (
        "`hacpo_equal` is this toolkit's own setting, off by default and not the paper's: as many updates in a step as alone, "
        f"each of more rollouts. The agent that loses most by sharing, in points: {'; '.join(told)}. "
        "`10_when_sharing_hurts` explains it."
    )


# ── speed and robustness ─────────────────────────────────────────────────────────────────────────────────────────────


def report(name: str) -> dict:
    """A measurement in reports/."""
    return read_json(ROOT / "reports" / f"{name}.json")


def measured() -> str:
    """What the benchmarks found, as far as their reports are there, a row each, and how a step grows."""
    rows: list[tuple[str, str, str]] = []
    for of in (step, against_trl, to_accuracy, update_memory, verifier, imports, chaos):
        with contextlib.suppress(FileNotFoundError):
            rows += of()
    lines = ["| | measured | with |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([*lines, "", NOTES, "", growth()])


NOTES = (
    "Against TRL: a step computes equal rollouts once and takes those without an advantage forward only; both help less where "
    "answers are long and all different. TRL takes a mini-batch in one pass, in float32. Until an accuracy: time is that of the "
    "steps, without evaluation, on one thread; a level is held from the first step at and after which it is not left; ranges are "
    "over seeds. A step of hacpo takes longer than one of gspo, since each agent learns from the other's rollouts too."
)


def step() -> list[tuple[str, str, str]]:
    """Seconds of a HACPO step."""
    found = report("step")
    parts = found["split_seconds"]
    return [(
        f"a step of hacpo: `{found['agents']}`, {found['prompts']} prompts × {found['n']}",
        f"{found['step_seconds']:.2f} s (rollout {parts['rollout']:.2f}, update {parts['update']:.2f}), "
        f"{found['peak_memory_mb']} MB",
        "`make bench`",
    )]  # fmt: skip


def against_trl() -> list[tuple[str, str, str]]:
    """Time and memory of a GSPO step, to those of TRL."""
    sizes = {"qwen3-sums": "the tiny `qwen3-sums`, 32 prompts × 8", "smollm2-sums": "SmolLM2-135M, 16 prompts × 8"}
    rows = []
    for name, told in sizes.items():
        for rewards, file in ("", f"against_trl-{name}"), (", random rewards", f"against_trl-{name}-random"):
            with contextlib.suppress(FileNotFoundError):
                run = report(file)
                length = run["work"]["here"]["sampled_tokens"] / run["work"]["here"]["rollouts"]
                what = (
                    f"a step of gspo, to TRL {run['versions']['trl']}'s: {told}, {length:.0f} tokens an answer{rewards}"
                )
                rows.append((what, beside_trl(run), "`against_trl.py`"))
    return rows


def beside_trl(run: dict) -> str:
    """Seconds, their ratio and its range, memory, and what makes the difference."""
    here, trl = (run["seconds"][who]["median"] for who in ("here", "trl"))
    work, ratios = run["work"]["here"], run["ratio_of_each_pair"]
    share, other = (work[key] / work["rollouts"] for key in ("with_advantage", "different"))
    return (
        f"{here:.2f} s to {trl:.2f} s: **{run['time_ratio']:.2f}** "
        f"[{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} pairs]; "
        f"peak memory **{run['memory_ratio']:.2f}**; {share:.0%} of the rollouts have an advantage, {other:.0%} are different"
    )


def to_accuracy() -> list[tuple[str, str, str]]:
    """What hacpo takes to hold an accuracy, of what gspo takes."""
    found = report("time_to_accuracy")
    methods = {"hacpo": "hacpo", "hacpo_n4": "hacpo with n = 4 instead of 8", "gspo_x2": "gspo_x2"}
    rows = []
    for method, told in methods.items():
        cells = []
        for pair, ratios in found["over_gspo"].items():
            both = zip(found["runs"][pair][method], found["runs"][pair]["gspo"], strict=True)
            times = [a["seconds"] / b["seconds"] for a, b in both if a and b]
            cells.append(
                f"{pair} **{ratios[method]['seconds']:.2f}** [{min(times):.2f} to {max(times):.2f}] and "
                f"**{ratios[method]['rollouts']:.2f}**"
            )
        of = f"to those of gspo, medians of {found['seeds']} seeds"
        what = f"time and rollouts until {found['level']:.0%} is held, {of}: {told}"
        rows.append((what, "; ".join(cells), "`time_to_accuracy.py`"))
    return rows


def update_memory() -> list[tuple[str, str, str]]:
    """Peak of an update, to the least it needs."""
    found = report("update_memory")
    kept, pass_ = found["weights_gradients_moments_bytes"] / 1e9, found["activations_of_one_microbatch_bytes"] / 1e9
    counts = ", ".join(str(r["rollouts"]) for r in found["rows"])
    given = " to ".join(sorted({f"{r['allocated_bytes'] / 1e9:.1f}" for r in found["rows"]}))
    process = [r["process_bytes"] / 1e9 for r in found["rows"]]
    most = max(r["process_to_least"] for r in found["rows"])
    return [(
        f"memory of an update of SmolLM2-135M in float32 for {counts} rollouts of {found['response_tokens']} tokens",
        f"PyTorch gives out {given} GB each time ({kept:.1f} for weights, gradients and moments, {pass_:.1f} for one micro-batch "
        f"of {found['microbatch_tokens']:,} tokens); the process has {min(process):.1f} to {max(process):.1f} GB, at most "
        f"**{most:.2f}** of that",
        "`update_memory.py FOLDER`",
    )]  # fmt: skip


def verifier() -> list[tuple[str, str, str]]:
    """Answers a second, and what a storm did."""
    found = report("boxed_math")
    speed, after, storm = found["answers_per_second"], found["after_to_before"], found["storm"]
    return [
        (
            f"answers a second that `boxed_math` checks, {found['workers']} workers; eight to a problem, equal ones once",
            f"{speed['gsm8k']:,.0f} like GSM8K's, {speed['math']:,.0f} like MATH's",
            "`boxed_math.py`",
        ),
        (
            f"{storm['responses']:,} hostile responses to `boxed_math`, limits {storm['timeout']:g} s and "
            f"{storm['memory_limit'] / 2**30:.0f} GiB a worker",
            f"all get a verdict, {storm['statuses']['timeout']} of them `timeout` and {storm['statuses']['error']} `error`; "
            f"at most {storm['longest_seconds_at_work']:.2f} s at work on one; afterwards {after['gsm8k']:.2f} and "
            f"{after['math']:.2f} of the speed before",
            "`boxed_math.py`",
        ),
    ]


def imports() -> list[tuple[str, str, str]]:
    """Time of the import, to that of torch."""
    to = report("imports")["to_torch"]
    return [(
        "`import hacpo_kit`, to `import torch`",
        f"{to['hacpo_kit']:.2f}; {to['every name']:.2f} once every function and class is in use, without plots and widgets",
        "`imports.py`",
    )]  # fmt: skip


def chaos() -> list[tuple[str, str, str]]:
    """How many killed runs ended as the undisturbed one."""
    runs = report("chaos")["runs"]
    moments = ", ".join(f"{name} {count}" for name, count in runs["killed_in"].items() if count)
    return [(
        f"{runs['kills']} runs killed, each at a random moment of one phase in turn (hit: {moments})",
        f"{runs['same_end']} ended as the undisturbed run, to the last bit",
        "`make chaos`",
    )]  # fmt: skip


def growth() -> str:
    """Exponents of a step's parts, and the picture."""
    found = report("scaling")
    parts = {"step": "step", "rollout": "rollout", "update": "update", "peak_bytes": "memory"}
    lines = [f"| grows | {' | '.join(parts.values())} |", "|---" * (len(parts) + 1) + "|"]
    for name, of in found["growth"].items():
        # a difference of processes of some 25 MB; below a fifth it is noise
        cells = ["≈ 0" if abs(of[part]) < 0.2 else f"{of[part]:.2f}" for part in parts]
        lines.append(f"| {TOLD[name]} | {' | '.join(cells)} |")
    base, alone = found["base"], found["base_random"]
    return "\n".join([
        "Time and memory grow with these powers of what grows (`scaling.py`; 1 is linear, 2 quadratic; one thread). "
        "k agents learn from k² times the rollouts of one.", "", *lines, "",
        f"Base: {base['agents']} built-in agents, {base['prompts']} prompts × {base['n']} rollouts, {base['new_tokens']} "
        f"tokens at most, δ_step 0; for tokens and width one agent of random weights and width {alone['width']}.", "",
        "![Step time against agents, rollouts, prompts, length and width, one varied at a time, both axes logarithmic]"
        "(reports/scaling.png)",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
