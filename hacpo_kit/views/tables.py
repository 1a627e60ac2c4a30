"""Tables of rollouts and other rows, as escaped HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from hacpo_kit.views.markup import escaped, literal, visible
from hacpo_kit.views.style import GREY

ROLLOUT_COLUMNS = ("prompt", "gold", "source", "text", "reward", "status", "length", "mean_logp")


class Table:
    """The first rows of a frame, displayed as an HTML table in which every text is escaped."""

    def __init__(self, frame: pd.DataFrame, limit: int = 20):
        self.frame, self.limit = frame, limit

    def __repr__(self) -> str:
        # a terminal would obey control characters
        shown = self.frame.head(self.limit).rename(columns=lambda name: visible(name, 80))
        return shown.map(lambda v: visible(v, 80) if isinstance(v, str | list | dict) else v).to_string()

    def _repr_html_(self) -> str:
        shown = self.frame.head(self.limit)
        style = f"text-align:left;padding:4px 10px;border-bottom:1px solid {GREY}"
        head = "".join(f"<th style='{style}'>{escaped(name)}</th>" for name in shown)
        rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in shown.itertuples(index=False))
        hidden = len(self.frame) - len(shown)
        more = f"<div style='color:{GREY}'>{hidden:,} more rows are not shown</div>" if hidden else ""
        return literal(
            f"<table style='border-collapse:collapse'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"
        )


def _cell(value: Any) -> str:
    align = "left"
    if pd.api.types.is_scalar(value) and pd.isna(value):
        text = f"<span style='color:{GREY}'>–</span>"
    elif pd.api.types.is_bool(value):
        text = "yes" if value else "no"
    elif pd.api.types.is_number(value):
        text, align = f"{value:.4g}" if pd.api.types.is_float(value) else f"{value}", "right"
    else:
        text = f"<code style='white-space:pre-wrap;unicode-bidi:isolate'>{escaped(value)}</code>"
    return f"<td style='text-align:{align};padding:3px 10px;vertical-align:top'>{text}</td>"


def select(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return these columns of a frame; raises KeyError for a missing one."""
    for column in columns:
        if column not in frame:
            raise KeyError(f"no column {column!r}; there are {', '.join(map(str, frame.columns))}")
    return frame[list(columns)]


def rollout_table(rollouts: Any, columns: Sequence[str] | None = None, *, limit: int = 20) -> Table:
    """Return a table of the rollouts of a `Pool`, of a list of dicts, or of a frame with one row per rollout.

    By default the columns are those of a pool's rollouts, or all columns if there is no `text`. Raises KeyError for a missing
    column.
    """
    frame = rollouts.to_frame() if hasattr(rollouts, "to_frame") else pd.DataFrame(rollouts)
    if columns is None:
        columns = [name for name in ROLLOUT_COLUMNS if name in frame] if "text" in frame else list(frame)
    return Table(select(frame, columns), limit)
