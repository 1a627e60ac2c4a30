"""Comparison of methods (`hk.compare`): each function takes the table of `hk.read_runs` and returns a table."""

from hacpo_kit.experiments.claims import claims
from hacpo_kit.experiments.comparisons import (
    ABLATIONS,
    accuracy_curves,
    ahead_at_half,
    early_step,
    final_table,
    paired_differences,
    rollouts_to_reach,
    scores,
    targets,
)
from hacpo_kit.experiments.formatting import final_text, percent, points
from hacpo_kit.experiments.selection import usable
from hacpo_kit.experiments.statistics import BEFORE, MEAN, interval, verdict
from hacpo_kit.experiments.tables import read_runs as load

__all__ = [
    "ABLATIONS", "BEFORE", "MEAN", "accuracy_curves", "ahead_at_half", "claims", "early_step", "final_table",
    "final_text", "interval", "load", "paired_differences", "percent", "points", "rollouts_to_reach", "scores", "targets",
    "usable", "verdict",
]  # fmt: skip
