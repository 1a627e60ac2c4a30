"""Static twins: everything that a figure has is drawn, and names are literal."""

import io

import matplotlib.image
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from matplotlib.figure import Figure as Canvas

import hacpo_kit as hk
from hacpo_kit.views.figure import Figure, figure

BLUE = {"color": "#1f83c4"}


def pixels(fig):
    return matplotlib.image.imread(io.BytesIO(fig.png()))


@pytest.fixture
def canvases(monkeypatch):
    """Collect the canvases that matplotlib saves."""
    saved, savefig = [], Canvas.savefig
    monkeypatch.setattr(
        Canvas, "savefig", lambda canvas, *args, **kwargs: (saved.append(canvas), savefig(canvas, *args, **kwargs))
    )
    return saved


def line(**layout):
    return figure("T", "x", "y", **layout).add_scatter(x=[0, 1], y=[0, 1], mode="lines", line=BLUE)


def test_png_is_transparent_and_has_the_height_of_the_figure():
    image = pixels(line())
    assert image.shape == (422, 880, 4) and image[-1, 0, 3] == 0 and (image[..., 3] > 0).mean() > 0.01
    assert pixels(line(height=300)).shape == (300, 880, 4)


def test_png_refuses_unknown_traces():
    with pytest.raises(NotImplementedError, match="pie"):
        Figure(data=[go.Pie(values=[1])]).png()


def test_png_draws_every_kind_of_bar():
    """Stacked, beside each other, over each other; horizontal and upright; with names or numbers."""
    pictures = set()
    for mode in ("stack", "group", "overlay"):
        for x in ([1, 2, 3], ["a", "$b$", "_c"]):
            for horizontal in (False, True):
                fig = figure("T", "x", "y", barmode=mode)
                for y, name in (([1, 2, -1], "one"), ([2, 1, -1], "two")):
                    sides = {"x": y, "y": x, "orientation": "h"} if horizontal else {"x": x, "y": y}
                    fig.add_bar(**sides, name=name, marker=BLUE, opacity=0.5)
                pictures.add(fig.png())
    assert len(pictures) == 12


def test_png_draws_annotations():
    fig = line()
    pictures = {fig.png()}
    for x, y, refs in ((0.5, 0.5, {}), (0.5, 0.9, {"xref": "paper", "yref": "paper"}), (0.2, 1.0, {"yref": "paper"})):
        pictures.add(fig.add_annotation(x=x, y=y, text="half<br>way", showarrow=False, **refs).png())
    assert len(pictures) == 4


@pytest.mark.parametrize("yref", ["y", "y domain"])
def test_png_draws_the_outline_of_a_rectangle(yref):
    def orange(**outline):
        at = {"x0": 0.2, "x1": 0.8, "y0": 0.2, "y1": 0.8, "yref": yref, "fillcolor": "rgba(0,158,115,0.14)"}
        image = pixels(line().add_shape(type="rect", **at, **outline))
        near = np.abs(image[..., :3] - np.array([0xD5, 0x5E, 0x00]) / 255).max(axis=-1) < 0.05
        return int((near & (image[..., 3] > 0.5)).sum())

    assert orange() == orange(line={"width": 0, "color": "#D55E00"}) == 0
    assert orange(line={"width": 1, "color": "#D55E00"}) > 300


def test_png_has_the_ticks_of_the_figure(canvases):
    line().update_xaxes(dtick=0.25).png()
    line().update_xaxes(tickvals=[0, 1], ticktext=["no", "yes"]).png()
    hk.plots.lines(pd.DataFrame({"a": [1.0, 2.0]}, index=["right", "wrong"]), title="T", x="answers", y="cosine").png()
    steps, texts, categories = (canvas.axes[0] for canvas in canvases)
    assert set(np.diff(steps.get_xticks())) == {0.25}
    assert [label.get_text() for label in texts.get_xticklabels()] == ["no", "yes"]
    assert [label.get_text() for label in categories.get_xticklabels()] == ["right", "wrong"]


def test_png_shows_text_literally(canvases):
    """Entities are characters, dollar signs are no formulas, and names that begin with _ are in the legend."""
    fig = figure(hk.plots.plain('<b> $x$ "q" %{y} \\frac{$'), "_x", "$y$")
    fig.add_scatter(x=[0], y=[0], mode="lines", name=hk.plots.plain("_$a$"), showlegend=True, line=BLUE).png()
    (canvas,) = canvases
    assert canvas.get_suptitle() == r'<b> \$x\$ "q" %{y} \frac{\$'
    assert [text.get_text() for text in canvas.legends[0].get_texts()] == [r" _\$a\$"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["<b>x</b>", "$a$", "_hidden", "y" * 100, "long " * 20])
def test_png_has_space_for_long_names(name, canvases):
    capability = hk.Capability().with_step({name: 0.5, "B": 0.25})
    for fig in (hk.plots.capability_matrix(capability), hk.plots.capability_ratios(capability)):
        fig.png()
        assert canvases[-1].axes[0].get_position().width > 0.3
