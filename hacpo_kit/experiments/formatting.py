"""Accuracies and differences as text."""

from __future__ import annotations

import numpy as np
import pandas as pd


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


def final_text(table: pd.DataFrame) -> pd.DataFrame:
    """Return `final_table` as text, one column per test set: mean ± half the width of the 95 % interval, in percent."""
    text = table.assign(text=[percent(r.mean, r.high - r.mean) for r in table.itertuples()])
    return text.set_index(["agents", "agent", "method", "set"])["text"].unstack("set", sort=False, fill_value="–")
