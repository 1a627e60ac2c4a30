"""Kinds of answers that are recognised from their text: rational numbers, numerals with a base, lists and words."""

from __future__ import annotations

import re
from fractions import Fraction

from hacpo_kit.tasks.boxes import integer
from hacpo_kit.tasks.cleaning import TEXT_COMMAND, squeeze

DIGITS = r"\d{1,400}"  # Python does not convert far longer ones
_RATIONAL = re.compile(rf"-?{DIGITS}/{DIGITS}|-?\d{{0,400}}\.?{DIGITS}")
_FRACTION = re.compile(rf"(?P<sign>-?)\\frac\{{(?P<top>-?{DIGITS})\}}\{{(?P<bottom>{DIGITS})\}}")
_BASES = "two|three|four|five|six|seven|eight|nine|ten"
_BASED = re.compile(
    rf"\(?(?:{TEXT_COMMAND}\{{)?([\dA-F]+)\}}?\)?_\{{?(?:{TEXT_COMMAND}\s*\{{)?\s*(\d{{1,2}}|{_BASES})\s*\}}{{0,2}}"
)
_CLOCK = re.compile(r"(\d{1,2})(?: ?: ?(\d{2}(?: ?: ?\d{2})?))? ?(?:([ap])\.? ?m\.?)?", re.IGNORECASE)
_OPTION = re.compile(
    rf"(?:{TEXT_COMMAND}\s*\{{\s*)?(?P<open>\()?\s*(?P<letter>[A-J])\s*(?P<close>[).:])?\s*\}}?\s*(?P<close2>[).:])?\s*(?P<text>.*)",
    re.DOTALL,
)

_LIST_TOKEN = re.compile(r"\\[\{\}]|\\.|[()\[\]{},;=]", re.DOTALL)
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
    if not match:
        return None
    return match[1], match[2] if match[2].isdigit() else str(2 + _BASES.split("|").index(match[2]))


def clock(text: str) -> tuple[str, str, str] | None:
    r"""Return hour, minutes and half of the day ("a", "p" or "") of a time such as 4:30 or 9 am; None for other text.

    >>> clock("4:30"), clock(r"9\text{ a.m.}"), clock("2:3"), clock("9")
    (('4', '30', ''), ('9', '00', 'a'), None, None)
    """
    plain = re.sub(rf"{TEXT_COMMAND}\s*\{{([^{{}}]*)\}}", r" \1", text)
    match = _CLOCK.fullmatch(" ".join(plain.split()))
    if not match or not (match[2] or match[3]) or int(match[1]) > 24:
        return None
    return match[1].lstrip("0") or "0", (match[2] or "00").replace(" ", ""), (match[3] or "").lower()


def option(text: str, with_text: bool = False) -> str | None:
    r"""Return the letter of an option such as `B`, `(B)` or \text{B}; with_text: also of `(B) 5` and `B. 12`.

    >>> option("(B)"), option(r"\textbf{(B) }5"), option(r"\textbf{(B) }5", with_text=True), option("B + 1", with_text=True)
    ('B', None, 'B', None)
    """
    match = _OPTION.fullmatch(text)
    if not match:
        return None
    closed = match["close"] or match["close2"]
    alone = not match["text"] or match["text"] == "}"
    return (
        match["letter"] if (alone and (closed or not match["open"])) or (with_text and closed and not alone) else None
    )


def list_elements(text: str) -> tuple[str, list[str]] | None:
    """Return brackets ("", "()", "[]" or "{}") and elements of a list of at least two, or None for another text."""
    if integer(text) is not None:
        return None
    elements = split_outside(text)
    if len(elements) > 1 or (r"\pm" in text and text[:1] not in ("(", "[") and not text.startswith((r"\{", "{"))):
        elements = _both_signs(elements)
        return ("", elements) if len(elements) > 1 else None
    for opening, closing in (("(", ")"), ("[", "]"), (r"\{", r"\}"), ("{", "}")):
        if text.startswith(opening) and text.endswith(closing):
            inner = split_outside(text[len(opening) : len(text) - len(closing)])
            inner = _both_signs(inner) if closing.endswith("}") else inner
            # the outer brackets of (1,2)+(3,4) do not belong together: then the parts inside are not balanced
            if len(inner) > 1 and all(_balanced(part) for part in inner):
                return opening[-1] + closing[-1], inner
            return None
    return None


def _both_signs(elements: list[str]) -> list[str]:
    r"""Return the elements of a list, with two elements for one that contains \pm."""
    found = []
    for element in elements:
        before, sign, after = element.partition(r"\pm")
        if not sign or r"\pm" in after or r"\mp" in element:
            found.append(element)
        else:
            plus = "" if re.search(r"(^|[=({])\s*$", before) else "+"
            found += [before + plus + after, before + "-" + after]
    return found


def split_outside(text: str, separators: str = ",;") -> list[str]:
    """Return the parts between the separators that are outside all brackets."""
    parts, depth, start = [], 0, 0
    for token in _LIST_TOKEN.finditer(text):
        depth += _BRACKETS.get(token.group(), 0)
        if token.group() in separators and depth == 0:
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


def long_words(text: str) -> list[str]:
    """Return the words of at least four letters outside commands, in lower case; no product of variables is that long."""
    letters = re.sub(r"\\(?:begin|end)\s*\{\w+\}|\\[A-Za-z]+", " ", text)
    return re.findall(r"[a-z]{4,}", letters.casefold())


def word(text: str) -> tuple[str, bool] | None:
    r"""Return the word in `\text{...}` or in letters without markup, and whether it had the markup; None for other text.

    Upper and lower case differ for single letters only.
    """
    match = re.fullmatch(rf"{TEXT_COMMAND}\s*\{{([^{{}}]*)\}}", text)
    letters = re.sub(r"^\((\w+)\)$|^(\w)[).]$", r"\1\2", (match.group(1) if match else text).strip(" ."))
    if not _WORD.fullmatch(letters):
        return None
    letters = letters.strip()
    return (letters if len(letters) == 1 else " ".join(letters.casefold().split()), bool(match))
