"""Colours and dashes of all figures."""

from __future__ import annotations

from itertools import cycle, product

import pandas as pd

from hacpo_kit.config import METHODS

# The palette of Okabe and Ito, which is distinguishable with every kind of colour vision. Its blue is a little lighter here,
# so that it is readable on light and on dark pages, as is the grey of text and axes.
COLORS = ("#1f83c4", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#7a7a7a"
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}  # plotly's name → matplotlib's


def faded(color: str, alpha: float) -> str:
    """Return a hexadecimal colour with an opacity.

    >>> faded("#1f83c4", 0.2)
    'rgba(31,131,196,0.2)'
    """
    red, green, blue = bytes.fromhex(color[1:])
    return f"rgba({red},{green},{blue},{alpha})"


def method_styles(methods: pd.Series) -> dict[str, tuple[str, str]]:
    """Return the colour and dash of each method: fixed for the package's methods, then by name for others.

    All categories of a categorical series count, so that a part of a study looks like the whole study.
    """
    names = methods.cat.categories if isinstance(methods.dtype, pd.CategoricalDtype) else methods.unique()
    others = sorted(set(map(str, names)) - set(METHODS))
    styles = cycle((color, dash) for dash, color in product(DASHES, COLORS))
    return dict(zip([*METHODS, *others], styles, strict=False))
