"""Build an exercise from its functions in this package and its messages in mistakes.yaml."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml
from judge import Case, Exercise, Mistake

MESSAGES = yaml.safe_load((Path(__file__).parents[1] / "mistakes.yaml").read_text(encoding="utf-8"))


def make_exercise(
    label: str,
    reference: Callable,
    cases: Sequence[Case],
    mistakes: Mapping[str, Callable | list[Callable]],
    *,
    gradient: int | None = None,
) -> Exercise:
    """Return an exercise; `mistakes` has one or more wrong functions for each name in mistakes.yaml."""
    messages = MESSAGES[label]
    known = [
        Mistake(name, functions if isinstance(functions, list) else [functions], **messages["mistakes"][name])
        for name, functions in mistakes.items()
    ]
    return Exercise(label, reference, cases, known, messages["summary"], gradient)
