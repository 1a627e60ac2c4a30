"""Intervals, paired differences and verdicts, against values computed by hand."""

import numpy as np
import pandas as pd
import pytest
from made_runs import T1

from hacpo_kit.experiments.statistics import interval, paired, verdict


def test_interval_is_the_t_interval_of_the_mean():
    values = pd.Series(
        [0.3, 0.4, 0.7], pd.MultiIndex.from_tuples([(1, "a"), (1, "b"), (2, "a")], names=["step", "run"])
    )
    table = interval(values, "step")
    # standard error 0.0707 / √2 = 0.05
    assert list(table.loc[1]) == pytest.approx([0.35, 0.35 - T1 * 0.05, 0.35 + T1 * 0.05, 2], rel=1e-6)
    assert table.loc[2, "mean"] == 0.7 and table.loc[2, ["low", "high"]].isna().all()


def test_paired_uses_common_seeds_and_names_the_others():
    rows = [
        ("gspo", 0, 0.1),
        ("gspo", 1, 0.2),
        ("gspo", 2, 0.9),
        ("hacpo", 0, 0.3),
        ("hacpo", 1, 0.6),
        ("naive", 5, 1.0),
    ]
    values = pd.DataFrame(rows, columns=["method", "seed", "value"]).assign(agent="A")
    table = paired(values.astype({"method": "category"}), "gspo").set_index("method")
    assert table.loc["hacpo", "mean"] == pytest.approx(0.3) and table.loc["hacpo", "seeds"] == 2
    assert table.loc["hacpo", "high"] == pytest.approx(0.3 + T1 * 0.1, rel=1e-6)
    assert list(table["unpaired"]) == ["2", "0, 1, 2, 5"]
    assert table.loc["naive", "seeds"] == 0 and np.isnan(table.loc["naive", "mean"])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.001, 0.1, "ahead"), (-0.009, 0.1, "not worse"), (-0.02, 0.1, "undecided"), (-0.009, -0.001, "slightly behind"),
     (-0.1, -0.001, "behind"), (float("nan"), float("nan"), "no interval")],
)  # fmt: skip
def test_verdict(low, high, expected):
    assert verdict(low, high, margin=0.01) == expected
