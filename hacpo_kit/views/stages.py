"""The picture of the four stages of a step."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.display import HTML

SVG = Path(__file__).with_name("stages.svg")


def stages(current: int | None = None) -> HTML:
    """Return the picture of the four stages of a step, with the current stage (1 to 4) marked.

    Raises ValueError for another number.
    """
    from IPython.display import HTML

    if current not in (None, 1, 2, 3, 4):
        raise ValueError(f"current={current!r}: the stages are 1 (rollout), 2 (reward), 3 (advantage) and 4 (update)")
    svg = SVG.read_text(encoding="utf-8").replace(f'id="stage-{current}"', f'id="stage-{current}" class="current"')
    data = base64.b64encode(svg.encode()).decode()
    alt = "The four stages of a step: ① rollout, ② reward, ③ advantage, ④ update"
    # JupyterLab displays an image in HTML, but no SVG output, in a notebook that was not run yet
    return HTML(f'<img alt="{alt}" style="max-width:100%" src="data:image/svg+xml;base64,{data}">')
