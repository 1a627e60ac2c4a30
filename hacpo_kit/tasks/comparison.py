"""Comparison of two cleaned answers: a rule for each class of text first, then mathematics.

The class of the gold decides which answers can be equal to it: docs/how-to/rewards.md has the table.
"""

from __future__ import annotations

import re
from fractions import Fraction

from hacpo_kit.tasks.boxes import integer
from hacpo_kit.tasks.cleaning import TEXT_COMMAND, squeeze
from hacpo_kit.tasks.expressions import explicit_latex, parse
from hacpo_kit.tasks.notation import (
    based_numeral,
    clock,
    list_elements,
    long_words,
    option,
    rational,
    split_outside,
    without_name,
    word,
)
from hacpo_kit.tasks.relations import chain, condition, is_relation, same_chain, solutions
from hacpo_kit.tasks.units import same_units, split_unit
from hacpo_kit.tasks.values import same_function, same_value

_PERCENT = re.compile(rf"(.*?)\s*(?:\\?%|(?:{TEXT_COMMAND}\s*\{{)?\s*(?:\\?%|percent)\s*\}}?)")
_TEXT_ONLY = re.compile(r"\\ldots|\\(?:angle|triangle|overrightarrow|odot)(?![a-z])|[^\x00-\x7f]")
_SHORT_WORDS = {"yes", "no", "odd", "all", "one", "two", "six", "ten"}
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\([^()]*\))?\s*\^\s*\{?\s*\\circ\s*\}?")
_TRIGONOMETRIC = re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc)\s*\{?\(?\s*)(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?")
# What can stand before the "=" of an answer without being part of a computation: a name with index and arguments (f'(2),
# a_{10}), a norm, an operator with its operand (\det A), words
_NAME = (
    rf"(?:\\(?!pi(?![a-zA-Z])|infty)[A-Za-z]+|[A-DF-Za-df-hj-z]|[A-Z]{{1,4}}|{TEXT_COMMAND}\s*\{{[^{{}}]*\}}|\\mathbb\s*\{{?\w\}}?)"
    r"(?:_(?:\w|\{[^{}]*\}))?'*\s*(?:[(\[][^()\[\]=]*[)\]])?"
)
_OPERATOR = r"\\(?:det|dim|deg|min|max|sup|inf|gcd|lcm|lim|sum|prod|int|arg|Pr|angle|triangle|overline|vec)(?![A-Za-z])"
_LABEL = re.compile(
    rf"{_NAME}(?:\s*[-+]\s*{_NAME})*|{_OPERATOR}.*|\\?\|[^|=]*\\?\||\[[^\[\]=]*\]|\([A-Za-z][A-Za-z_\d{{}}, ]*\)"
)


def same(answer: str, gold: str) -> bool:
    """Return whether two cleaned answers are the same; the first rule that applies decides."""
    if squeeze(answer) == squeeze(gold):
        return True
    answer, gold = _in_radians(answer, gold)
    for rule in _RULES:
        verdict = rule(answer, gold)
        if verdict is not None:
            return verdict
    gold_value = parse(gold)
    answer_value = parse(answer) if gold_value is not None else None
    units = split_unit(answer)[1], split_unit(gold)[1]
    return answer_value is not None and same_units(*units) and same_value(answer_value, gold_value)


def _in_radians(answer: str, gold: str) -> tuple[str, str]:
    """Return both texts with degrees converted inside trigonometric functions, and where only one of them has degrees and
    the other has π; other degree signs are a unit and go."""
    if r"\circ" not in answer + gold:
        return answer, gold
    radians = [r"\pi" in other and r"\circ" not in other for other in (gold, answer)]
    texts = [_TRIGONOMETRIC.sub(r"\1{\\frac{\2\\pi}{180}}", text) for text in (answer, gold)]
    for i, text in enumerate(texts):
        unit = r"\\cdot\\frac{\\pi}{180}" if radians[i] else ""
        texts[i] = _DEGREES.sub(rf"\1{unit}", re.sub(r"(\\circ\s*\}?)\s*(?:\\text\s*\{\s*)?[CF]\s*\}?$", r"\1", text))
    return texts[0], texts[1]


# ── a rule for each class of text; None: the rule does not apply ─────────────────────────────────────────────────


def _numbers(answer: str, gold: str) -> bool | None:
    # the most frequent answers, in microseconds instead of sympy's milliseconds
    integers = integer(answer), integer(gold)
    if None not in integers:
        return integers[0] == integers[1]
    left, right = rational(answer), rational(gold)
    if left is None or right is None:
        return None
    # as in values.py: the first six digits, and six digits after the point
    tolerance = min(Fraction(5, 10**6) * max(abs(left), abs(right)), Fraction(1, 10**6))
    return left == right or ("." in answer + gold and abs(left - right) <= tolerance)


def _clock_times(answer: str, gold: str) -> bool | None:
    left, right = clock(answer), clock(gold)
    if not left and not right:
        return None
    # the half of the day may be missing only in the gold
    return bool(left and right) and left[:2] == right[:2] and right[2] in ("", left[2])


def _options(answer: str, gold: str) -> bool | None:
    right = option(gold)
    if right is None:
        return None
    left = option(answer, with_text=True)
    return None if left is None else left == right


def _based_numerals(answer: str, gold: str) -> bool | None:
    # The gold 52_8 requires its digits, and its base if the answer has one. If only the answer has a base, it stands for
    # a number: 52_8 is 42, not 52.
    left, right = based_numeral(answer), based_numeral(gold)
    if right:
        return left == right if left else squeeze(answer) == right[0]
    if left:
        digits, base = left[0], int(left[1])
        try:
            return 2 <= base <= 36 and len(digits) < 1000 and same(str(int(digits, base)), gold)
        except ValueError:  # a digit that the base does not have
            return False
    return None


def _percentages(answer: str, gold: str) -> bool | None:
    # 28% equals 0.28; it also equals 28, the answer to "how many per cent?"; but 28 does not equal 0.28
    left, right = _PERCENT.fullmatch(answer), _PERCENT.fullmatch(gold)
    if left and right:
        return same(left[1], right[1])
    if not left and not right:
        return None
    number, other = (left[1], gold) if left else (right[1], answer)
    return bool(number) and (same(number, other) or same(rf"\frac{{{number}}}{{100}}", other))


def _remainders(answer: str, gold: str) -> bool | None:
    # 3 (mod 7) is the answer 3, but not to a gold with another modulus
    found = re.fullmatch(r"(-?\d+)\s*\(?\\[pb]?mod\b.*", answer)
    return same(found[1], gold) if found and "mod" not in gold else None


def _labels(answer: str, gold: str) -> bool | None:
    # f(2) = 5 is the answer 5, and 2 + 3 = 5 too; x + 2 = 5 is not
    left, right = _sides(answer), _sides(gold)
    names, values = (list_elements(side) for side in left) if len(left) == 2 else (None, None)
    if names and values and len(names[1]) == len(values[1]) and "=" in gold and len(right) == 1:  # (a, b) = (3, 1)
        return same(", ".join(map("=".join, zip(names[1], values[1], strict=True))), gold)
    if len(left) > 1 and len(right) == 1:
        return _ends_with(left, gold)
    if len(right) == 2 and len(left) == 1:
        return same(answer, right[1]) if _LABEL.fullmatch(right[0]) else None
    if len(left) == len(right) == 2 and all(_LABEL.fullmatch(side[0]) for side in (left, right)):
        if squeeze(left[0]) == squeeze(right[0]):
            return same(left[1], right[1])
        return same_function(left, right)
    return None


def _sides(text: str) -> list[str]:
    """Return the sides of an equation or of a chain of equations; a list or an inequality is one side."""
    sides = split_outside(text, "=")
    if len(sides) == 2 and integer(split_unit(sides[1])[0]) is not None:
        return sides  # x = 1,234 is no list
    return [text] if is_relation(text) or list_elements(text) else sides


def _ends_with(sides: list[str], gold: str) -> bool | None:
    """Return whether the sides of an answer are names, or equal to the gold, and one of the outer ones is the gold."""
    if not all(sides):
        return False
    if len(sides) == 2 and not _LABEL.fullmatch(sides[0]) and _LABEL.fullmatch(sides[1]):
        sides = sides[::-1]  # 5 = x
    return same(sides[-1], gold) and all(_LABEL.fullmatch(side) or same(side, gold) for side in sides[:-1])


def _relations(answer: str, gold: str) -> bool | None:
    # an inequality equals an inequality or a set of numbers that is no list of points
    left, right = condition(answer), condition(gold)
    is_left, is_right = is_relation(left), is_relation(right)
    if not is_left and not is_right:
        return None if (left, right) == (answer, gold) else same(left, right)
    if is_left and is_right:
        verdict = same_chain(chain(left), chain(right), same)
        if verdict is not None:
            return verdict
    return solutions(left, right)


def _lists(answer: str, gold: str) -> bool | None:
    left, right = list_elements(answer), list_elements(gold)
    if left is None or right is None:
        return None  # a list may still equal an interval or a union
    brackets, elements = {left[0], right[0]}, [left[1], right[1]]
    count = len(elements[0])
    if count != len(elements[1]) or brackets in ({"()", "{}"}, {"[]", "{}"}):
        return False
    if count == 2 and "[]" in brackets and len(brackets) == 2:  # two elements in square brackets are a closed interval
        return False
    (left_name, left), (right_name, right) = (without_name(side) for side in elements)
    if left_name and right_name and left_name != right_name:
        return False
    named = [any("=" in element for element in side) for side in (left, right)]
    if brackets & {"()", "[]"} or r"\ldots" in answer + gold or named[0] != named[1]:
        return all(same(x, y) for x, y in zip(left, right, strict=True))
    rest = list(left)
    for element in right:  # in any order
        found = next((i for i, candidate in enumerate(rest) if same(candidate, element)), None)
        if found is None:
            return False
        del rest[found]
    return True


def _texts_only(answer: str, gold: str) -> bool | None:
    # The parser drops the dots of an ellipsis, and reads \angle ABC and June 20 as products: only equal text is correct
    if _TEXT_ONLY.search(answer) or _TEXT_ONLY.search(gold):
        return False
    return None if set(long_words(split_unit(gold)[0])) <= set(long_words(answer)) else False


def _words(answer: str, gold: str) -> bool | None:
    # math-verify reads letters as a product, so that `evil` would equal `live`
    left, right = word(answer), word(gold)
    if left is None or right is None:
        marked = (left or right or ("", False))[1]
        return False if marked else None  # \text{even} is not a formula; letters without markup may be one
    if left[1] or right[1] or all(len(w) == 1 or len(w) > 2 or w in _SHORT_WORDS for w in (left[0], right[0])):
        return left[0] == right[0]
    return None


def _quantities(answer: str, gold: str) -> bool | None:
    # 72\text{ eggs} is a number without its unit
    (left, left_unit), (right, right_unit) = split_unit(answer), split_unit(gold)
    if not left_unit and not right_unit:
        return None
    verdict = _numbers(explicit_latex(left) or "", explicit_latex(right) or "")
    return verdict and same_units(left_unit, right_unit)


_RULES = (
    _numbers, _clock_times, _options, _based_numerals, _percentages, _remainders, _relations, _labels, _lists, _quantities,
    _texts_only, _words,
)  # fmt: skip
