"""Writes what README.md quotes from the study, and its pictures, from reports/study/study.parquet.

    python benchmarks/readme.py

Every sentence between the two marks in README.md is computed; a test holds that it is what this script would write.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from hacpo_kit import compare, plots
from hacpo_kit.files import write_text

ROOT = Path(__file__).resolve().parent.parent
STUDY = ROOT / "reports" / "study" / "study.parquet"
PICTURE = ROOT / "reports" / "study" / "accuracy.png"
BEGIN, END = "<!-- from the study: begin -->", "<!-- from the study: end -->"
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
    before, rest = text.split(BEGIN)
    write_text(path, f"{before}{BEGIN}\n{block(frame)}\n{END}{rest.split(END)[1]}")


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


if __name__ == "__main__":
    main()
