"""Parts of widgets, for tests of the explorer and the monitor."""


def find(widget, css_class):
    """Return the part of a widget with this CSS class."""
    parts = [widget]
    for part in parts:
        if css_class in getattr(part, "_dom_classes", ()):
            return part
        parts += getattr(part, "children", ())
    raise AssertionError(f"no part has the class {css_class}")
