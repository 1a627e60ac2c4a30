"""The type of all figures, and the parts that they are made of."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from hacpo_kit.views.markup import plain
from hacpo_kit.views.pictures import HEIGHT, draw
from hacpo_kit.views.style import COLORS, GREY, faded

AXIS = {
    "gridcolor": "rgba(128,128,128,0.25)", "zeroline": False, "linecolor": GREY, "ticks": "outside", "tickcolor": GREY,
}  # fmt: skip
TEMPLATE = go.layout.Template(
    layout={
        "title": {"x": 0.02, "font": {"size": 15}}, "font": {"color": GREY, "size": 12}, "colorway": COLORS,
        "xaxis": AXIS, "yaxis": {**AXIS, "automargin": True, "title": {"standoff": 10}},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"bgcolor": "rgba(0,0,0,0)"}, "margin": {"l": 65, "r": 20, "t": 60, "b": 70},
    }
)  # fmt: skip
DOTTED = {"color": GREY, "dash": "dot", "width": 1}
MAX_TICKS = 24


class Figure(go.Figure):
    """A plotly figure with a static twin, a PNG that is visible where no JavaScript runs; it displays as both at once."""

    def _repr_mimebundle_(self, *_: Any, **__: Any) -> dict[str, Any]:
        interactive = {**json.loads(self.to_json()), "config": {"displaylogo": False, "responsive": True}}
        return {
            "text/plain": f"Figure: {self.layout.title.text}",
            "image/png": base64.b64encode(self.png()).decode(),
            "application/vnd.plotly.v1+json": interactive,
        }

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self._repr_mimebundle_(), raw=True)

    def png(self) -> bytes:
        """Return the static twin, a transparent PNG about 900 pixels wide, drawn without a browser."""
        return draw(self)


def figure(title: str, x: str, y: str, *, height: int = HEIGHT, **layout: Any) -> Figure:
    """Return an empty figure in the package's style for your own scatter, bar and heatmap traces; `height` in pixels."""
    fig = Figure(layout={"template": TEMPLATE, "height": height})
    return fig.update_layout(title_text=title, xaxis_title_text=x, yaxis_title_text=y, **layout)


def panels(title: str, x: str, y: str, names: Sequence[str], *, height: int, columns: int = 2) -> Figure:
    """Return an empty figure with one panel per name; `height` (pixels) is that of a panel, `panel_axes` places a trace."""
    from plotly.subplots import make_subplots

    names = [plain(name, 200) for name in names]
    columns = min(columns, len(names))
    rows = -(-len(names) // columns)
    height = rows * min(height, max(220, 660 // rows)) + 92
    gap = min(110 / height, 1 / rows)  # for the labels of the axis above
    fig = figure(title, x, y, height=height, meta={"panels": names, "columns": columns})
    make_subplots(rows, columns, figure=fig, subplot_titles=names, vertical_spacing=gap, horizontal_spacing=0.1)
    return fig.update_xaxes(title_text=x).update_yaxes(title_text=y).update_annotations(font_size=13)


def panel_axes(place: int) -> dict[str, str]:
    """Return the axes of a trace in the panel at a place, counted from 0.

    >>> panel_axes(0), panel_axes(2)
    ({'xaxis': 'x', 'yaxis': 'y'}, {'xaxis': 'x3', 'yaxis': 'y3'})
    """
    number = place + 1 if place else ""
    return {"xaxis": f"x{number}", "yaxis": f"y{number}"}


def add_curve(fig: Figure, curve: pd.DataFrame, name: str, color: str, dash: str = "solid", **trace: Any) -> None:
    """Add a line through the column `mean`, and fill the area between the columns `low` and `high`, if present."""
    area = curve.dropna(subset=["low", "high"]) if {"low", "high"} <= set(curve) else curve.iloc[:0]
    if len(area) > 1:
        axes = {key: value for key, value in trace.items() if key in ("xaxis", "yaxis")}
        # single precision, because a page holds many areas
        fig.add_scatter(
            x=np.concatenate([area.index, area.index[::-1]]).astype(np.float32),
            y=np.concatenate([area["high"], area["low"][::-1]]).astype(np.float32),
            fill="toself", fillcolor=faded(color, 0.15), line={"width": 0}, mode="lines",
            hoverinfo="skip", showlegend=False, legendgroup=name, **axes,
        )  # fmt: skip
    fig.add_scatter(
        x=curve.index, y=curve["mean"], name=plain(name, 200), line={"color": color, "dash": dash},
        mode="lines+markers" if len(curve) <= MAX_TICKS else "lines",
        **{"legendgroup": name, "showlegend": True, **trace},
    )  # fmt: skip


def mark_integers(fig: Figure, values: Sequence[int]) -> None:
    """Put the ticks of the x axis on these values only, or on every few of them: there is no half of a step or update."""
    fig.update_xaxes(tickvals=list(values)[:: -(-len(values) // MAX_TICKS) or 1])
