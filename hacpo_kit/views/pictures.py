"""Static pictures: the twin of a plotly figure, for where no JavaScript runs, and the figure of the four stages."""

from __future__ import annotations

import html
import io
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Okabe and Ito's colours, distinguishable with every kind of colour vision, the blue a little lighter so that it and the
# grey of the text read on white and on black
COLORS = ("#1f83c4", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#7a7a7a"
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}  # plotly's name → matplotlib's
HEIGHT = 422  # of a figure with one panel (pixels)


# ── the four stages ──────────────────────────────────────────────────────────────────────────────────────────────

STAGES = {
    "rollout": "every agent answers",
    "reward": "a verifier pays",
    "advantage": "each learner weighs\neverybody's answers",
    "update": "importance ratio, clip,\noptimiser steps",
}


class Picture:
    """A PNG that a notebook shows."""

    def __init__(self, png: bytes, alt: str):
        self.png, self.alt = png, alt

    def __repr__(self) -> str:
        return self.alt

    def _repr_png_(self) -> bytes:
        return self.png


def stages(current: int | None = None) -> Picture:
    """The four stages of a step, ① rollout → ② reward → ③ advantage → ④ update, with the current one marked.

    Raises ValueError for a number that is no stage.
    """
    if current is not None and current not in (1, 2, 3, 4):
        raise ValueError(f"current={current!r}: the stages are 1 (rollout), 2 (reward), 3 (advantage) and 4 (update)")
    canvas, (ax,) = _canvas(10.0, 2.75, 110)
    ax.set(xlim=(0, 100), ylim=(0, 27.5))
    ax.axis("off")
    for stage, ((name, told), draw) in enumerate(
        zip(STAGES.items(), (_answers, _verdicts, _views, _learners), strict=True)
    ):
        x, here = 1.5 + 25 * stage, current == stage + 1
        _box(
            ax,
            x,
            3.2,
            22,
            23.3,
            COLORS[0] if here else GREY,
            2.6 if here else 0.9,
            (0.12, 0.51, 0.77, 0.1) if here else "none",
        )
        style = {"color": COLORS[0] if here else GREY, "weight": "bold", "fontsize": 12.5}
        ax.text(x + 11, 23.4, f"{'①②③④'[stage]} {name}", ha="center", va="center", **style)
        ax.text(x + 11, 6.6, told, ha="center", va="center", color=GREY, fontsize=9, linespacing=1.25)
        draw(ax, x)
        if stage < 3:
            _arrow(ax, (x + 22.2, 15), (x + 24.8, 15))
    # and round again: the next step begins with the updated agents
    ax.plot([87.5, 87.5, 12.5], [3.2, 0.9, 0.9], color=GREY, linewidth=1)
    _arrow(ax, (12.5, 0.9), (12.5, 3.1))
    ax.text(50, 1.2, "next step", ha="center", va="bottom", color=GREY, fontsize=8.5)
    title = f"① rollout → ② reward → ③ advantage → ④ update{f'; here: stage {current}' if current else ''}"
    return Picture(_small_png(canvas), title)


RIGHT = {
    0: (True, False, False, True),
    1: (False, True, False, False),
}  # which answers of the picture's two agents are right


def _answers(ax, x: float) -> None:
    """Two agents, four answers each, nobody knows yet which are right."""
    for agent, y in ((0, 17.5), (1, 12.3)):
        _box(ax, x + 2, y - 1.8, 6.6, 3.6, COLORS[agent], 1.4)
        ax.text(x + 5.3, y, f"agent {'AB'[agent]}", ha="center", va="center", color=COLORS[agent], fontsize=8)
        _arrow(ax, (x + 8.9, y), (x + 11.2, y))
        for i in range(4):
            _dot(ax, x + 12.8 + 2.2 * i, y, 1.0, COLORS[agent], "none")


def _verdicts(ax, x: float) -> None:
    """The same answers, the right ones filled."""
    for agent, y in ((0, 17.5), (1, 12.3)):
        for i, right in enumerate(RIGHT[agent]):
            at = x + 5.0 + 4 * i
            _dot(ax, at, y, 1.0, COLORS[agent], COLORS[agent] if right else "none")
            ax.text(at + 1.15, y, " 1" if right else " 0", va="center", color=GREY, fontsize=8)


def _views(ax, x: float) -> None:
    """Each learner sees all answers; how large a dot is, is how much it weighs."""
    for learner, y in ((0, 17.5), (1, 12.3)):
        ax.text(x + 3.0, y, f"{'AB'[learner]} sees", ha="center", va="center", color=COLORS[learner], fontsize=8)
        for source in (0, 1):
            for i, right in enumerate(RIGHT[source]):
                size = (1.05 if right else 0.65) * (1.0 if source == learner else 0.8)
                at = x + 6.6 + 1.9 * (4 * source + i)
                _dot(ax, at, y, size, COLORS[source], COLORS[source] if right else "none")


def _learners(ax, x: float) -> None:
    """Both agents, changed."""
    for agent, y in ((0, 17.5), (1, 12.3)):
        _box(ax, x + 3, y - 1.8, 6.6, 3.6, COLORS[agent], 1.4)
        ax.text(x + 6.3, y, f"agent {'AB'[agent]}", ha="center", va="center", color=COLORS[agent], fontsize=8)
        _arrow(ax, (x + 9.9, y), (x + 12.1, y))
        _box(ax, x + 12.4, y - 1.8, 6.6, 3.6, COLORS[agent], 1.4, _rgba(COLORS[agent], 0.25))
        ax.text(x + 15.7, y, f"agent {'AB'[agent]}′", ha="center", va="center", color=COLORS[agent], fontsize=8)


def _dot(ax, x: float, y: float, size: float, edge: str, fill: str) -> None:
    ax.scatter([x], [y], s=62 * size**2, facecolors=fill, edgecolors=edge, linewidths=1.3)


def _box(ax, x: float, y: float, width: float, height: float, edge: str, line: float, fill: Any = "none") -> None:
    from matplotlib.patches import FancyBboxPatch

    ax.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.9", ec=edge, fc=fill, lw=line)
    )


def _arrow(ax, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": 1, "shrinkA": 0, "shrinkB": 0})


def _rgba(color: str, alpha: float) -> tuple[float, float, float, float]:
    return (*(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)), alpha)


# ── the twin of a figure ─────────────────────────────────────────────────────────────────────────────────────────


def draw(fig: go.Figure, width: float, dpi: int) -> bytes:
    """A transparent PNG of a figure: scatter, bar and heatmap traces, lines, rectangles, annotations, in one or more panels.

    Raises NotImplementedError for any other kind of trace.
    """
    height = 8.0 * 0.48 * (fig.layout.height or HEIGHT) / HEIGHT if fig.layout.meta else width * 0.48
    meta = fig.layout.meta or {"panels": [""], "columns": 1}
    columns = meta["columns"]
    canvas, axes = _canvas(width, height, dpi, -(-len(meta["panels"]) // columns), columns)
    for shape in fig.layout.shapes:
        _draw_shape(axes[_panel_of(shape.xref)], shape)
    kinds = {"scatter": _draw_scatter, "heatmap": _draw_heatmap}
    for trace in fig.data:
        if trace.type not in (*kinds, "bar"):
            raise NotImplementedError(f"no static picture for traces of type {trace.type}")
        if trace.type != "bar":
            kinds[trace.type](axes[_panel_of(trace.xaxis)], trace)
    for panel, ax in enumerate(axes):
        bars = [t for t in fig.data if t.type == "bar" and _panel_of(t.xaxis) == panel]
        _draw_bars(ax, bars, fig.layout.barmode or "group")
    for i, (ax, name) in enumerate(zip(axes, meta["panels"], strict=False)):
        _draw_axes(ax, fig.layout[f"xaxis{i + 1 if i else ''}"], fig.layout[f"yaxis{i + 1 if i else ''}"], name)
    for ax in axes[len(meta["panels"]) :]:
        ax.set_visible(False)
    for note in fig.layout.annotations:
        _draw_annotation(axes, note, meta["panels"])
    _title_and_legend(canvas, axes, _literal(fig.layout.title.text))
    return _small_png(canvas)


def _canvas(width: float, height: float, dpi: int, rows: int = 1, columns: int = 1):
    """A drawing board that no window and no global state knows of, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(canvas)
    return canvas, canvas.subplots(rows, columns, squeeze=False).flatten()


def _small_png(canvas) -> bytes:
    """256 colours are enough for lines on nothing, and make a third of the size: pages hold many figures."""
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    canvas.savefig(drawn, format="png", transparent=True)
    Image.open(drawn).quantize(256, method=Image.Quantize.FASTOCTREE).save(small, format="PNG", optimize=True)
    return small.getvalue()


def _panel_of(axis: str | None) -> int:
    """Position of the panel that "x", "x3" or "x3 domain" means; "paper" means the first."""
    digits = "".join(c for c in axis or "" if c.isdigit())
    return int(digits) - 1 if digits else 0


def _draw_axes(ax, x, y, name: str) -> None:
    from matplotlib.ticker import MultipleLocator

    if name:
        ax.set_title(_literal(name), fontsize=10, color=GREY)
    ax.set_xlabel(_literal(x.title.text))
    ax.set_ylabel(_literal(y.title.text))
    for axis, set_scale in ((x, ax.set_xscale), (y, ax.set_yscale)):
        if axis.type == "log":  # setting "linear" would take the names off an axis of categories
            set_scale("log")
    for axis, set_ticks in ((x, ax.set_xticks), (y, ax.set_yticks)):
        if axis.tickvals is not None:
            texts = axis.ticktext if axis.ticktext is not None else axis.tickvals
            set_ticks(list(axis.tickvals), [_literal(str(t).replace("<br>", "\n")) for t in texts])
            set_ticks([], minor=True)  # a logarithmic axis would add its own
    if x.tickvals is None and x.title.text == "step":
        ax.xaxis.get_major_locator().set_params(integer=True)
    for axis, drawn in ((x, ax.xaxis), (y, ax.yaxis)):
        if axis.dtick is not None and axis.tickvals is None and axis.type != "log":
            drawn.set_major_locator(MultipleLocator(axis.dtick))
    for axis, set_limits in ((x, ax.set_xlim), (y, ax.set_ylim)):
        if axis.range is not None:
            set_limits([10**v for v in axis.range] if axis.type == "log" else axis.range)
    if y.autorange == "reversed":
        ax.invert_yaxis()
    _grey(ax)
    for axis, shown in ((ax.xaxis, x.showgrid), (ax.yaxis, y.showgrid)):
        if shown is False or ax.images:  # cells of a heatmap want no lines through their numbers
            axis.grid(False)


def _title_and_legend(canvas, axes, title: str) -> None:
    named = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    title = "\n".join(textwrap.wrap(title, 68 if named else 92))  # not into the legend
    if len(axes) == 1 and not axes[0].get_title():
        axes[0].set_title(title, loc="left", fontsize=11, color=GREY)
    else:
        canvas.suptitle(title, x=0.01, ha="left", fontsize=11, color=GREY)
    if named:
        # beside the axes: inside, it would lie on the points
        names = [_wrapped(name, 40) for name in named]
        canvas.legend(named.values(), names, frameon=False, labelcolor=GREY, fontsize=9, loc="outside right upper")


def _draw_shape(ax, shape) -> None:
    if shape.type == "rect":
        style = {
            "facecolor": _faded_to_rgba(shape.fillcolor) if shape.fillcolor else (0.5, 0.5, 0.5, 0.25),
            "edgecolor": shape.line.color or GREY, "linewidth": 0.8 * (shape.line.width or 0),
        }  # fmt: skip
        if str(shape.yref).endswith(("paper", "domain")):
            ax.axvspan(shape.x0, shape.x1, shape.y0, shape.y1, **style)
        else:
            ax.fill_between([shape.x0, shape.x1], shape.y0, shape.y1, **style)
    elif shape.x0 == shape.x1:
        ax.axvline(shape.x0, color=GREY, linestyle=":", linewidth=1)
    else:
        ax.axhline(shape.y0, color=GREY, linestyle=":", linewidth=1)


def _draw_annotation(axes, note, panels) -> None:
    """A note at a place of the data; the names of panels are drawn as their titles, arrows are left to plotly."""
    if note.text in panels and note.xref == "paper":
        return
    ax = axes[_panel_of(note.xref)]
    across, up = (str(ref).endswith(("paper", "domain")) for ref in (note.xref, note.yref))
    places = {(False, False): ax.transData, (True, True): ax.transAxes}
    transform = places.get((across, up)) or (ax.get_yaxis_transform() if across else ax.get_xaxis_transform())
    align = {"auto": "center", "middle": "center", None: "center"}
    ax.text(
        note.x, note.y, _literal(note.text.replace("<br>", "\n")), transform=transform, fontsize=(note.font.size or 11) * 0.8,
        color=note.font.color or GREY, ha=align.get(note.xanchor, note.xanchor), va=align.get(note.yanchor, note.yanchor),
    )  # fmt: skip


def _draw_bars(ax, bars, mode: str) -> None:
    """Bars beside each other, on each other (negative ones downwards), or through each other, upright or lying."""
    if not bars:
        return
    lying = bars[0].orientation == "h"
    names = [list(b.y if lying else b.x) for b in bars]
    categories = list(dict.fromkeys(n for one in names for n in one))
    numeric = all(isinstance(c, (int, float, np.number)) for c in categories)
    steps = np.diff(sorted(categories)) if numeric and len(categories) > 1 else [1.0]
    room = float(min(steps)) * 0.85
    base: dict[tuple[Any, bool], float] = {}
    for i, (bar, at) in enumerate(zip(bars, names, strict=True)):
        values = np.nan_to_num(np.asarray(bar.x if lying else bar.y, float))
        place = np.asarray(at, float) if numeric else np.array([categories.index(n) for n in at], float)
        width, offset = (
            (room / len(bars), (i - (len(bars) - 1) / 2) * room / len(bars)) if mode == "group" else (room, 0)
        )
        bottom = np.zeros(len(values))
        if mode in ("stack", "relative"):
            for j, (name, value) in enumerate(zip(at, values, strict=True)):
                bottom[j] = base.get((name, value < 0), 0.0)
                base[name, value < 0] = bottom[j] + value
        style = {
            "color": bar.marker.color, "alpha": bar.marker.opacity or bar.opacity or 1.0,
            "label": None if bar.showlegend is False or not bar.name else _literal(bar.name),
        }  # fmt: skip
        width = np.asarray(bar.width, float) if bar.width is not None else width
        (ax.barh if lying else ax.bar)(place + offset, values, width, bottom, **style)
    if not numeric:
        (ax.set_yticks if lying else ax.set_xticks)(range(len(categories)), [_literal(str(c)) for c in categories])


def _draw_heatmap(ax, trace) -> None:
    """Cells with their numbers in them, if the figure has `text`."""
    from matplotlib.colors import LinearSegmentedColormap

    cells = np.asarray(trace.z, float)
    scale = trace.colorscale or ((0.0, "#ffffff"), (1.0, COLORS[0]))
    colors = LinearSegmentedColormap.from_list("", [(place, _hex(color)) for place, color in scale])
    ax.imshow(cells, cmap=colors, vmin=trace.zmin, vmax=trace.zmax, aspect="auto", origin="lower", alpha=trace.opacity)
    for axis, names in ((ax.set_xticks, trace.x), (ax.set_yticks, trace.y)):
        if names is not None:
            axis(range(len(names)), [_wrapped(_literal(str(n)), 26) for n in names])
    if trace.text is not None:
        for (row, column), text in np.ndenumerate(np.asarray(trace.text, object)):
            ax.text(column, row, _literal(str(text)), ha="center", va="center", fontsize=10, color="black")


def _hex(color: str) -> Any:
    """A colour as matplotlib takes it: plotly turns its scales into rgb(…)."""
    return [float(v) / 255 for v in color[4:-1].split(",")] if color.startswith("rgb(") else color


def _draw_scatter(ax, trace) -> None:
    if trace.fill == "toself":
        ax.fill(trace.x, trace.y, color=_faded_to_rgba(trace.fillcolor), linewidth=0)
    elif trace.mode == "text":
        for x, y, text in zip(trace.x, trace.y, trace.text, strict=True):
            ax.text(x, y, _literal(str(text)), ha="center", va="center", fontsize=9, color=trace.textfont.color or GREY)
    elif trace.mode == "markers":
        color, hollow = trace.marker.color, str(trace.marker.symbol).endswith("open")
        ax.scatter(
            trace.x, trace.y, s=0.4 * (trace.marker.size or 5) ** 2, alpha=trace.marker.opacity,
            facecolors="none" if hollow else color, edgecolors=color if hollow else "none", linewidths=0.7,
            label=None if trace.showlegend is False else _literal(trace.name),
        )  # fmt: skip
        if trace.error_x.array is not None:
            bars = {"fmt": "none", "ecolor": trace.error_x.color, "elinewidth": 1.8, "capsize": 3}
            ax.errorbar(trace.x, trace.y, xerr=trace.error_x.array, **bars)
    else:
        style = {"color": trace.line.color, "linestyle": DASHES[trace.line.dash or "solid"]}
        style["linewidth"] = 0.8 * (trace.line.width or 2)
        style["drawstyle"] = {"hv": "steps-post", "vh": "steps-pre"}.get(trace.line.shape, "default")
        label = None if trace.showlegend is False else _literal(trace.name)
        marker = "o" if "markers" in trace.mode else None
        ax.plot(trace.x, trace.y, marker=marker, markersize=3.5, label=label, **style)


def _faded_to_rgba(color: str) -> tuple[float, ...]:
    """ "rgba(31,131,196,0.2)" as matplotlib takes it."""
    r, g, b, a = (float(v) for v in color[5:-1].split(","))
    return r / 255, g / 255, b / 255, a


def _literal(text: str | None) -> str:
    """Text as it is: matplotlib knows no entities, reads dollar signs as formulas, and hides labels that begin with _."""
    text = html.unescape(text or "").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _wrapped(text: str, width: int) -> str:
    """A literal text in lines, or a long name would leave no room for the picture."""
    lines = textwrap.fill(text.replace(r"\$", "$"), width, drop_whitespace=False)
    return lines.replace("$", r"\$")


def _grey(ax) -> None:
    """Text and axes that read on a light and on a dark page."""
    ax.grid(color=(0.5, 0.5, 0.5, 0.25), linewidth=0.6)
    ax.set_axisbelow(True)
    for item in (ax.xaxis.label, ax.yaxis.label, *ax.get_xticklabels(), *ax.get_yticklabels()):
        item.set_color(GREY)
    ax.tick_params(which="both", colors=GREY)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
