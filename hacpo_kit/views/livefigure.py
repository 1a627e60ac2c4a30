"""A plotly widget for figures that change while somebody looks: it fits its page, and pages opened later see it as it is."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import plotly.graph_objects as go
from traitlets import observe


class LiveFigure(go.FigureWidget):
    """A FigureWidget without three of its habits.

    A page opened later would be sent the figure as it was when it was made. The first page would draw it 700 pixels wide,
    since it is not attached yet. And what the page works out about every trace would be merged into the figure, by the
    kernel's main thread, while another thread may be changing it.
    """

    sent: tuple[Sequence[dict[str, Any]], dict[str, Any]] = ((), {})  # traces and layout as the page has them
    _answered = -1  # the newest edit that a page has drawn

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._config = {"displaylogo": False, "responsive": True}

    def send(self, traces: Sequence[dict[str, Any]], layout: dict[str, Any]) -> None:
        """Send what changed since the last call, in one message, so that the page draws once.

        plotly's batch_update validates and compares every property again, which doubles the time of a move.
        """
        old_traces, old_layout = self.sent
        changed = [
            {key for key, value in new.items() if not np.array_equal(value, old.get(key))}
            for new, old in zip(traces, old_traces, strict=True)
        ]
        rows = [i for i, keys in enumerate(changed) if keys]
        restyle = {key: [traces[i].get(key) for i in rows] for key in sorted(set().union(*changed))}
        relayout = {path: value for path, value in layout.items() if value != old_layout[path]}
        if rows or relayout:
            self.plotly_update(restyle, relayout, rows)
        self.sent = traces, layout

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """The state for a page; all of it for a new one."""
        state = super().get_state(key, drop_defaults)
        if key is None and {"_data", "_layout_obj"} <= vars(self).keys():  # not while it is being made
            for name, now in (("_widget_data", self._data), ("_widget_layout", self._layout_obj._props)):
                if name in state:
                    state[name] = self.trait_metadata(name, "to_json")(deepcopy(now), self)
        return state

    @observe("_js2py_traceDeltas")
    def _handler_js2py_traceDeltas(self, change: dict[str, Any]) -> None:
        """A page has drawn: an edit, or, if there was none since the last answer, the whole for the first time."""
        if change["new"]:
            edit = change["new"]["trace_edit_id"]
            if edit == self._answered or self._answered < 0:
                self._send_relayout_msg({"autosize": True})
            self._answered = edit
            self._js2py_traceDeltas = None  # so that the same answer again is seen


__all__ = ["LiveFigure"]
