"""Comparison of two cleaned answers: rules for kinds of text first, then mathematics."""

from __future__ import annotations

import re
from fractions import Fraction

from hacpo_kit.tasks.boxes import integer
from hacpo_kit.tasks.cleaning import TEXT_COMMAND, squeeze
from hacpo_kit.tasks.expressions import explicit_latex, parse
from hacpo_kit.tasks.notation import based_numeral, list_elements, rational, without_name, word
from hacpo_kit.tasks.values import same_value

_PERCENT = re.compile(rf"(.*?)\s*(?:\\?%|(?:{TEXT_COMMAND}\s*\{{)?\s*(?:\\?%|percent)\s*\}}?)")
_SHORT_WORDS = {"yes", "no", "odd", "all", "one", "two", "six", "ten"}
# one letter other than those that the parser reads as numbers (e, i) or may read so (E, I)
_NAMED_VALUE = re.compile(r"(?:(?P<name>[a-df-hj-zA-DF-HJ-Z]) ?= ?)?(?P<value>.+)", re.DOTALL)


def same(answer: str, gold: str) -> bool:
    """Return whether two cleaned answers are the same; the first rule that applies decides."""
    if squeeze(answer) == squeeze(gold):
        return True
    for rule in (_numbers, _based_numerals, _percentages, _lists, _ellipses, _words, _quantities):
        verdict = rule(answer, gold)
        if verdict is not None:
            return verdict
    gold_value = parse(gold)
    answer_value = parse(answer) if gold_value is not None else None
    return answer_value is not None and same_value(answer_value, gold_value)


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


def _ellipses(answer: str, gold: str) -> bool | None:
    # math-verify drops the dots, and what they stand for cannot be computed: only equal text is correct
    return False if r"\ldots" in answer + gold else None


def _words(answer: str, gold: str) -> bool | None:
    # math-verify reads letters as a product, so that `evil` would equal `live`
    left, right = word(answer), word(gold)
    if left is None or right is None:
        marked = (left or right or ("", False))[1]
        return False if marked else None  # \text{even} is not a formula; letters without markup may be one
    if left[1] or right[1] or all(len(w) == 1 or len(w) > 3 or w in _SHORT_WORDS for w in (left[0], right[0])):
        return left[0] == right[0]
    return None


def _quantities(answer: str, gold: str) -> bool | None:
    # x = 1,005 and 72\text{ eggs} are numbers without name and unit
    left, right = (_NAMED_VALUE.fullmatch(explicit_latex(text) or "=") for text in (answer, gold))
    if left["name"] and right["name"] and left["name"] != right["name"]:
        return None
    return _numbers(left["value"], right["value"])
