"""Text of models, files and users in pages: it is displayed as text and never interpreted as markup."""

from __future__ import annotations

import html
import re
from typing import Any

LONGEST = 400  # characters that are shown of a text
# Control characters, characters that are invisible or change the direction of writing, and halves of surrogate pairs, which
# cannot be encoded. Line feed and tab stay.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def visible(text: Any, longest: int = LONGEST) -> str:
    """Return text with escape sequences for invisible characters; a text that was cut says how much is missing."""
    text = str(text)
    cut = f" … (+{len(text) - longest:,} characters)" if len(text) > longest else ""
    return _INVISIBLE.sub(lambda c: "\\" + f"U{ord(c[0]):08x}".replace("U0000", "u"), text[:longest]) + cut


def escaped(text: Any, longest: int = LONGEST) -> str:
    """Return text as HTML that displays it unchanged, with `visible` characters only."""
    return html.escape(visible(text, longest)).replace("$", "&#36;")


def plain(text: Any, longest: int = LONGEST) -> str:
    """Return text for plotly, which knows fewer HTML entities and reads `%{` as a placeholder."""
    return escaped(text, longest).replace("&quot;", "&#34;").replace("%{", "%&#123;")


def literal(markup: str) -> str:
    """Return HTML in which MathJax does not interpret `$…$`."""
    return f"<div class='tex2jax_ignore mathjax_ignore' style='overflow-x:auto'>{markup}</div>"
