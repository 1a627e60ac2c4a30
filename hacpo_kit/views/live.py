"""What interactive views share: a widget where somebody can move it, a static picture where nobody can; loads at once."""

from __future__ import annotations

import base64
from functools import cached_property
from typing import TYPE_CHECKING

from hacpo_kit.common.console import unattended

if TYPE_CHECKING:
    import ipywidgets

    from hacpo_kit.views.figure import Figure

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# While the widget is on the page, the picture that JupyterLab puts below it is not shown.
STYLE = """<style>
.jp-OutputArea-child:has(> .jp-OutputArea-output > .hacpo-live) + .jp-OutputArea-child:has(> .jp-RenderedImage) {
    display: none }
</style>"""


class Live:
    """An interactive view. Subclasses define `build` (its widget, made once, when first shown) and `figure`.

    In a live kernel it displays as its widget, followed by a picture that is hidden while the widget is there: what the
    saved notebook shows without its kernel, and as HTML. The two are outputs of their own, so that the picture can change
    without the widget being made anew under somebody's hands.
    Where nobody can click it displays as the picture and the table, and no widget is made: papermill and nbconvert would
    store the widget's whole library in the notebook.
    """

    def build(self) -> ipywidgets.Box:
        """The widget around this view."""
        raise NotImplementedError

    def figure(self) -> Figure:
        """The static figure of what is shown now."""
        raise NotImplementedError

    def html(self) -> str:
        """HTML below the figure where nobody can click, with every text in it escaped; none by default."""
        return ""

    @cached_property
    def widget(self) -> ipywidgets.Box:
        """The widget; the same one however often it is shown."""
        from ipywidgets import HTML

        made = self.build()
        made.children = (*made.children, HTML(STYLE, layout={"display": "none"}))
        return made.add_class("hacpo-live")

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        if unattended():
            display(self.figure())
            if table := self.html():
                display(HTML(table))
            return
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        display({"text/plain": "", WIDGET_VIEW: view}, raw=True)
        self._display_picture()

    def _display_picture(self, update: bool = False) -> None:
        """Puts the picture on the page; with `update`, in the place of the earlier one, wherever this view is shown.

        A tab that was loaded again no longer knows whose place that is: there the picture changes when the cell runs again.
        """
        from IPython.display import display

        figure = self.figure()
        told = f"{type(self).__name__}: {figure.layout.title.text}"
        bundle = {"text/plain": told, "image/png": base64.b64encode(figure.png()).decode()}
        display(bundle, raw=True, display_id=f"hacpo-{id(self):x}", update=update)


__all__ = ["Live"]
