"""Decides whether a boxed answer equals the gold; runs alone, in a process that may be killed at any moment.

math-verify and its parser read the LaTeX and compare sets, intervals and inequalities. Departures from it:
- its signal-based time-outs are off: they fail outside the main thread, so `rewards.py` kills the whole process;
- only a box that can be read as a whole counts, where its fallback picks some number out of unreadable text;
- letters keep their case, so that π(R²−r²) is not 0; a unit is a word, where it takes `6m` for 6 metres;
- numbers are compared relative to their size, functions at sample points, where 1/2004! − 1/2006! rounds to 0;
- rules of our own come first: numerals with a base, percentages, lists, ellipses, words, mixed numbers.
This file imports neither torch nor the rest of the package, so that a worker starts fast and stays small.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import sys
from fractions import Fraction
from functools import lru_cache

try:
    import resource
except ImportError:  # not a POSIX system: no limits from inside; those that the parent sets still hold
    resource = None

MAX_CHARS = 10_000  # a longer "answer" is never read: parsing is superlinear and no gold comes near it
ADDRESS_SPACE = 4 * 2**30  # bytes; generous, the parent's limit on resident memory acts long before


# ---------------------------------------------------------------------------------------------- the box

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # a backslash takes the next character with it, so \{ and \} do not count


def last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, or None if there is none, it is blank, or it is never closed.

    >>> last_box(r"First \boxed{5}. Wrong; it is \boxed{\frac{1}{2}}."), last_box(r"\boxed{5} or \boxed{7")
    ('\\frac{1}{2}', None)
    """
    boxes = [match.end() for match in _BOX.finditer(text)]
    if not boxes:
        return None
    start, depth = boxes[-1], 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.start()].strip() or None
    # Cut off inside its last box. An earlier box is what the text was about to replace, so it is not paid instead.
    return None


# ---------------------------------------------------------------------------------------------- cleaning

_FULL_WIDTH = dict(zip("０１２３４５６７８９（），．：；＝＋－％", "0123456789(),.:;=+-%", strict=True))
_UNICODE = str.maketrans(
    _FULL_WIDTH
    | {"−": "-", "–": "-", "—": "-", "。": ".", "、": ",", "…": r"\ldots ", "²": "^2", "³": "^3", "\u00a0": " "}
    | {"π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "∅": r"\emptyset ", "×": r"\times ", "·": r"\cdot ", "÷": "/"}
    | {"≤": r"\le ", "≥": r"\ge ", "±": r"\pm ", "∪": r"\cup "}
)
_TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)"
_FUNCTIONS = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|ln|log|exp|pi|theta|alpha|beta|gamma|lambda|omega|phi|infty"
_CLEANING = [
    (re.compile(r"\\?\$|(?<!\\)\\[()\[\]]"), ""),  # dollars and math delimiters
    (re.compile(r"\\[lcd]?dots(?![a-zA-Z])|\.{3,}"), r"\\ldots "),
    (re.compile(r"(?<=\d)(?:,\\!\s*|\\[,!]|\{,\}|~)(?=\d{3}(?!\d))"), ""),  # typeset thousands: 10,\!080
    (re.compile(r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])|\\displaystyle"), " "),
    (re.compile(r"\\(?:left|right)\.|\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"(?<![\w\\])(?:np|numpy|math|sp|sympy)\.(?=[a-z])"), ""),
    (re.compile(r"(?<![\\A-Za-z])(?:infinity|oo)(?![A-Za-z])"), r"\\infty"),
    (re.compile(rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])"), r"\\\1"),  # pi/2 is not p·i/2
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(rf",?\s*(?:{_TEXT}\s*\{{\s*(?:and|or)\s*\}}|(?<![\\A-Za-z])(?:and|or)(?![A-Za-z]))\s*"), ","),
    (re.compile(r"(?<=\d)\.(?![\d.]|\s*\\overline)"), ""),  # 1./3, and a full stop after a number
    (re.compile(rf"^{_TEXT}\s*\{{([^{{}}]*\d[^{{}}]*)\}}$"), r"\1"),  # \text{5 cm} is no word
    (re.compile(r"_\{\\([A-Za-z]+)\s*\}"), r"_{\1}"),  # a name below a letter: m_{\max}
    (re.compile(r"\s+"), " "),
]


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """The same mathematics in fewer spellings: delimiters, spacing, sizes, typographic characters, final full stop."""
    text = text.translate(_UNICODE)
    for pattern, replacement in _CLEANING:
        text = pattern.sub(replacement, text)
    text = text.strip()
    if re.fullmatch(r"-?[1-9]\d{0,2}(?: \d{3})+", text):  # 10 080
        text = text.replace(" ", "")
    while text[-1:] in (".", ",", ";", ":", " ") and text:
        text = text[:-1]
    return text


def squeeze(text: str) -> str:
    """Without white space, but for that between two digits: `1 1/4` is not `11/4`."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


# ---------------------------------------------------------------------------------------------- comparing texts

_INTEGER = re.compile(r"-?(?:\d+|[1-9]\d{0,2}(?:,\d{3})+)")


def integer(text: str) -> str | None:
    """Canonical digits of a plain integer, with or without thousands commas; as text, so of any length.

    >>> integer("-1,234"), integer("007"), integer("1,23"), integer("1/2")
    ('-1234', '7', None, None)
    """
    if not text.isascii() or not _INTEGER.fullmatch(text):
        return None
    digits = text.lstrip("-").replace(",", "").lstrip("0") or "0"
    return "-" + digits if text[0] == "-" and digits != "0" else digits


_UNSEEN = re.compile(r"\s|~|\\?\$|\\[!,;: ]|\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\displaystyle(?![a-zA-Z])")


def same_text(answer: str | None, gold: str) -> bool:
    r"""Whether a boxed answer and a gold are the same text, apart from spacing, dollar signs and the size of fractions.

    A second opinion on a verdict: it knows no mathematics, so it cannot be fooled by any, and takes any text at once.

    >>> same_text(r"\dfrac12 ", r"$\frac12$"), same_text("0.5", r"\frac12"), same_text(None, "5")
    (True, False, False)
    """
    if answer is None or len(answer) > MAX_CHARS or len(gold) > MAX_CHARS:
        return False
    left, right = (
        _UNSEEN.sub("", text).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac") for text in (answer, gold)
    )
    return left.rstrip(".") == right.rstrip(".") != ""


def same(a: str, g: str) -> bool:
    """Whether the cleaned answer `a` is the cleaned gold `g`; the first rule that applies decides."""
    if squeeze(a) == squeeze(g):
        return True
    for rule in (_integers, _rationals, _based, _percent, _lists, _ellipsis, _words):
        verdict = rule(a, g)
        if verdict is not None:
            return verdict
    return _same_expression(a, g)


def _integers(a: str, g: str) -> bool | None:
    left, right = integer(a), integer(g)
    return None if left is None or right is None else left == right


_DIGITS = r"\d{1,400}"  # Python refuses to read far longer ones
_RATIONAL = [
    re.compile(rf"(?P<top>-?{_DIGITS})/(?P<bottom>{_DIGITS})"),
    re.compile(rf"(?P<sign>-?)\\frac\{{(?P<top>-?{_DIGITS})\}}\{{(?P<bottom>{_DIGITS})\}}"),
    re.compile(rf"(?P<decimal>-?\d{{0,400}}\.?{_DIGITS})"),
]


def _rational(text: str) -> Fraction | None:
    match = next((match for pattern in _RATIONAL if (match := pattern.fullmatch(squeeze(text)))), None)
    parts = match.groupdict() if match else {}
    if "decimal" in parts:
        return Fraction(parts["decimal"])
    if not parts or not int(parts["bottom"]):
        return None
    value = Fraction(int(parts["top"]), int(parts["bottom"]))
    return -value if parts.get("sign") else value


def _rationals(a: str, g: str) -> bool | None:
    # the commonest answers, in microseconds where sympy takes milliseconds, by the same measure as `_close`
    left, right = _rational(a), _rational(g)
    if left is None or right is None:
        return None
    near = Fraction(5, 10**6) * max(abs(left), abs(right))
    return left == right or ("." in a + g and abs(left - right) <= min(near, Fraction(1, 10**6)))


_BASED = re.compile(r"\(?([\d]+[\dA-F]*)\)?_\{?(?:\\text\s*\{)?\s*(\d{1,2})\s*\}{0,2}")


def _based(a: str, g: str) -> bool | None:
    # A gold 52_8 asks for a numeral: the digits must agree, and the base too where the answer names one. Where only
    # the answer names a base, it is that number, so 52_8 is 42 and not 52.
    left, right = _BASED.fullmatch(squeeze(a)), _BASED.fullmatch(squeeze(g))
    if right and left:
        return left.groups() == right.groups()
    if right:
        return squeeze(a) == right.group(1)
    if left:
        digits, base = left.group(1), int(left.group(2))
        try:
            return 2 <= base <= 36 and len(digits) < 1000 and same(str(int(digits, base)), g)
        except ValueError:  # a digit that the base does not have
            return False
    return None


def _percent(a: str, g: str) -> bool | None:
    # 28% is 0.28, and it also answers "how many per cent?", so it equals 28; a bare 28 is not 0.28.
    left, right = (re.fullmatch(rf"(.*?)\s*(?:\\?%|(?:{_TEXT}\s*\{{)?\s*(?:\\?%|percent)\s*\}}?)", t) for t in (a, g))
    if left and right:
        return same(left.group(1), right.group(1))
    if not left and not right:
        return None
    number, other = (left.group(1), g) if left else (right.group(1), a)
    return bool(number) and (same(number, other) or same(rf"\frac{{{number}}}{{100}}", other))


# ---- lists

_OPEN = re.compile(r"\\[\{\}]|\\.|[()\[\]{},;]", re.DOTALL)
_ASSIGNED = re.compile(r"(\\?[A-Za-z][^=<>,]{0,30}?)\s*=\s*([^=]+)")


def _split(text: str) -> list[str]:
    """The parts between the commas and semicolons that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for token in _OPEN.finditer(text):
        mark = token.group()
        if mark in ("(", "[", "{", r"\{"):
            depth += 1
        elif mark in (")", "]", "}", r"\}"):
            depth -= 1
        elif mark in (",", ";") and depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


def _parts(text: str) -> tuple[str, list[str]] | None:
    """Kind (`bare`, `()`, `[]`, `{}`) and elements of a list of at least two; None for anything else."""
    if text.count(r"\pm") == 1 and r"\mp" not in text and len(_split(text)) == 1 and text[:1] not in ("(", "["):
        before, after = text.split(r"\pm")
        plus = "" if re.search(r"(^|[=({])\s*$", before) else "+"
        return "bare", [before + plus + after, before + "-" + after]
    if integer(text) is not None:
        return None
    elements = _split(text)
    if len(elements) > 1:
        return "bare", elements
    for opening, closing in (("(", ")"), ("[", "]"), (r"\{", r"\}"), ("{", "}")):
        if text.startswith(opening) and text.endswith(closing):
            inner = _split(text[len(opening) : len(text) - len(closing)])
            # (1,2)+(3,4) begins and ends with brackets that do not belong together: then the inner split is uneven
            if len(inner) > 1 and all(_balanced(part) for part in inner):
                return opening[-1] + closing[-1], inner
            return None
    return None


def _balanced(text: str) -> bool:
    depth = 0
    for token in _OPEN.finditer(text):
        depth += {"(": 1, "[": 1, "{": 1, r"\{": 1, ")": -1, "]": -1, "}": -1, r"\}": -1}.get(token.group(), 0)
        if depth < 0:
            return False
    return depth == 0


def _unname(elements: list[str]) -> tuple[str | None, list[str]]:
    """`n=2, 3, 4` and `x=1, x=2` are lists of values of one name; `x=1, y=2` is left as it is."""
    matches = [_ASSIGNED.fullmatch(element) for element in elements]
    names = {squeeze(match.group(1)) for match in matches if match}
    if len(names) == 1 and matches[0] and (all(matches) or not any(matches[1:])):
        return names.pop(), [m.group(2) if m else e for m, e in zip(matches, elements, strict=True)]
    return None, elements


def _lists(a: str, g: str) -> bool | None:
    left, right = _parts(a), _parts(g)
    if left is None or right is None:
        return None  # a list may still equal one thing, an interval or a union
    (kind_a, elements_a), (kind_g, elements_g) = left, right
    if len(elements_a) != len(elements_g) or {kind_a, kind_g} in ({"()", "{}"}, {"[]", "{}"}):
        return False
    # two elements in square brackets are a closed interval
    if len(elements_a) == 2 and "[]" in (kind_a, kind_g) and kind_a != kind_g:
        return False
    (name_a, elements_a), (name_g, elements_g) = _unname(elements_a), _unname(elements_g)
    if name_a and name_g and name_a != name_g:
        return False
    named = [any("=" in element for element in elements) for elements in (elements_a, elements_g)]
    ordered = "()" in (kind_a, kind_g) or "[]" in (kind_a, kind_g) or r"\ldots" in a + g or named[0] != named[1]
    if ordered:
        return all(same(x, y) for x, y in zip(elements_a, elements_g, strict=True))
    rest = list(elements_a)
    for wanted in elements_g:
        found = next((i for i, element in enumerate(rest) if same(element, wanted)), None)
        if found is None:
            return False
        del rest[found]
    return True


def _ellipsis(a: str, g: str) -> bool | None:
    # What the dots stand for cannot be computed, and math-verify drops them: equal text or nothing (see `same`).
    return False if r"\ldots" in a + g else None


# ---- words

_WORD = re.compile(r"[A-Za-z][A-Za-z' -]*")
_SHORT = {"yes", "no", "odd", "all", "one", "two", "six", "ten", *map(chr, range(65, 91)), *map(chr, range(97, 123))}


def _word(text: str) -> tuple[str, bool] | None:
    r"""The word of a `\text{...}` or of bare letters, and whether it was marked as text; a letter keeps its case."""
    match = re.fullmatch(rf"{_TEXT}\s*\{{([^{{}}]*)\}}", text)
    word = re.sub(r"^\((\w)\)$|^(\w)[).]$", r"\1\2", (match.group(1) if match else text).strip(" ."))
    if not _WORD.fullmatch(word):
        return None
    word = word.strip()
    return (word if len(word) == 1 else " ".join(word.casefold().split()), bool(match))


def _words(a: str, g: str) -> bool | None:
    # math-verify reads bare letters as a product, so that `evil` would be `live`
    left, right = _word(a), _word(g)
    if left is None or right is None:
        marked = (left or right or ("", False))[1]
        return False if marked else None  # \text{even} is no formula, but bare letters beside a formula may be one
    if left[1] or right[1] or all(len(word) > 3 or word in _SHORT for word in (left[0], right[0])):
        return left[0] == right[0]
    return None


# ---------------------------------------------------------------------------------------------- reading mathematics

_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SHORT_UNITS = "cm|mm|km|kg|mg|ml|ft|in|lb|oz|hr|am|pm"
_UNITS = (
    # \text{ cm}^2 after anything with a number or a command in it; not \mathrm{e}, \mathrm{i}
    re.compile(
        r"(?P<head>.*[\d\\].*?)\s*\\(?:text|textrm|mathrm|mbox)\s*\{"
        r"\s*(?P<word>[A-Za-z]{2,}[A-Za-z ./^\d-]*|[b-df-hj-z](?:[ ./^-][A-Za-z ./^\d-]*)?)\}(?:\s*\^\s*\{?-?\d\}?)?"
    ),
    # bare words after a plain number only; one letter would be a variable
    re.compile(rf"(?P<head>-?[\d.,/]+) (?P<word>[A-Za-z]{{3,}}(?: [A-Za-z]+)*|{_SHORT_UNITS})(?:\s*\^\s*\{{?\d\}}?)?"),
)
_SCIENTIFIC = re.compile(r"(?<![\w.\\}])(\d+\.?\d*|\.\d+)[eE](\+?\d+|-\d+)(?![\w.])")
_MIXED = re.compile(
    rf"(-?)({_DIGITS}) ?(?:\\frac ?\{{({_DIGITS})\}} ?\{{({_DIGITS})\}}"
    rf"|\\frac ?(\d) ?(\d)|(?<= )({_DIGITS}) ?/ ?({_DIGITS}))"
)
_REPEATING = re.compile(rf"(-?)(\d{{0,400}})\.(\d{{0,400}})\\overline ?\{{({_DIGITS})\}}")


def _spell(text: str) -> str | None:
    """LaTeX that math-verify reads as it is meant; None if it has no one meaning."""
    while unit := next((match for pattern in _UNITS if (match := pattern.fullmatch(text))), None):
        scale = _SCALES.get(unit["word"].lower().split()[0])
        text = unit["head"] if scale is None else rf"{unit['head']} \cdot 10^{{{scale}}}"
    if mixed := _MIXED.fullmatch(text):
        sign, whole, *pairs = mixed.groups()
        top, bottom = next((t, b) for t, b in zip(pairs[::2], pairs[1::2], strict=True) if t)
        if int(top) < int(bottom):
            return rf"{sign}({whole}+\frac{{{top}}}{{{bottom}}})"
        # 4\frac{10}{3} is a product like 4\frac{\pi}{3}; `4 10/3` is neither that nor a mixed number
        return rf"{sign}{whole}\cdot\frac{{{top}}}{{{bottom}}}" if "frac" in text else None
    if repeating := _REPEATING.fullmatch(text):
        sign, whole, fixed, period = repeating.groups()
        nines = "9" * len(period) + "0" * len(fixed)
        return rf"{sign}\frac{{{int((whole or '0') + fixed + period) - int((whole or '0') + fixed)}}}{{{nines}}}"
    # half an equation, or two numbers side by side, which the parser would add; but \frac 5 9 and \log_2 8 are fine
    if re.search(r"=\s+=|=$", text) or re.search(r"(?<![_^\d])\d+\s+\d", re.sub(r"\\frac ?\d \d", "", text)):
        return None
    return _SCIENTIFIC.sub(r"(\1 \\cdot 10^{\2})", text)


@lru_cache(maxsize=4096)
def read(text: str):
    """The sympy object of a cleaned text, or None if it cannot be read as a whole or is undefined (0/0)."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify.grader import should_treat_as_complex
    from sympy import nan, zoo

    spelled = None if r"\ldots" in text else _spell(text)
    if not spelled:
        return None
    # as math_verify.parse does it, without its search for an answer in running text, its units and its lower case
    habits = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    try:
        latex = normalize_latex(spelled, habits)
        parsed = latex2sympy(
            latex,
            is_real=not should_treat_as_complex(latex),
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        return None if hasattr(parsed, "has") and parsed.has(nan, zoo) else parsed
    except MemoryError:
        raise
    except Exception:  # the parser raises many kinds of error; all mean that this is not mathematics it knows
        return None


# the letters that the parser reads as numbers (e, i) or may read so are no names
_NAMED = re.compile(r"(?:(?P<name>[a-df-hj-zA-DF-HJ-Z]) ?= ?)?(?P<value>.+)", re.DOTALL)


def _quantities(a: str, g: str) -> bool | None:
    # x = 1,005 and 72\text{ eggs} are plain numbers once name and unit are off: no parser, which takes milliseconds
    left, right = (_NAMED.fullmatch(_spell(text) or "=") for text in (a, g))
    if left["name"] and right["name"] and left["name"] != right["name"]:
        return None
    verdict = _integers(left["value"], right["value"])
    return _rationals(left["value"], right["value"]) if verdict is None else verdict


def _same_expression(a: str, g: str) -> bool:
    verdict = _quantities(a, g)
    if verdict is not None:
        return verdict
    gold = read(g)
    answer = read(a) if gold is not None else None
    return answer is not None and _same_value(answer, gold)


def _same_value(a, g) -> bool:
    from latex2sympy2_extended.logic import And
    from sympy import Eq, Expr, Interval, MatrixBase
    from sympy.core.function import AppliedUndef

    if isinstance(a, Eq) and isinstance(g, Eq):
        if str(a.lhs) == str(g.lhs):
            return _same_value(a.rhs, g.rhs)
        if not all(isinstance(side, Expr) for side in (*a.args, *g.args)):
            return False  # x ∈ [1, 2] is read as an equation, with a set on one side
        factor = _agree(a.lhs - a.rhs, g.lhs - g.rhs, up_to_a_factor=True)
        return factor or (_solvable(g) and _math_verify(a, g))
    if isinstance(a, Eq | And) and isinstance(g, Expr):
        return _last_side(a, g)
    if isinstance(g, Eq) and isinstance(a, Expr) and (g.lhs.is_Symbol or isinstance(g.lhs, AppliedUndef)):
        return _same_value(a, g.rhs)  # 5 answers x = 5, but not 2x + z = 5
    if isinstance(a, MatrixBase) and isinstance(g, MatrixBase):
        return a.shape == g.shape and all(_same_value(x, y) for x, y in zip(list(a), list(g), strict=True))
    if isinstance(a, Interval) and isinstance(g, Interval):
        closed = (a.left_open, a.right_open) == (g.left_open, g.right_open)
        return closed and _same_value(a.start, g.start) and _same_value(a.end, g.end)
    if isinstance(a, Expr) and isinstance(g, Expr):
        verdict = _agree(a, g)
        if verdict is not None:
            return verdict
    return _math_verify(a, g)


def _last_side(chain, g) -> bool:
    """y = 2x answers 2x, x + y = 2 + 3 = 5 answers 5, if the sides that are numbers agree: 7 = 5 does not answer 5."""
    from sympy import Eq

    links = [chain] if isinstance(chain, Eq) else list(chain._unsorted_args)
    if not all(isinstance(link, Eq) for link in links):
        return False
    first, *sides = [links[0].lhs, *(link.rhs for link in links)]
    if first.is_Add and first.free_symbols and sides[-1] == 0:  # an equation brought to the form ... = 0
        return False
    numbers = [side for side in [first, *sides[:-1]] if not side.free_symbols]
    return all(_same_value(side, g) for side in [*numbers, sides[-1]])


def _math_verify(a, g) -> bool:
    from math_verify import verify

    try:
        return bool(verify(g, a, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy cannot compare the two kinds of object, a matrix and a set for example: not equal
        return False


def _solvable(equation) -> bool:
    # math-verify compares lists of solutions, and two empty lists are equal: x²+1=0 would be x²+2=0
    from sympy import solve

    try:
        return bool(solve(equation, equation.free_symbols))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy has no method for it, so math-verify cannot have solved it either
        return False


# ---------------------------------------------------------------------------------------------- numeric equality


def _agree(a, g, up_to_a_factor: bool = False, imaginary: bool = False) -> bool | None:
    """Whether two expressions are the same number or real function; None if their values cannot tell.

    Functions are compared at fixed points of both signs, by relative size: 1/2004! is not 1/2006!, √(1/n) is 1/√n
    (both undefined for n < 0), |x| is not x.
    """
    from sympy import Float, I

    names = sorted({symbol.name for symbol in a.free_symbols | g.free_symbols})
    if (up_to_a_factor and not names) or any(side.is_Symbol and len(side.name) > 1 for side in (a, g)):
        return None  # a long symbol may be a word
    loose, complex_valued = a.has(Float) or g.has(Float), imaginary or a.has(I) or g.has(I)
    hits, factor = 0, None
    for trial in range(12 if names else 1):
        point = _point(names, trial, imaginary)
        x, y = _value(a, point), _value(g, point)
        if x is None or y is None:
            return None
        if not names and not (x.is_finite and y.is_finite):
            return x == y
        if not (x.is_finite and y.is_finite) or (names and not complex_valued and x.has(I) and y.has(I)):
            continue  # neither is defined here as a real function
        if up_to_a_factor:
            if not x or not y:
                continue
            factor = factor if factor is not None else x / y
            y = factor * y
        if not _close(x, y, loose, bool(names)):
            # i was read as a variable; it may be the imaginary unit
            return "i" in names and not imaginary and _agree(a, g, up_to_a_factor, imaginary=True) is True
        hits += 1
    if hits < (4 if names else 1):
        return None
    return True if names or loose else _exactly_equal(a, g)


def _point(names: list[str], trial: int, imaginary: bool) -> dict:
    """Fixed rational values by name; the first half of the trials is positive, where roots and logarithms are real."""
    from sympy import I, Rational

    draw = random.Random(trial)
    point = {name: Rational(draw.randint(30, 400), 97) * (1 if trial < 6 else draw.choice((-1, 1))) for name in names}
    return point | ({"i": I} if imaginary else {})


def _value(expression, point: dict):
    """The number that an expression is at a point, to 30 digits; None if it has none (an unknown function)."""
    try:
        value = expression.evalf(30, subs={symbol: point[symbol.name] for symbol in expression.free_symbols})
        return value if all(part.is_Number for part in value.as_real_imag()) else None
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return None


def _close(x, y, loose: bool, sampled: bool) -> bool:
    difference, scale = abs(x - y).evalf(30), max(abs(x).evalf(30), abs(y).evalf(30))
    if difference <= 1e-25 and not (x and y):  # a zero that is written as a difference of roots
        return True
    if difference <= scale * (1e-12 if sampled or loose else 1e-20):
        return True
    # A decimal stands for what it rounds: six digits must agree, counted both after the point and from the first one
    return bool(loose and difference <= scale * 5e-6 and (sampled or difference <= 1e-6))


def _exactly_equal(a, g) -> bool:
    # 30 digits cannot tell 2^100 from 2^100 + 1
    difference = (a - g).doit()
    return difference == 0 if difference.is_Rational else True


# ---------------------------------------------------------------------------------------------- with a tolerance

_TOLERANCE = re.compile(r"(?P<gold>.+) \(tolerance (?P<tolerance>\d*\.?\d+(?:[eE][-+]?\d{1,3})?)\)", re.DOTALL)


def _elements(text: str) -> list[str]:
    parts = _parts(text)
    return parts[1] if parts and parts[0] == "bare" else [text]


def _number(text: str) -> Fraction | None:
    """The real number that a text is, with or without a name before it (x = 2) and a unit behind it."""
    from sympy import Eq

    if (value := _rational(text)) is not None:
        return value
    parsed = read(text)
    parsed = parsed.rhs if isinstance(parsed, Eq) else parsed
    value = _value(parsed, {}) if parsed is not None and not getattr(parsed, "free_symbols", True) else None
    return Fraction(str(value)) if value is not None and value.is_real and value.is_finite else None


def _near(a: str, g: str, tolerance: Fraction) -> bool:
    """Every number of the gold is in the answer, to within the tolerance (absolute), and no other."""
    left, right = ([_number(part) for part in _elements(text)] for text in (a, g))
    if len(left) != len(right) or None in left:
        return False
    pairs = zip(sorted(left), sorted(right), strict=True)
    return all(abs(x - y) <= tolerance * Fraction(100001, 100000) for x, y in pairs)


# ---------------------------------------------------------------------------------------------- the verdict

_MISSING = {"None", "nan", "NaN", "null", "NaT", "<NA>"}  # how an empty cell of a table prints


def usable(gold: str) -> bool:
    r"""Whether an answer can be compared with this gold at all: mathematics that can be read, or words.

    >>> usable("5"), usable(r"\text{even}"), usable(""), usable("nan"), usable(r"\frac{1}{"), usable("1/0")
    (True, True, False, False, False, False)
    """
    if len(gold) > MAX_CHARS or gold.strip() in _MISSING or not _closed(gold):
        return False
    if near := _TOLERANCE.fullmatch(gold):
        return all(_number(part) is not None for part in _elements(clean(near["gold"])))
    return _usable(clean(gold))


def _closed(text: str) -> bool:
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth < 0:
            return False
    return depth == 0


def _usable(text: str) -> bool:
    if not text:
        return False
    if _rational(text) is not None or integer(text) is not None or _BASED.fullmatch(squeeze(text)) or _word(text):
        return True
    letters = re.sub(r"\\(?:begin|end)\s*\{\w+\}|\\[A-Za-z]+", " ", text)
    if r"\ldots" in text or re.search(r"[A-Za-z]{4,}", letters):  # dots and prose compare as text only
        return bool(re.search(r"\w", letters))
    if parts := _parts(text):
        return all(_usable(part) for part in parts[1])
    return read(re.sub(r"\s*\\?%$", "", text)) is not None


def compare(answer: str | None, gold: str) -> tuple[float | None, str]:
    r"""Reward and status of a boxed answer: 1.0 correct, 0.0 wrong or no_answer, None unscorable (the gold's fault).

    A gold such as `9.81 (tolerance 0.02)` takes every number that is at most so far from it.

    >>> compare(r"\dfrac{1}{2}", "0.5"), compare(None, "0.5"), compare("0.5", "")
    ((1.0, 'correct'), (0.0, 'no_answer'), (None, 'unscorable'))
    """
    if not usable(gold):
        return None, "unscorable"
    if answer is None or not answer.strip() or len(answer) > MAX_CHARS:
        return 0.0, "no_answer"
    if near := _TOLERANCE.fullmatch(gold):
        right = _near(clean(answer), clean(near["gold"]), Fraction(near["tolerance"]))
    else:
        right = same(clean(answer), clean(gold))
    return (1.0, "correct") if right else (0.0, "wrong")


# ---------------------------------------------------------------------------------------------- the worker


def _limit(seconds: float | None = None) -> None:
    """Bounds that the system keeps even when the parent is gone: memory once, processor time anew for each item."""
    if resource is None:
        return
    if seconds is None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        size = ADDRESS_SPACE if hard == resource.RLIM_INFINITY else min(ADDRESS_SPACE, hard)
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))
        return
    spent = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(spent.ru_utime + spent.ru_stime + seconds) + 10
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _answer(item: dict, say) -> None:
    """Work on one item; two messages, so that a hang can be laid to the gold or to the answer."""
    _limit(item["timeout"])
    fatal = False
    try:
        usable(item["gold"])
        say(id=item["id"], gold_read=True)
        reward, status = compare(item["answer"], item["gold"])
        detail = ""
    except Exception as fault:
        fatal = isinstance(fault, (MemoryError, RecursionError))
        reward, status, detail = None, "error", f"{type(fault).__name__}: {fault}"[:500]
    # what a fatal error leaves behind is anybody's guess: the parent then starts a fresh worker
    say(id=item["id"], reward=reward, status=status, detail=detail, fatal=fatal)


def main() -> None:
    """Read one JSON line per item on standard input, write JSON lines on standard output, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, which then decides about the worker
    pipe = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever a library prints goes to standard error and never between the answers
    sys.stdout = sys.stderr
    logging.disable(logging.CRITICAL)

    def say(**message) -> None:
        pipe.write(json.dumps(message) + "\n")  # ASCII: lone surrogates and control characters travel as escapes
        pipe.flush()

    try:
        # the parser builds its tables at the first use of each rule: part of the start, not of the first item's time
        compare(r"\frac{x+1}{2}", r"\frac{\sqrt{x}}{3}-2^{x}")
        _limit()
    except Exception as fault:
        say(id=0, broken=f"{type(fault).__name__}: {fault}")
        return
    say(id=0)
    for line in sys.stdin.buffer:
        _answer(json.loads(line), say)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script: a module beside it must not stand in for one that a library imports
    main()
