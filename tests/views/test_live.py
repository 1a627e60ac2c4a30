"""What a notebook gets from an interactive view: a widget with a picture below it, or the picture alone."""

import base64
import json
from types import SimpleNamespace

import ipywidgets
import nbformat
import pytest
from nbconvert import HTMLExporter

from hacpo_kit.views import live
from hacpo_kit.views.live import WIDGET_VIEW, Live
from hacpo_kit.views.plots import figure


class View(Live):
    def build(self):
        return ipywidgets.VBox()

    def figure(self):
        return figure("a title", "x", "y").add_scatter(x=[1, 2], y=[1, 2], mode="lines")

    def html(self):
        return "<table></table>"


@pytest.fixture
def shown(monkeypatch):
    """The arguments of every display."""
    calls = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, **options: calls.append(SimpleNamespace(data=data, **options))
    )
    return calls


def test_live_displays_a_widget_and_its_picture(shown):
    view = View()
    view._ipython_display_()
    view._display_picture(update=True)
    widget, picture, again = shown
    assert widget.data[WIDGET_VIEW]["model_id"] == view.widget.model_id
    assert base64.b64decode(picture.data["image/png"])[:4] == b"\x89PNG" and "a title" in picture.data["text/plain"]
    assert (
        again.display_id == picture.display_id and again.update
    )  # in the same place; the widget is not displayed again
    # a notebook saved without widget state, exported as HTML
    stored = [nbformat.v4.new_output("display_data", data=x.data) for x in (widget, picture)]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("view", outputs=stored)])
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert page.count(picture.data["image/png"][:200]) == 1 and view.widget.model_id not in page


def test_live_makes_no_widget_in_an_unattended_kernel(shown, monkeypatch):
    monkeypatch.setattr(live, "unattended", lambda: True)
    view = View()
    view._ipython_display_()
    assert "widget" not in vars(view)
    picture, table = (x.data for x in shown)
    assert set(picture._repr_mimebundle_()) == {"text/plain", "image/png", "application/vnd.plotly.v1+json"}
    json.dumps(picture._repr_mimebundle_())
    assert "<table" in table.data
