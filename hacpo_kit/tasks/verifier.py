"""The verifier: verdicts on boxed answers, and the process that computes them.

The process runs as `python -m hacpo_kit.tasks.verifier` and may be killed at any time. An answer goes through four stages:
the last box (boxes.py), normalised text (cleaning.py), its kind (notation.py, expressions.py), and the comparison
(comparison.py, values.py). math-verify parses LaTeX and compares sets, intervals and inequalities. Departures from it:

- no time limits by signals, which fail outside the main thread: the parent process ends this one;
- a box counts only if it can be read as a whole;
- letters keep their case, and a unit needs a space or a markup: `6m` is a product;
- rules of our own come first: integers, numerals with a base, percentages, lists, ellipses, words.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from fractions import Fraction

from hacpo_kit.tasks.boxes import MAX_CHARS, brace_depths, integer
from hacpo_kit.tasks.cleaning import clean
from hacpo_kit.tasks.comparison import same
from hacpo_kit.tasks.expressions import parse
from hacpo_kit.tasks.notation import based_numeral, clock, list_elements, long_words, rational, word
from hacpo_kit.tasks.relations import condition
from hacpo_kit.tasks.values import value_at

ADDRESS_SPACE = 4 * 2**30  # bytes; the parent's limit on resident memory is lower

_TOLERANCE = re.compile(r"(?P<gold>.+) \(tolerance (?P<tolerance>\d*\.?\d+(?:[eE][-+]?\d{1,3})?)\)", re.DOTALL)
_EMPTY_CELLS = {"None", "nan", "NaN", "null", "NaT", "<NA>"}  # the printed forms of an empty cell of a table


def compare(answer: str | None, gold: str) -> tuple[float | None, str]:
    r"""Return reward and status of a boxed answer: 1.0 correct, 0.0 wrong or no_answer, None unscorable (bad gold).

    A gold such as `9.81 (tolerance 0.02)` accepts every number within that distance.

    >>> compare(r"\dfrac{1}{2}", "0.5"), compare(None, "0.5"), compare("0.5", "")
    ((1.0, 'correct'), (0.0, 'no_answer'), (None, 'unscorable'))
    """
    if not usable(gold):
        return None, "unscorable"
    if answer is None or not answer.strip() or len(answer) > MAX_CHARS:
        return 0.0, "no_answer"
    if near := _TOLERANCE.fullmatch(gold):
        correct = _within(clean(answer), clean(near["gold"]), Fraction(near["tolerance"]))
    else:
        correct = same(clean(answer), clean(gold))
    return (1.0, "correct") if correct else (0.0, "wrong")


def usable(gold: str) -> bool:
    r"""Return whether answers can be compared with this gold: words, or mathematics that the parser reads.

    >>> usable("5"), usable(r"\text{even}"), usable(""), usable("nan"), usable(r"\frac{1}{"), usable("1/0")
    (True, True, False, False, False, False)
    """
    if len(gold) > MAX_CHARS or gold.strip() in _EMPTY_CELLS:
        return False
    depths = [0, *(depth for _, depth in brace_depths(gold))]
    if min(depths) < 0 or depths[-1] != 0:
        return False
    if near := _TOLERANCE.fullmatch(gold):
        return all(_number(part) is not None for part in _numbers_of(clean(near["gold"])))
    return _usable(clean(gold))


def _usable(text: str) -> bool:
    if not text:
        return False
    text = condition(text)
    if rational(text) is not None or integer(text) is not None or based_numeral(text) or word(text) or clock(text):
        return True
    if r"\ldots" in text or long_words(text) or not text.isascii():  # compared as text only
        return bool(re.search(r"\w", text))
    if elements := list_elements(text):
        return all(_usable(element) for element in elements[1])
    return parse(re.sub(r"\s*\\?%$", "", text)) is not None


def _within(answer: str, gold: str, tolerance: Fraction) -> bool:
    """Return whether the answer consists of the numbers of the gold, each within the absolute tolerance."""
    left, right = ([_number(part) for part in _numbers_of(text)] for text in (answer, gold))
    if len(left) != len(right) or None in left:
        return False
    pairs = zip(sorted(left), sorted(right), strict=True)
    return all(abs(x - y) <= tolerance * Fraction(100001, 100000) for x, y in pairs)


def _numbers_of(text: str) -> list[str]:
    brackets, elements = list_elements(text) or ("()", [])
    return elements if not brackets else [text]


def _number(text: str) -> Fraction | None:
    """Return the real number that a text stands for, also with a name before it (x = 2) and a unit behind it."""
    from sympy import Eq

    if (value := rational(text)) is not None:
        return value
    parsed = parse(text)
    parsed = parsed.rhs if isinstance(parsed, Eq) else parsed
    value = value_at(parsed, {}) if parsed is not None and not getattr(parsed, "free_symbols", True) else None
    return Fraction(str(value)) if value is not None and value.is_real and value.is_finite else None


# ── the process ──────────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Read one item per line of JSON from standard input and write its messages to standard output, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    pipe = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints goes to standard error, not between the messages
    sys.stdout = sys.stderr
    logging.disable(logging.CRITICAL)

    def send(**message) -> None:
        pipe.write(json.dumps(message) + "\n")  # ASCII: lone surrogates and control characters are escaped
        pipe.flush()

    try:
        # the parser builds tables when it first uses a rule: part of the start, not of the first item's time
        compare(r"\frac{x+1}{2}", r"\frac{\sqrt{x}}{3}-2^{x}")
        _set_limit(resource.RLIMIT_AS, ADDRESS_SPACE)
    except Exception as fault:
        send(id=0, broken=f"{type(fault).__name__}: {fault}")
        return
    send(id=0)
    for line in sys.stdin.buffer:
        _process(json.loads(line), send)


def _process(item: dict, send: Callable[..., None]) -> None:
    """Verify one item. It sends two messages, so that the parent can attribute a hang to the gold or to the answer."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _set_limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + item["timeout"]) + 10)
    fatal = False
    try:
        usable(item["gold"])
        send(id=item["id"], gold_read=True)
        reward, status = compare(item["answer"], item["gold"])
        detail = ""
    except Exception as fault:
        fatal = isinstance(fault, (MemoryError, RecursionError))  # the parent then starts a new process
        reward, status, detail = None, "error", f"{type(fault).__name__}: {fault}"[:500]
    send(id=item["id"], reward=reward, status=status, detail=detail, fatal=fatal)


def _set_limit(kind: int, value: int) -> None:
    """Set a limit that the system enforces even after the end of the parent."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main()
