"""Comparison of methods (`hk.compare`): each function takes the table of `hk.read_runs` and returns a table."""

from hacpo_kit.experiments.claims import claims
from hacpo_kit.experiments.comparisons import (
    ABLATIONS,
    ablation_table,
    accuracy_curves,
    ahead_at_half,
    final_table,
    paired_differences,
    rollouts_to_reach,
    scores,
    targets,
)
from hacpo_kit.experiments.formatting import percent, points, styled
from hacpo_kit.experiments.selection import usable
from hacpo_kit.experiments.statistics import BEFORE, MEAN, interval, verdict
from hacpo_kit.experiments.tables import load

__all__ = [
    "ABLATIONS", "BEFORE", "MEAN", "ablation_table", "accuracy_curves", "ahead_at_half", "claims", "final_table", "interval",
    "load", "paired_differences", "percent", "points", "rollouts_to_reach", "scores", "styled", "targets", "usable", "verdict",
]  # fmt: skip
