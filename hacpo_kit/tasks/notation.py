"""Kinds of answers that are recognised from their text: rational numbers, numerals with a base, lists and words."""

from __future__ import annotations

import re
from fractions import Fraction

from hacpo_kit.tasks.boxes import integer
from hacpo_kit.tasks.cleaning import TEXT_COMMAND, squeeze

DIGITS = r"\d{1,400}"  # Python does not convert far longer ones
_RATIONAL = re.compile(rf"-?{DIGITS}/{DIGITS}|-?\d{{0,400}}\.?{DIGITS}")
_FRACTION = re.compile(rf"(?P<sign>-?)\\frac\{{(?P<top>-?{DIGITS})\}}\{{(?P<bottom>{DIGITS})\}}")
_BASED = re.compile(r"\(?([\d]+[\dA-F]*)\)?_\{?(?:\\text\s*\{)?\s*(\d{1,2})\s*\}{0,2}")

_LIST_TOKEN = re.compile(r"\\[\{\}]|\\.|[()\[\]{},;]", re.DOTALL)
_BRACKETS = {"(": 1, "[": 1, "{": 1, r"\{": 1, ")": -1, "]": -1, "}": -1, r"\}": -1}
_ASSIGNED = re.compile(r"(\\?[A-Za-z][^=<>,]{0,30}?)\s*=\s*([^=]+)")

_WORD = re.compile(r"[A-Za-z][A-Za-z' -]*")


def rational(text: str) -> Fraction | None:
    r"""Return the value of `3/4`, `-\frac{3}{4}`, `12` or `0.75`, or None for another text."""
    text, sign = squeeze(text), 1
    if fraction := _FRACTION.fullmatch(text):
        text, sign = f"{fraction['top']}/{fraction['bottom']}", -1 if fraction["sign"] else 1
    if not _RATIONAL.fullmatch(text):
        return None
    try:
        return sign * Fraction(text)
    except ZeroDivisionError:
        return None


def based_numeral(text: str) -> tuple[str, str] | None:
    """Return digits and base of a numeral such as 52_8, or None for another text."""
    match = _BASED.fullmatch(squeeze(text))
    return match and (match[1], match[2])


def list_elements(text: str) -> tuple[str, list[str]] | None:
    """Return brackets ("", "()", "[]" or "{}") and elements of a list of at least two, or None for another text."""
    if text.count(r"\pm") == 1 and r"\mp" not in text and len(_split(text)) == 1 and text[:1] not in ("(", "["):
        before, after = text.split(r"\pm")
        plus = "" if re.search(r"(^|[=({])\s*$", before) else "+"
        return "", [before + plus + after, before + "-" + after]
    if integer(text) is not None:
        return None
    elements = _split(text)
    if len(elements) > 1:
        return "", elements
    for opening, closing in (("(", ")"), ("[", "]"), (r"\{", r"\}"), ("{", "}")):
        if text.startswith(opening) and text.endswith(closing):
            inner = _split(text[len(opening) : len(text) - len(closing)])
            # the outer brackets of (1,2)+(3,4) do not belong together: then the parts inside are not balanced
            if len(inner) > 1 and all(_balanced(part) for part in inner):
                return opening[-1] + closing[-1], inner
            return None
    return None


def _split(text: str) -> list[str]:
    """Return the parts between the commas and semicolons that are outside all brackets."""
    parts, depth, start = [], 0, 0
    for token in _LIST_TOKEN.finditer(text):
        depth += _BRACKETS.get(token.group(), 0)
        if token.group() in (",", ";") and depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


def _balanced(text: str) -> bool:
    depth = 0
    for token in _LIST_TOKEN.finditer(text):
        depth += _BRACKETS.get(token.group(), 0)
        if depth < 0:
            return False
    return depth == 0


def without_name(elements: list[str]) -> tuple[str | None, list[str]]:
    """Return the common name of `n=2, 3, 4` or `x=1, x=2`, and the values; no name for other lists (`x=1, y=2`)."""
    matches = [_ASSIGNED.fullmatch(element) for element in elements]
    names = {squeeze(match.group(1)) for match in matches if match}
    if len(names) == 1 and matches[0] and (all(matches) or not any(matches[1:])):
        return names.pop(), [m.group(2) if m else e for m, e in zip(matches, elements, strict=True)]
    return None, elements


def word(text: str) -> tuple[str, bool] | None:
    r"""Return the word in `\text{...}` or in letters without markup, and whether it had the markup; None for other text.

    Upper and lower case differ for single letters only.
    """
    match = re.fullmatch(rf"{TEXT_COMMAND}\s*\{{([^{{}}]*)\}}", text)
    letters = re.sub(r"^\((\w)\)$|^(\w)[).]$", r"\1\2", (match.group(1) if match else text).strip(" ."))
    if not _WORD.fullmatch(letters):
        return None
    letters = letters.strip()
    return (letters if len(letters) == 1 else " ".join(letters.casefold().split()), bool(match))
