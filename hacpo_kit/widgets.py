"""The interactive views, for notebooks: `hk.widgets.explorer`."""

from hacpo_kit.explorer import Explorer, explorer
from hacpo_kit.live import Live, unattended

__all__ = ["Explorer", "Live", "explorer", "unattended"]
