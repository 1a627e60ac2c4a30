"""The static twin of a plotly figure: a PNG drawn by matplotlib from the figure's own traces and layout."""

from __future__ import annotations

import html
import io
import re
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from hacpo_kit.views.style import COLORS, DASHES, GREY

if TYPE_CHECKING:
    import plotly.graph_objects as go

HEIGHT = 422  # of a figure with one panel (pixels)
FRACTIONS = ("paper", "domain")  # an axis whose name ends so has fractions of the panel
WIDTHS = {1: (8.0, 110), 2: (10.0, 90), 3: (13.5, 80)}  # panels in a row → width (inches), resolution (pixels per inch)


def draw(fig: go.Figure) -> bytes:
    """Return a transparent PNG of a figure with scatter, bar and heatmap traces, shapes and annotations, in one or more panels.

    Raises NotImplementedError for other traces.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    from PIL import Image

    layout = {"panels": [""], "columns": 1, **(fig.layout.meta or {})}
    names, columns = layout["panels"], layout["columns"]
    width, dpi = WIDTHS[columns]
    # without pyplot, whose state is global
    canvas = Canvas(figsize=(width, (fig.layout.height or HEIGHT) / 110), dpi=dpi, layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots(-(-len(names) // columns), columns, squeeze=False).flatten()
    for shape in fig.layout.shapes:
        _draw_shape(axes[_panel(shape.xref)], shape)
    for trace in fig.data:
        if trace.type not in ("scatter", "bar", "heatmap"):
            raise NotImplementedError(f"no static picture for traces of type {trace.type}")
        if trace.type != "bar":
            (_draw_scatter if trace.type == "scatter" else _draw_heatmap)(axes[_panel(trace.xaxis)], trace)
    for place, (ax, name) in enumerate(zip(axes, names, strict=False)):
        bars = [trace for trace in fig.data if trace.type == "bar" and _panel(trace.xaxis) == place]
        _draw_bars(ax, bars, fig.layout.barmode or "group")
        number = place + 1 if place else ""
        _draw_axes(ax, fig.layout[f"xaxis{number}"], fig.layout[f"yaxis{number}"], name)
    for ax in axes[len(names) :]:
        ax.set_visible(False)
    for note in fig.layout.annotations:
        if not (note.text in names and note.xref == "paper"):  # names of panels are their titles
            _draw_annotation(axes[_panel(note.xref)], note)
    _draw_title_and_legend(canvas, axes, _literal(fig.layout.title.text))
    drawn, small = io.BytesIO(), io.BytesIO()
    canvas.savefig(drawn, format="png", transparent=True)
    # 256 colours make it three times as small: pages hold many figures
    Image.open(drawn).quantize(256, method=Image.Quantize.FASTOCTREE).save(small, format="PNG", optimize=True)
    return small.getvalue()


# ── axes, title, legend ──────────────────────────────────────────────────────────────────────────────────────────


def _panel(axis: str | None) -> int:
    """Return the position of the panel of "x", "x3" or "x3 domain"; "paper" is the first panel."""
    digits = re.sub(r"\D", "", axis or "")
    return int(digits) - 1 if digits else 0


def _draw_axes(ax: Any, x: Any, y: Any, name: str) -> None:
    """Set labels, scale, ticks and range of both axes, in a grey that is readable on light and on dark pages."""
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    ax.set_title(_wrapped(_literal(name), 36), fontsize=10, color=GREY)
    ax.grid(color=(0.5, 0.5, 0.5, 0.25), linewidth=0.6)
    ax.set_axisbelow(True)
    for side, axis, drawn in (("x", x, ax.xaxis), ("y", y, ax.yaxis)):
        drawn.set_label_text(_literal(axis.title.text), color=GREY)
        if axis.type == "log":  # setting "linear" would remove the names of categories
            ax.set(**{f"{side}scale": "log"})
        if axis.tickvals is not None:
            texts = axis.tickvals if axis.ticktext is None else axis.ticktext
            drawn.set_ticks(list(axis.tickvals), [_literal(text) for text in texts])
            drawn.set_ticks([], minor=True)  # those of a logarithmic axis
        elif axis.dtick is not None:
            drawn.set_major_locator(MultipleLocator(axis.dtick))
        elif axis.title.text == "step":
            drawn.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
        if axis.range is not None:
            ax.set(**{f"{side}lim": [10**v for v in axis.range] if axis.type == "log" else axis.range})
        elif axis.rangemode == "tozero":
            low, high = getattr(ax, f"get_{side}lim")()
            ax.set(**{f"{side}lim": (min(0, low), max(0, high))})
        if axis.showgrid is False or ax.images:  # no lines through the numbers of a heatmap
            drawn.grid(False)
    if y.autorange == "reversed":
        ax.invert_yaxis()
    ax.tick_params(which="both", colors=GREY)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_title_and_legend(canvas: Any, axes: Any, title: str) -> None:
    lines = textwrap.wrap(title, int(10.5 * canvas.get_figwidth()))
    canvas.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=11, color=GREY)
    named = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if named:
        # beside the axes, where it covers no points; its own title is empty lines beside the figure's title
        canvas.legend(
            named.values(), [_wrapped(name, 40) for name in named], frameon=False, labelcolor=GREY, fontsize=9,
            loc="outside right upper", title="\n" * len(lines), title_fontsize=9,
        )  # fmt: skip


# ── shapes, notes, traces ────────────────────────────────────────────────────────────────────────────────────────


def _draw_shape(ax: Any, shape: Any) -> None:
    if shape.type == "rect":
        style = {
            "facecolor": _rgba(shape.fillcolor or "rgba(128,128,128,0.25)"),
            "edgecolor": shape.line.color or GREY, "linewidth": 0.8 * (shape.line.width or 0),
        }  # fmt: skip
        transform = ax.get_xaxis_transform() if str(shape.yref).endswith(FRACTIONS) else ax.transData
        ax.fill_between([shape.x0, shape.x1], shape.y0, shape.y1, transform=transform, **style)
    elif shape.x0 == shape.x1:
        ax.axvline(shape.x0, color=GREY, linestyle=":", linewidth=1)
    else:
        ax.axhline(shape.y0, color=GREY, linestyle=":", linewidth=1)


def _draw_annotation(ax: Any, note: Any) -> None:
    align = {"auto": "center", "middle": "center", None: "center"}
    ax.annotate(
        _literal(note.text), (note.x, note.y),
        xycoords=tuple("axes fraction" if str(ref).endswith(FRACTIONS) else "data" for ref in (note.xref, note.yref)),
        fontsize=(note.font.size or 11) * 0.8, color=note.font.color or GREY,
        ha=align.get(note.xanchor, note.xanchor), va=align.get(note.yanchor, note.yanchor),
    )  # fmt: skip


def _draw_bars(ax: Any, bars: list[Any], mode: str) -> None:
    """Draw bars beside each other, on each other (negative ones downwards) or over each other, upright or horizontal."""
    if not bars:
        return
    horizontal = bars[0].orientation == "h"
    names = [list(bar.y if horizontal else bar.x) for bar in bars]
    categories = list(dict.fromkeys(name for one in names for name in one))
    numeric = all(isinstance(name, (int, float, np.number)) for name in categories)
    distances = np.diff(sorted(categories)) if numeric and len(categories) > 1 else [1.0]
    width = 0.85 * float(min(distances)) / (len(bars) if mode == "group" else 1)
    tops: dict[tuple[Any, bool], float] = {}  # of the bars so far, by place and sign
    for i, (bar, at) in enumerate(zip(bars, names, strict=True)):
        values = np.nan_to_num(np.asarray(bar.x if horizontal else bar.y, float))
        places = np.array(at if numeric else [categories.index(name) for name in at], float)
        bottoms = np.zeros(len(values))
        if mode == "group":
            places += (i - (len(bars) - 1) / 2) * width
        elif mode in ("stack", "relative"):
            for j, (name, value) in enumerate(zip(at, values, strict=True)):
                bottoms[j] = tops.get((name, value < 0), 0.0)
                tops[name, value < 0] = bottoms[j] + value
        (ax.barh if horizontal else ax.bar)(
            places, values, width if bar.width is None else np.asarray(bar.width, float), bottoms,
            color=bar.marker.color, alpha=bar.marker.opacity or bar.opacity or 1.0, label=_legend_name(bar),
        )  # fmt: skip
    if not numeric:
        axis = ax.yaxis if horizontal else ax.xaxis
        axis.set_ticks(range(len(categories)), [_literal(name) for name in categories])


def _draw_heatmap(ax: Any, trace: Any) -> None:
    """Draw cells, with the numbers in them if the trace has `text`."""
    from matplotlib.colors import LinearSegmentedColormap

    scale = trace.colorscale or ((0.0, "#ffffff"), (1.0, COLORS[0]))
    colors = LinearSegmentedColormap.from_list("", [(place, _rgba(color)) for place, color in scale])
    cells = np.asarray(trace.z, float)
    ax.imshow(cells, cmap=colors, vmin=trace.zmin, vmax=trace.zmax, aspect="auto", origin="lower", alpha=trace.opacity)
    for axis, names in ((ax.xaxis, trace.x), (ax.yaxis, trace.y)):
        if names is not None:
            axis.set_ticks(range(len(names)), [_wrapped(_literal(name), 26) for name in names])
    if trace.text is not None:
        for (row, column), text in np.ndenumerate(np.asarray(trace.text, object)):
            ax.text(column, row, _literal(text), ha="center", va="center", fontsize=10, color="black")


def _draw_scatter(ax: Any, trace: Any) -> None:
    if trace.fill == "toself":
        ax.fill(trace.x, trace.y, color=_rgba(trace.fillcolor), linewidth=0)
    elif trace.mode == "text":
        for x, y, text in zip(trace.x, trace.y, trace.text, strict=True):
            ax.text(x, y, _literal(text), ha="center", va="center", fontsize=9, color=trace.textfont.color or GREY)
    elif trace.mode == "markers":
        color, hollow = trace.marker.color, str(trace.marker.symbol).endswith("open")
        ax.scatter(
            trace.x, trace.y, s=0.4 * (trace.marker.size or 5) ** 2, alpha=trace.marker.opacity, linewidths=0.7,
            facecolors="none" if hollow else color, edgecolors=color if hollow else "none", label=_legend_name(trace),
        )  # fmt: skip
        if trace.error_x.array is not None:
            bars = {"fmt": "none", "ecolor": trace.error_x.color, "elinewidth": 1.8, "capsize": 3}
            ax.errorbar(trace.x, trace.y, xerr=trace.error_x.array, **bars)
    else:
        ax.plot(
            trace.x, trace.y, color=trace.line.color, linestyle=DASHES[trace.line.dash or "solid"], markersize=3.5,
            linewidth=0.8 * (trace.line.width or 2), marker="o" if "markers" in trace.mode else None,
            label=_legend_name(trace),
        )  # fmt: skip


# ── text and colours ─────────────────────────────────────────────────────────────────────────────────────────────


def _rgba(color: str) -> Any:
    """Return plotly's "rgb(31,131,196)" or "rgba(31,131,196,0.2)" as matplotlib's tuple; other colours are the same in both."""
    if not color.startswith("rgb"):
        return color
    red, green, blue, *alpha = (float(number) for number in re.findall(r"[\d.]+", color))
    return (red / 255, green / 255, blue / 255, *alpha)


def _literal(text: Any) -> str:
    """Return plotly's text for matplotlib, which knows no entities, reads `$` as formulas and hides labels that begin with _."""
    text = "" if text is None else html.unescape(str(text).replace("<br>", "\n")).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _legend_name(trace: Any) -> str | None:
    return None if trace.showlegend is False or not trace.name else _literal(trace.name)


def _wrapped(text: str, width: int) -> str:
    """Return a literal text in lines, so that a long name leaves space for the plot."""
    lines = textwrap.fill(text.replace(r"\$", "$"), width, drop_whitespace=False, break_on_hyphens=False)
    return lines.replace("$", r"\$")
