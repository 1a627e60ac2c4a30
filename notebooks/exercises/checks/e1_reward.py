"""E1: read the last box of an answer (E1a) and compute best@k (E1b)."""

import math
import re

from judge import Case

from checks.catalogue import make_exercise
from hacpo_kit.runs.evaluation import best_at
from hacpo_kit.tasks.boxes import last_box

# ── E1a: the last box ────────────────────────────────────────────────────────────────────────────────────────────


def _opened(text: str) -> list[str]:
    """Return the text from each \\boxed{ to the next one."""
    return [rf"\boxed{{{rest}" for rest in text.split(r"\boxed{")[1:]]


def _with_spaces(text: str) -> str | None:
    if (content := last_box(text)) is None:
        return None
    start = text.rfind(r"\boxed{") + len(r"\boxed{")
    return text[start : text.index("}", text.index(content, start) + len(content))]


def _crash_without_box(text: str) -> str | None:
    if r"\boxed{" not in text:
        raise IndexError("list index out of range")
    return last_box(text)


box = make_exercise(
    "E1a",
    last_box,
    [
        Case("one box", (r"7+8=15;3+5+1=9;\boxed{95}",)),
        Case("no box", ("It is 95.",)),
        Case("two boxes: the model corrects itself", (r"\boxed{85}, no: \boxed{95}.",)),
        Case("braces inside the box", (r"So it is \boxed{\frac{1}{2}}.",)),
        Case("a closing brace after the box", (r"\boxed{95} (from {90, 5})",)),
        Case("a number after the box", (r"\boxed{95}, found in 2 steps",)),
        Case("spaces in the box", (r"\boxed{ 95 }",)),
        Case("an empty box", (r"\boxed{}",)),
        Case("truncated inside the last box", (r"\boxed{85}, no: \boxed{9",)),
    ],
    {
        "first_box": lambda text: last_box(_opened(text)[0]) if _opened(text) else None,
        "up_to_the_first_brace": [
            lambda text: m[-1].strip() or None if (m := re.findall(r"\\boxed\{(.*?)\}", text)) else None,
            lambda text: m[-1].strip() or None if (m := re.findall(r"\\boxed\{([^{}]*)\}", text)) else None,
        ],
        "up_to_the_last_brace": [
            lambda text: m.group(1).strip() or None if (m := re.search(r"\\boxed\{(.*)\}", text)) else None,
            lambda text: text[i + 7 : text.rfind("}")].strip() or None if (i := text.rfind(r"\boxed{")) >= 0 else None,
        ],
        "last_number": lambda text: m[-1] if (m := re.findall(r"-?\d+(?:\.\d+)?", text)) else None,
        "earlier_box": lambda text: next(filter(None, map(last_box, reversed(_opened(text)))), None),
        "crash_without_box": _crash_without_box,
        "empty_string": lambda text: last_box(text) or "",
        "command_included": lambda text: None if (b := last_box(text)) is None else rf"\boxed{{{b}}}",
        "spaces_kept": _with_spaces,
    },
)

# ── E1b: best@k ──────────────────────────────────────────────────────────────────────────────────────────────────

best_of = make_exercise(
    "E1b",
    best_at,
    [
        Case("8 answers, 2 correct, 3 drawn", (8, 2, 3)),
        Case("8 answers, 2 correct, 1 drawn", (8, 2, 1)),
        Case("8 answers, none correct, 4 drawn", (8, 0, 4)),
        Case("8 answers, 6 correct, 3 drawn: fewer wrong answers than draws", (8, 6, 3)),
        Case("30 answers, 1 correct, all drawn", (30, 1, 30)),
    ],
    {
        "with_replacement": lambda n, correct, k: 1 - (1 - correct / n) ** k,
        "mean_accuracy": lambda n, correct, k: correct / n,
        "k_times_the_mean": [lambda n, correct, k: min(1.0, k * correct / n), lambda n, correct, k: k * correct / n],
        "all_correct": lambda n, correct, k: math.comb(correct, k) / math.comb(n, k),
        "none_correct": lambda n, correct, k: math.comb(n - correct, k) / math.comb(n, k),
        "best_at_n": lambda n, correct, k: float(correct > 0),
        "exactly_one": lambda n, correct, k: correct * math.comb(n - correct, k - 1) / math.comb(n, k),
    },
)
