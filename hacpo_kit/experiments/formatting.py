"""Accuracies and differences as text: percent, percentage points, and a styled table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from hacpo_kit.experiments.statistics import BEFORE

if TYPE_CHECKING:
    from pandas.io.formats.style import Styler


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


def styled(table: pd.DataFrame) -> Styler:
    """Return `final_table` as mean ± half the interval in percent; the best method of each agent and test set is bold.

    Methods with equal means share the bold type. If all methods are equal, none is bold.
    """
    from pandas.io.formats.style import Styler  # needs jinja2, which is installed together with the notebooks

    sets = [name for name in dict.fromkeys(table.columns.get_level_values(0)) if name != "seeds"]
    text = pd.DataFrame({name: [percent(m, h) for m, h in table[name][["mean", "half"]].to_numpy()] for name in sets})
    text = text.set_index(table.index)
    text["seeds"] = ["–" if np.isnan(n) else f"{n:.0f}" for n in table[("seeds", "")]]
    bold = pd.DataFrame("", index=text.index, columns=text.columns)
    trained = table[table.index.get_level_values("method") != BEFORE]
    for name in sets:
        rounded = trained[name]["mean"].mul(100).round(1)
        best, worst = (rounded.groupby(level=["agents", "agent"]).transform(f) for f in ("max", "min"))
        bold.loc[rounded.index[(rounded == best) & (best > worst)], name] = "font-weight: bold"
    style = Styler(text, uuid="final", cell_ids=False, table_attributes='class="dataframe"')
    for axis in (0, 1):  # a Styler does not escape HTML by itself
        style = style.format_index(escape="html", axis=axis)
    return style.format(escape="html").apply(lambda _: bold, axis=None)
