"""What the interactive views share: how a notebook displays them, and a plotly widget whose numbers change."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

import ipywidgets as w
import numpy as np
import plotly.graph_objects as go
from traitlets import observe

from hacpo_kit.common.console import unattended
from hacpo_kit.views.figure import Figure

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# while the widget is on the page, JupyterLab hides the picture below it
STYLE = """<style>
.jp-OutputArea-child:has(> .jp-OutputArea-output > .hacpo-live) + .jp-OutputArea-child:has(> .jp-RenderedImage) {
    display: none }
</style>"""


class Live:
    """An interactive view. A subclass defines `build`, which returns its widget, and `figure`.

    In a live kernel it displays its widget and a picture. The picture is hidden while the widget is on the page; a saved
    notebook shows it without a kernel, and so does HTML. They are two outputs, so the picture can change while the widget
    stays as it is.
    In an unattended kernel, such as papermill's, it displays the figure and `html` and makes no widget, because the
    notebook would store the whole widget library.
    """

    def build(self) -> w.Box:
        """Return the widget; called once, when the view is first displayed."""
        raise NotImplementedError

    def figure(self) -> Figure:
        """Return the static figure of what is shown now."""
        raise NotImplementedError

    def html(self) -> str:
        """Return the HTML below the static figure, with every text escaped."""
        return ""

    @cached_property
    def widget(self) -> w.Box:
        """The widget; every display shows the same one."""
        widget = self.build()
        widget.children = (*widget.children, w.HTML(STYLE, layout={"display": "none"}))
        return widget.add_class("hacpo-live")

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        if unattended():
            display(self.figure())
            if html := self.html():
                display(HTML(html))
            return
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        display({"text/plain": "", WIDGET_VIEW: view}, raw=True)
        self._display_picture()

    def _display_picture(self, update: bool = False) -> None:
        """Display the picture, or `update` the earlier one wherever this view is displayed.

        A page that was loaded again does not know the earlier one; there the picture changes when the cell runs again.
        """
        from IPython.display import display

        figure = self.figure()
        text = f"{type(self).__name__}: {figure.layout.title.text}"
        bundle = {"text/plain": text, "image/png": base64.b64encode(figure.png()).decode()}
        display(bundle, raw=True, display_id=f"hacpo-{id(self):x}", update=update)


class LiveFigure(go.FigureWidget):
    """A FigureWidget that fits its page, shows its current state in every page, and sends only what changed.

    plotly's own sends a page that is opened later the figure as it was made, draws the first page 700 pixels wide, and
    merges what a page computes about every trace into the figure while another thread may be changing it.
    """

    _CHANGING = ("x", "y", "mode", "customdata", "showlegend")  # properties of a trace that `send` compares
    _answered = -1  # the last edit that a page drew

    def __init__(self, figure: go.Figure, traces: Sequence[dict[str, Any]], layout: dict[str, Any]):
        super().__init__(figure)
        self._config = {"displaylogo": False, "responsive": True}
        self._sent = traces, layout  # as the page has them

    def send(self, traces: Sequence[dict[str, Any]], layout: dict[str, Any]) -> None:
        """Send what changed since the last call in one message, so that the page draws once.

        plotly compares too, but only after it has validated every property, which doubles the time of a move.
        """
        with self.batch_update():
            for trace, new, old in zip(self.data, traces, self._sent[0], strict=True):
                for key in self._CHANGING:
                    if not np.array_equal(new.get(key), old.get(key)):
                        trace[key] = new.get(key)
            for path, value in layout.items():
                if value != self._sent[1][path]:
                    self.layout[path] = value
        self._sent = traces, layout

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Return the state for a page: the current one, also for a new page."""
        state = super().get_state(key, drop_defaults)
        if key is None and {"_data", "_layout_obj"} <= vars(self).keys():  # not while the widget is made
            for name, value in (("_widget_data", self._data), ("_widget_layout", self._layout_obj._props)):
                if name in state:
                    state[name] = self.trait_metadata(name, "to_json")(deepcopy(value), self)
        return state

    @observe("_js2py_traceDeltas")
    def _handler_js2py_traceDeltas(self, change: dict[str, Any]) -> None:
        """Fit the figure to the page once a page has drawn it for the first time; nothing is merged."""
        if change["new"]:
            edit = change["new"]["trace_edit_id"]
            if edit == self._answered or self._answered < 0:
                self._send_relayout_msg({"autosize": True})
            self._answered = edit
            self._js2py_traceDeltas = None  # so that an equal answer is noticed
