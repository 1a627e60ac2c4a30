"""The picture of the four stages of a step."""

from __future__ import annotations

import base64
from pathlib import Path

SVG = Path(__file__).with_name("stages.svg")


class Picture:
    """An SVG image that a notebook displays."""

    def __init__(self, svg: str, alt: str):
        self.svg, self.alt = svg, alt

    def __repr__(self) -> str:
        return self.alt

    def _repr_html_(self) -> str:
        # JupyterLab displays images in HTML, but no SVG output, in notebooks that were not run yet
        data = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="{self.alt}" style="max-width:100%" src="data:image/svg+xml;base64,{data}">'


def stages(current: int | None = None) -> Picture:
    """Return the picture of the four stages of a step, with the current stage (1 to 4) marked.

    Raises ValueError for another number.
    """
    if current not in (None, 1, 2, 3, 4):
        raise ValueError(f"current={current!r}: the stages are 1 (rollout), 2 (reward), 3 (advantage) and 4 (update)")
    svg = SVG.read_text(encoding="utf-8").replace(f'id="stage-{current}"', f'id="stage-{current}" class="current"')
    mark = f"; current: stage {current}" if current else ""
    return Picture(svg, f"① rollout → ② reward → ③ advantage → ④ update{mark}")
