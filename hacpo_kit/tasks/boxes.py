r"""The last `\boxed{...}` of a response, and comparisons of answers as text; imports neither sympy nor math-verify."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_CHARS = 10_000  # longer answers are not read: parsing is superlinear, and no reference answer is nearly as long

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # a backslash takes the next character with it: \{ and \} are no braces
_INTEGER = re.compile(r"-?(?:\d+|[1-9]\d{0,2}(?:,\d{3})+)")
_LAYOUT = re.compile(r"\s|~|\\?\$|\\[!,;: ]|\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\displaystyle(?![a-zA-Z])")


def brace_depths(text: str, start: int = 0) -> Iterator[tuple[re.Match[str], int]]:
    """Yield each brace of the text from `start` on, with the nesting depth after it."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        yield brace, depth


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, or None if there is none, it is blank, or it is never closed.

    >>> last_box(r"First \boxed{5}. Wrong; it is \boxed{\frac{1}{2}}."), last_box(r"\boxed{5} or \boxed{7")
    ('\\frac{1}{2}', None)
    """
    boxes = [match.end() for match in _BOX.finditer(text)]
    if not boxes:
        return None
    for brace, depth in brace_depths(text, boxes[-1]):
        if depth < 0:
            content = text[boxes[-1] : brace.start()].strip()
            while (len(content) - len(content.rstrip("\\"))) % 2:  # "\ ", a space in LaTeX
                content = content[:-1].rstrip()
            return content or None
    # The response ends inside its last box, which would have replaced the earlier ones.
    return None


def reference_answer(gold: str) -> str:
    r"""Return the answer of a gold that may be a worked solution: the text after ####, or the last box.

    >>> reference_answer("7 + 2 = 9 #### 9"), reference_answer(r"Thus $x = \boxed{3}$."), reference_answer("x = 3")
    ('9', '3', 'x = 3')
    """
    if "####" in gold:
        return gold.rsplit("####", 1)[1].strip()
    return last_box(gold) or "" if _BOX.search(gold) else gold


def is_prose(gold: str) -> bool:
    """Return whether a gold is sentences, which no boxed answer equals: a worked solution without a marked answer."""
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", gold)
    return len(words) >= 12 and bool(re.search(r"[.!?]\s|\n", gold.strip()))


def integer(text: str) -> str | None:
    """Return the digits of an integer without leading zeros and thousands commas, or None for another text.

    The result is text, because int() does not read thousands of digits.

    >>> integer("-1,234"), integer("007"), integer("1,23"), integer("1/2")
    ('-1234', '7', None, None)
    """
    if not text.isascii() or not _INTEGER.fullmatch(text):
        return None
    digits = text.lstrip("-").replace(",", "").lstrip("0") or "0"
    return "-" + digits if text[0] == "-" and digits != "0" else digits


def same_text(answer: str | None, gold: str) -> bool:
    r"""Return whether two answers are the same text, apart from spacing, dollar signs and the size of fractions.

    This checks a verdict independently of the verifier, in time linear in the text.

    >>> same_text(r"\dfrac12 ", r"$\frac12$"), same_text("0.5", r"\frac12"), same_text(None, "5")
    (True, False, False)
    """
    if answer is None or len(answer) > MAX_CHARS or len(gold) > MAX_CHARS:
        return False
    left, right = (re.sub(r"\\[dt]frac", r"\\frac", _LAYOUT.sub("", text)).rstrip(".") for text in (answer, gold))
    return left == right != ""
