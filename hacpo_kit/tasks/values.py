"""Comparison of two sympy objects: numbers and functions by their values, other objects by their parts.

math-verify compares the remaining kinds (sets, inequalities). Numbers are compared relative to their size and functions at
sample points, because math-verify rounds 1/2004! − 1/2006! to 0.
"""

from __future__ import annotations

import random
import re

from hacpo_kit.tasks.expressions import parse


def same_value(answer, gold) -> bool:
    """Return whether two parsed answers are the same mathematical object."""
    from sympy import Eq, Expr, Interval, MatrixBase

    if isinstance(answer, Eq) and isinstance(gold, Eq):
        return _same_equation(answer, gold)
    if isinstance(answer, MatrixBase) and isinstance(gold, MatrixBase):
        return answer.shape == gold.shape and all(
            same_value(x, y) for x, y in zip(list(answer), list(gold), strict=True)
        )
    if isinstance(answer, Interval) and isinstance(gold, Interval):
        closed = (answer.left_open, answer.right_open) == (gold.left_open, gold.right_open)
        return closed and same_value(answer.start, gold.start) and same_value(answer.end, gold.end)
    if isinstance(answer, Expr) and isinstance(gold, Expr):
        verdict = _same_values(answer, gold)
        if verdict is not None:
            return verdict
    return _math_verify(answer, gold)


def _same_equation(answer, gold) -> bool:
    from sympy import Expr

    if str(answer.lhs) == str(gold.lhs):
        return same_value(answer.rhs, gold.rhs)
    if not all(isinstance(side, Expr) for side in (*answer.args, *gold.args)):
        return False  # the parser reads x ∈ [1, 2] as an equation with a set on one side
    same = _same_values(answer.lhs - answer.rhs, gold.lhs - gold.rhs, up_to_a_factor=True)
    return same or (_solvable(gold) and _math_verify(answer, gold))


def same_function(answer: list[str], gold: list[str]) -> bool | None:
    """Return whether two definitions, given as two sides, are the same function of any variable: f(t) = t² is f(x) = x²."""
    from sympy import Symbol

    left, right = (re.fullmatch(r"(\\?[A-Za-z]+)\s*\(\s*([A-Za-z])\s*\)", sides[0]) for sides in (answer, gold))
    if not left or not right or left[1] != right[1]:
        return None
    values = [parse(sides[1]) for sides in (answer, gold)]
    if any(value is None for value in values):
        return False
    variable = {s: Symbol(right[2], real=s.is_real) for s in values[0].free_symbols if s.name == left[2]}
    renamed = values[0].xreplace(variable)
    return same_value(renamed, values[1])


def same_inequality(answer, gold) -> bool:
    """Return whether two inequalities are the same up to a positive factor."""
    from sympy.core.relational import Relational

    if not (isinstance(answer, Relational) and isinstance(gold, Relational)):
        return _math_verify(answer, gold)
    answer, gold = (r.reversed if r.rel_op in (">", ">=") else r for r in (answer, gold))
    factor = ((answer.lhs - answer.rhs) / (gold.lhs - gold.rhs)).simplify()
    return answer.rel_op == gold.rel_op and bool(factor.is_number and factor.is_positive)


def _math_verify(answer, gold) -> bool:
    from math_verify import verify

    try:
        # without time limits, whose signals fail outside the main thread: the parent process ends this one instead
        return bool(verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy cannot compare the two kinds of object, for example a matrix and a set: not equal
        return False


def _solvable(equation) -> bool:
    # math-verify compares lists of solutions, and two empty lists are equal: x²+1=0 would equal x²+2=0
    from sympy import solve

    try:
        return bool(solve(equation, equation.free_symbols))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy has no method for this equation, so math-verify cannot solve it either
        return False


def _same_values(answer, gold, up_to_a_factor: bool = False, points: str = "real") -> bool | None:
    """Return whether two expressions are the same number or real function; None if their values do not decide.

    Functions are compared at fixed points of both signs and at integers, relative to their size: 1/2004! is not 1/2006!,
    √(1/n) is 1/√n (both undefined for n < 0), |x| is not x, ⌊x⌋ is not ⌈x⌉ − 1. `points`: "real", "integer", or "imaginary",
    where i is the imaginary unit and not a variable.
    """
    from sympy import Float, I

    names = sorted({symbol.name for symbol in answer.free_symbols | gold.free_symbols})
    if (up_to_a_factor and not names) or any(side.is_Symbol and len(side.name) > 1 for side in (answer, gold)):
        return None  # a symbol of several letters may be a word
    decimal = answer.has(Float) or gold.has(Float)
    complex_valued = points == "imaginary" or answer.has(I) or gold.has(I)
    hits, factor = 0, None
    for trial in range(16 if names else 1):
        point = _point(names, trial, points)
        x, y = value_at(answer, point), value_at(gold, point)
        if x is None or y is None:
            return None
        if not names and not (x.is_finite and y.is_finite):
            return x == y
        if not (x.is_finite and y.is_finite) or (names and not complex_valued and x.has(I) and y.has(I)):
            continue  # both are undefined here as real functions
        if up_to_a_factor:
            if not x or not y:
                continue
            factor = factor if factor is not None else x / y
            y = factor * y
        if not _close(x, y, decimal, bool(names)):
            if points != "real":
                return False
            # (-1)^n is real for integers only
            if set(names) <= set("nmkN") and (x.has(I) or y.has(I)):
                return _same_values(answer, gold, up_to_a_factor, "integer") is True
            # i was read as a variable; it may be the imaginary unit
            return "i" in names and _same_values(answer, gold, up_to_a_factor, "imaginary") is True
        hits += 1
    if hits < (4 if names else 1):
        return None
    return True if names or decimal else _exactly_equal(answer, gold)


def _point(names: list[str], trial: int, points: str) -> dict:
    """Return fixed values by name: rational ones, in the first six trials positive, where roots are real, then integers."""
    from sympy import I, Rational

    draw, integral = random.Random(trial), trial >= 12 or points == "integer"
    point = {name: Rational(draw.randint(2, 12)) if integral else Rational(draw.randint(30, 400), 97) for name in names}
    if trial >= 6:
        point = {name: value * draw.choice((-1, 1)) for name, value in point.items()}
    return point | ({"i": I} if points == "imaginary" else {})


def value_at(expression, point: dict):
    """Return the value of an expression at a point to 30 digits, or None if it has none (an unknown function)."""
    try:
        value = expression.evalf(30, subs={symbol: point[symbol.name] for symbol in expression.free_symbols})
        return value if all(part.is_Number for part in value.as_real_imag()) else None
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return None


def _close(x, y, decimal: bool, sampled: bool) -> bool:
    difference, scale = abs(x - y).evalf(30), max(abs(x).evalf(30), abs(y).evalf(30))
    if difference <= 1e-25 and not (x and y):  # a zero that is written as a difference of roots
        return True
    if difference <= scale * (1e-12 if sampled or decimal else 1e-20):
        return True
    # A decimal is a rounded number: six significant digits and six digits after the point have to agree
    return bool(decimal and difference <= scale * 5e-6 and (sampled or difference <= 1e-6))


def _exactly_equal(answer, gold) -> bool:
    # 30 digits cannot distinguish 2^100 and 2^100 + 1, or 10^30 and √(10^60 + 1)
    difference = (answer - gold).doit()
    if difference.is_Rational:
        return difference == 0
    return bool(abs(difference.evalf(5, maxn=500)) < 1e-300)
