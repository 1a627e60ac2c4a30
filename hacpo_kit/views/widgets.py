"""The interactive views for notebooks."""

from hacpo_kit.common.console import unattended
from hacpo_kit.views.explorer import Explorer, explorer
from hacpo_kit.views.live import Live
from hacpo_kit.views.monitor import Monitor, monitor

__all__ = ["Explorer", "Live", "Monitor", "explorer", "monitor", "unattended"]  # the documentation lists these
