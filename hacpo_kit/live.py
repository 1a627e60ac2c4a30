"""What interactive views share: a widget where somebody can move it, a static picture where nobody can; loads at once."""

from __future__ import annotations

import base64
import contextlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ipywidgets

    from hacpo_kit.plots import Figure

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def unattended() -> bool:
    """True in a kernel whose client takes no input: papermill and nbconvert, where nobody can click and bars become text."""
    with contextlib.suppress(Exception):
        return not get_ipython().kernel._allow_stdin  # type: ignore[name-defined]
    return False


class Live:
    """An interactive view. Subclasses define `build` (its widget, made once, when first shown) and `figure`.

    In a live kernel it displays as its widget, with the picture beside it for an HTML export of the saved notebook.
    Where nobody can click it displays as the picture and the table, and no widget is made: papermill and nbconvert would
    store the widget's whole library in the notebook.
    """

    def build(self) -> ipywidgets.Widget:
        """The widget around this view."""
        raise NotImplementedError

    def figure(self) -> Figure:
        """The static figure of what is shown now."""
        raise NotImplementedError

    def html(self) -> str:
        """HTML below the figure where nobody can click, with every text in it escaped; none by default."""
        return ""

    @cached_property
    def widget(self) -> ipywidgets.Widget:
        """The widget; the same one however often it is shown."""
        return self.build()

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        if unattended():
            display(self.figure())
            if table := self.html():
                display(HTML(table))
        else:
            display(self._repr_mimebundle_(), raw=True)

    def _repr_mimebundle_(self, *_: Any, **__: Any) -> dict[str, Any]:
        figure = self.figure()
        return {
            "text/plain": f"{type(self).__name__}: {figure.layout.title.text}",
            # what nbconvert shows in the widget's place: it leaves out widgets whose state is not stored
            "image/png": base64.b64encode(figure.png()).decode(),
            WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id},
        }


__all__ = ["Live", "unattended"]
