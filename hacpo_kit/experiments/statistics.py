"""Means over runs with their 95 % intervals, differences paired by seed, and both as text."""

from __future__ import annotations

import numpy as np
import pandas as pd

MEAN = "mean of agents"  # stands for the mean in a column of agents
BEFORE = "before training"  # stands for the untrained agents in a column of methods


def interval(values: pd.Series, level: str | list[str]) -> pd.DataFrame:
    """Return the mean over runs and its 95 % t-interval, for each value of one or several index levels.

    Columns: mean, low, high, runs. A single run has no interval: low and high are NaN.
    """
    from scipy.special import stdtrit  # scipy.stats.t.ppf is the same function, and takes seconds to import

    grouped = values.groupby(level=level, observed=True)
    mean, n, std = grouped.mean(), grouped.size(), grouped.std(ddof=1)
    # mean ± t(0.975, n − 1) · std / √n
    half = pd.Series(stdtrit(np.maximum(n - 1, 1), 0.975), n.index) * std / np.sqrt(n)
    return pd.DataFrame({"mean": mean, "low": mean - half, "high": mean + half, "runs": n})


def over_seeds(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return mean, low, high and seeds of the column `value`, one row for each combination of the columns `by`."""
    table = interval(rows.set_index([*by, "run"])["value"], by)
    return table.rename(columns={"runs": "seeds"}).reset_index()


def paired(values: pd.DataFrame, against: str) -> pd.DataFrame:
    """Return the difference of every method to `against` over their common seeds, for one set of agents.

    `values`: one row for each method, agent and seed, with the column `value`. Columns of the result: method, agent, mean,
    low, high, seeds (pairs), unpaired (the seeds that only one of the two methods has, "" for none).
    """
    wide = values.set_index(["method", "agent", "seed"])["value"].unstack("seed")
    methods, agents = (wide.index.get_level_values(name) for name in ("method", "agent"))
    other = wide[methods == against].droplevel("method").reindex(agents).set_axis(wide.index)
    rest = methods != against
    differences, unpaired = (wide - other)[rest], (wide.notna() ^ other.notna())[rest]
    table = interval(differences.stack().dropna(), ["method", "agent"]).reindex(differences.index)
    table = table.rename(columns={"runs": "seeds"}).fillna({"seeds": 0}).astype({"seeds": int})
    table["unpaired"] = [", ".join(map(str, unpaired.columns[row])) for row in unpaired.to_numpy()]
    return table.reset_index()


def verdict(low: float, high: float, margin: float = 0.01) -> str:
    """Return what the 95 % interval of a difference shows.

    "not worse" means that the interval lies above −`margin`, "slightly behind" that it lies between −`margin` and 0.

    >>> [verdict(*x) for x in ((0.01, 0.03), (-0.005, 0.02), (-0.03, -0.01), (-0.05, 0.02))]
    ['ahead', 'not worse', 'behind', 'undecided']
    """
    if np.isnan(low) or np.isnan(high):
        return "no interval"
    if low > 0:
        return "ahead"
    if high < 0:
        return "behind" if low <= -margin else "slightly behind"
    return "not worse" if low > -margin else "undecided"


def percent(mean: float, half: float = float("nan")) -> str:
    """Return an accuracy as percent, with half the width of its interval if it has one.

    >>> percent(0.953, 0.0121), percent(0.953)
    ('95.3 ± 1.2', '95.3')
    """
    if np.isnan(mean):
        return "–"
    return f"{100 * mean:.1f}" + ("" if np.isnan(half) else f" ± {100 * half:.1f}")


def points(mean: float, low: float = float("nan"), high: float = float("nan")) -> str:
    """Return a difference in percentage points with its interval.

    >>> points(0.033, 0.01, 0.056), points(-0.02)
    ('+3.3 [+1.0, +5.6]', '−2.0 [no interval]')
    """
    if np.isnan(mean):
        return "–"
    mean, low, high = (f"{100 * value:+.1f}".replace("-", "−") for value in (mean, low, high))
    return f"{mean} [no interval]" if "nan" in low else f"{mean} [{low}, {high}]"
