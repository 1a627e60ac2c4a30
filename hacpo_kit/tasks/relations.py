"""Inequalities: chains such as 1 < x ≤ 2, conditions in a set {x | x > 2}, and the sets of their solutions."""

from __future__ import annotations

import re
from collections.abc import Callable

from hacpo_kit.tasks.expressions import parse
from hacpo_kit.tasks.notation import list_elements
from hacpo_kit.tasks.values import same_inequality

_SIGN = re.compile(r"(<|>|\\(?:le|ge|ne|lt|gt)(?![a-z]))")
_MEANING = {"<": "<", ">": ">", r"\lt": "<", r"\gt": ">", r"\le": "≤", r"\ge": "≥", r"\ne": "≠"}
_REVERSED = {">": "<", "≥": "≤", "≠": "≠"}
_BUILDER = re.compile(
    r"\\?\{\s*[A-Za-z]\s*(?:\\in\s*\\?(?:mathbb\s*)?\{?\s*[RQ]\s*\}?\s*)?(?:\\mid|\\vert|\||:)\s*(?P<condition>.+?)\s*\\?\}",
    re.DOTALL,
)

Chain = tuple[tuple[str, ...], tuple[str, ...]]  # terms and signs


def is_relation(text: str) -> bool:
    """Return whether a text has an inequality sign."""
    return bool(_SIGN.search(text))


def condition(text: str) -> str:
    r"""Return the condition of a set in builder notation, and any other text as it is.

    >>> condition(r"\{x \mid x > 2\}"), condition(r"\{1, 2\}")
    ('x > 2', '\\{1, 2\\}')
    """
    found = _BUILDER.fullmatch(text)
    return found["condition"] if found and is_relation(found["condition"]) else text


def chain(text: str) -> Chain | None:
    """Return terms and signs of a chain of inequalities, the smallest term first; None for other text.

    >>> chain("z > y > x"), chain(r"1 < x")
    ((('x', 'y', 'z'), ('<', '<')), (('1', 'x'), ('<',)))
    """
    if list_elements(text):
        return None
    parts = _SIGN.split(text)
    terms, signs = tuple(term.strip() for term in parts[::2]), tuple(_MEANING[sign] for sign in parts[1::2])
    if all(sign in _REVERSED for sign in signs):
        return terms[::-1], tuple(_REVERSED[sign] for sign in signs[::-1])
    return terms, signs


def same_chain(left: Chain | None, right: Chain | None, same: Callable[[str, str], bool]) -> bool | None:
    """Return True if two chains have equal terms and signs; None if that does not decide."""
    if left is None or right is None or left[1] != right[1]:
        return None
    pairs = zip(left[0], right[0], strict=True)
    return True if all(x and y and same(x, y) for x, y in pairs) else None


def solutions(left: str, right: str) -> bool:
    """Return whether two texts, of which at least one is an inequality, describe the same set of numbers."""
    sets = [_solution_set(text) for text in (left, right)]
    if all(found is not None for found in sets):
        return sets[0] == sets[1]
    # without a set only two inequalities can be equal: p ≤ q and q ≥ p
    if not (is_relation(left) and is_relation(right)):
        return False
    parsed = [parse(text) for text in (left, right)]
    return all(p is not None for p in parsed) and same_inequality(*parsed)


def _solution_set(text: str):
    """Return the real numbers that satisfy one or several inequalities, or the set that a text denotes; None for others."""
    from sympy import Complement, Interval, Reals, Set, Union

    if not is_relation(text):
        parsed = parse(re.split(r"\\in(?![a-z])", text)[-1].strip())
        return parsed if isinstance(parsed, Interval | Union | Complement) or parsed is Reals else None
    parts = list_elements(text)
    sets = [_solved(parse(part)) for part in (parts[1] if parts and not parts[0] else [text])]
    if any(found is None for found in sets):
        return None
    # "x < 1 or x > 2" has no common solutions, "x > 1 and x < 2" has
    common = sets[0].intersect(*sets[1:]) if len(sets) > 1 else sets[0]
    found = common if len(sets) == 1 or not common.is_empty else Union(*sets)
    return found if isinstance(found, Set) else None


def _solved(relation):
    """Return the real solutions of an inequality in one variable; None if there are more variables or no method."""
    from sympy import Ne, Reals, solveset
    from sympy.core.relational import Relational
    from sympy.logic.boolalg import Boolean

    try:
        (symbol,) = relation.free_symbols
        if isinstance(relation, Ne):
            return Reals - solveset(relation.lhs - relation.rhs, symbol, Reals)
        return relation.as_set() if isinstance(relation, Relational | Boolean) else None
    except (MemoryError, RecursionError):
        raise
    except Exception:  # several variables, or sympy has no method
        return None
