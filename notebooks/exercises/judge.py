"""Check an exercise: run a function beside the reference and beside known mistakes, on cases that tell them apart."""

from __future__ import annotations

import copy
import inspect
import linecache
import textwrap
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

RTOL, ATOL = 1e-4, 1e-5  # for float32 sums over a few tokens
WIDTH = 110  # characters per line of a verdict
NO_GRADIENT = (
    "No gradient flows from the result to the input, so the optimiser could not train the model. Look for .detach(), "
    ".item(), torch.no_grad() or a new tensor made of numbers."
)


@dataclass(frozen=True)
class Mistake:
    """A known mistake: the functions that make it, a message that explains it, and a hint."""

    name: str
    functions: Sequence[Callable]
    message: str
    hint: str


@dataclass(frozen=True)
class Case:
    """A description and the arguments for one call."""

    description: str
    arguments: tuple = ()


@dataclass(frozen=True)
class Outcome:
    """The result of one call: value and gradient as float64 tensors where they are numbers, or the error."""

    value: Any = None
    gradient: Tensor | None = None
    kind: Any = None  # dtype of a tensor, class of any other result
    changed_input: int | None = None  # position of an argument that was changed in place
    error: Exception | None = None


@dataclass(frozen=True)
class Verdict:
    """The result of a check. `mistake` is "" if the answer is correct or not solved yet."""

    solved: bool
    mistake: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Exercise:
    """A reference function, cases and known mistakes. Call it with a function to check this function."""

    label: str
    reference: Callable
    cases: Sequence[Case]
    mistakes: Sequence[Mistake]
    summary: str  # one sentence that is printed after a correct answer
    gradient: int | None = None  # position of the argument for which the gradient of the summed result is compared

    def __call__(self, answer: Callable, *, details: bool = False) -> None:
        """Print whether `answer` is correct or which mistake it makes; with `details` also every case."""
        print(self.judge(answer))
        if details:
            print(self.table(answer))

    def judge(self, answer: Callable) -> Verdict:
        """Compare a function with the reference on all cases."""
        if not callable(answer):
            text = f"✗ {self.label}: pass the function itself, without parentheses, not its result {_show(answer)}."
            return Verdict(False, "not_a_function", text)
        expected = [self.run(self.reference, case) for case in self.cases]
        outcomes = [self.run(answer, case) for case in self.cases]
        if any(isinstance(o.error, NotImplementedError) for o in outcomes):
            return Verdict(False, "", f"… {self.label}: not solved yet.")
        problems: dict[str, str] = {}
        for outcome, reference in zip(outcomes, expected, strict=True):
            problems |= _form_problems(outcome, reference)
        if wrong := [i for i, pair in enumerate(zip(outcomes, expected, strict=True)) if not same(*pair)]:
            return self._explain(outcomes, expected, wrong, problems)
        if problems:
            name, text = next(iter(problems.items()))
            return Verdict(False, name, f"{self._failed(name)}\n{wrap(f'The values are correct. {text}')}")
        number = f" in all {len(self.cases)} cases" if len(self.cases) > 1 else ""
        return Verdict(True, "", wrap(f"✓ {self.label}: correct{number}. {self.summary}"))

    def run(self, function: Callable, case: Case) -> Outcome:
        """Call a function with a copy of the arguments of a case."""
        arguments = [copy.deepcopy(a) for a in case.arguments]
        leaf = None
        if self.gradient is not None:
            leaf = arguments[self.gradient].requires_grad_()
            arguments[self.gradient] = leaf.clone()  # a leaf could not be changed in place
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = function(*arguments)
                value, gradient = _plain(result), _gradient(result, leaf)
        except Exception as error:  # an error of a learner's function is part of the verdict
            return Outcome(error=error)
        pairs = enumerate(zip(arguments, case.arguments, strict=True))
        changed = next((i for i, (after, before) in pairs if not _equal(_plain(after), _plain(before))), None)
        kind = result.dtype if isinstance(result, Tensor) else type(result)
        return Outcome(value, gradient, kind, changed)

    def recognise(self, outcomes: Sequence[Outcome], wrong: Sequence[int]) -> tuple[Mistake | None, list[int], bool]:
        """Return the mistake that explains most wrong cases, the cases that it explains, and whether it explains all.

        A mistake that explains only some cases is returned if no other mistake explains as many.
        """
        explained: dict[str, list[int]] = {m.name: [] for m in self.mistakes}
        for mistake in self.mistakes:
            for function in mistake.functions:
                results = [self.run(function, case) for case in self.cases]
                if all(map(same, outcomes, results)):
                    return mistake, list(wrong), True
                # errors and NaN look alike for different causes, so only finite numbers count
                hits = [i for i in wrong if same(outcomes[i], results[i]) and _finite(results[i])]
                explained[mistake.name] = max(explained[mistake.name], hits, key=len)
        most = max(map(len, explained.values()), default=0)
        best = [m for m in self.mistakes if len(explained[m.name]) == most]
        if most and len(best) == 1:
            return best[0], explained[best[0].name], False
        return None, list(wrong), False

    def table(self, answer: Callable) -> str:
        """Show every case with its input, the expected result and the result of a function."""
        lines = []
        for i, case in enumerate(self.cases):
            expected, outcome = self.run(self.reference, case), self.run(answer, case)
            unsolved = isinstance(outcome.error, NotImplementedError)
            lines.append(f"{'…' if unsolved else '✓' if same(outcome, expected) else '✗'} {case.description}")
            lines += [self._input(i)] if case.arguments else []
            lines += [] if unsolved else _compare(outcome, expected)
        return "\n".join(lines)

    def _explain(self, outcomes, expected, wrong, problems) -> Verdict:
        mistake, cases, complete = self.recognise(outcomes, wrong)
        outcome, reference = outcomes[cases[0]], expected[cases[0]]
        if mistake is None:
            name, text = _describe(outcome, reference)
            lines = [text if "\n" in text else wrap(text)]
        else:
            name, label = mistake.name, "Recognised mistake" if complete else "One of several mistakes"
            lines = [wrap(f"{label}: {mistake.message}"), wrap(f"Hint: {mistake.hint}")]
        lines += [f"Case: {self.cases[cases[0]].description}", *_compare(outcome, reference)]
        lines += [self._input(cases[0])] if mistake is None else []
        shown = {name, "no_gradient"} if complete else {name}  # the message of a mistake covers its gradient
        lines += [wrap(f"Also: {text}") for problem, text in problems.items() if problem not in shown]
        return Verdict(False, name, "\n".join([self._failed(name), *lines]))

    def _failed(self, name: str) -> str:
        return f"✗ {self.label}: not correct yet ({name})."

    def _input(self, case: int) -> str:
        names = inspect.signature(self.reference).parameters
        values = zip(names, self.cases[case].arguments, strict=True)
        return "    input     " + ", ".join(f"{name} = {_show(value)}" for name, value in values)


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────


def same(a: Outcome, b: Outcome) -> bool:
    """Return whether two outcomes have the same type of error, or equal values and equal gradients."""
    if a.error or b.error:
        return type(a.error) is type(b.error)
    return _equal(a.value, b.value) and _equal(a.gradient, b.gradient)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=RTOL, atol=ATOL, equal_nan=True)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and not isinstance(a, Tensor) and a == b


def _plain(result: Any) -> Any:
    """Return numbers of any type as a float64 tensor; texts, None and other objects unchanged."""
    if isinstance(result, Tensor):
        return result.detach().to(torch.float64, copy=True)
    if isinstance(result, bool | Real | np.ndarray):
        return torch.as_tensor(np.asarray(result, dtype=np.float64))
    if isinstance(result, list | tuple):
        items = [_plain(r) for r in result]
        alike = items and all(isinstance(i, Tensor) for i in items) and len({i.shape for i in items}) == 1
        return torch.stack(items) if alike else tuple(items)
    return result


def _gradient(result: Any, leaf: Tensor | None) -> Tensor | None:
    """Return the gradient of the summed result, or None if the result has no gradient function."""
    if leaf is None or not isinstance(result, Tensor) or not result.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(result.sum(), leaf, allow_unused=True)
    return (torch.zeros_like(leaf) if gradient is None else gradient).to(torch.float64)


def _finite(outcome: Outcome) -> bool:
    parts = [p for p in (outcome.value, outcome.gradient) if isinstance(p, Tensor)]
    return outcome.error is None and all(bool(p.isfinite().all()) for p in parts)


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _form_problems(outcome: Outcome, expected: Outcome) -> dict[str, str]:
    """Return what is wrong apart from the values, by name: type, dtype, missing gradient, changed input."""
    if outcome.error or outcome.value is None:
        return {}
    problems = {}
    if isinstance(expected.kind, torch.dtype) and not isinstance(outcome.kind, torch.dtype):
        problems["not_a_tensor"] = (
            f"Your function returned a {outcome.kind.__name__}, but the result must be a tensor: later stages index it, move "
            "it to a GPU and differentiate it. Avoid .item(), float(), .tolist() and numpy."
        )
    elif isinstance(expected.kind, torch.dtype) and outcome.kind != expected.kind:
        problems["dtype"] = f"The result has dtype {outcome.kind}; {expected.kind} is expected."
    if expected.gradient is not None and outcome.gradient is None and "not_a_tensor" not in problems:
        problems["no_gradient"] = NO_GRADIENT
    if outcome.changed_input is not None:
        problems["changed_input"] = (
            f"Your function changed argument {outcome.changed_input + 1} in place, so the caller's data are different "
            "afterwards. Work on a copy: methods that end in _ and assignments such as x[i] = … change x itself."
        )
    return problems


def _describe(outcome: Outcome, expected: Outcome) -> tuple[str, str]:
    """Return the name and description of a wrong outcome that no known mistake explains."""
    if outcome.error is not None:
        return (
            "crash",
            f"Your function raised {type(outcome.error).__name__}: {outcome.error}{_location(outcome.error)}",
        )
    value, target = outcome.value, expected.value
    if value is None:
        return "returned_none", "Your function returned None. Does it end with a return statement?"
    if isinstance(value, Tensor) != isinstance(target, Tensor):
        return "type", f"Your function returned {_show(value)}, but {_show(target)} is expected."
    if isinstance(value, Tensor) and value.shape != target.shape:
        shapes = f"Your result has shape {tuple(value.shape)}; {tuple(target.shape)} is expected."
        return "shape", f"{shapes} The signature states the shapes."
    if isinstance(value, Tensor) and not value.isfinite().all() and target.isfinite().all():
        return (
            "not_finite",
            "Your result contains NaN or infinity. Possible causes: 0/0, 0·NaN (a mask that multiplies), log 0.",
        )
    if not _equal(value, target):
        return (
            "unknown",
            "Your result differs from the expected one, and no known mistake explains it. Compare by hand:",
        )
    for name, text in _form_problems(outcome, expected).items():
        return name, f"The values are correct. {text}"
    return (
        "gradient",
        "The values are correct, but the gradient is not. Check which factors are inside the stop-gradient.",
    )


def _location(error: Exception) -> str:
    """Return the line of the learner's own code in which an error happened."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    if not frames:
        return ""
    line = linecache.getline(frames[0].filename, frames[0].lineno).strip()
    return f"\n    in your line {frames[0].lineno}: {line}"


def _compare(outcome: Outcome, expected: Outcome) -> list[str]:
    error = outcome.error
    result = _show(outcome.value) if error is None else f"{type(error).__name__}: {error}"
    lines = [f"    expected  {_show(expected.value)}", f"    result    {result}"]
    if expected.gradient is not None and error is None and _equal(outcome.value, expected.value):
        result = "no gradient" if outcome.gradient is None else _show(outcome.gradient)
        lines += [f"    gradient  {_show(expected.gradient)}", f"    result    {result}"]
    return lines


def _show(value: Any) -> str:
    """Return a value as short text, numbers with four digits."""
    if isinstance(value, Tensor):
        return _show(value.tolist())
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_show(v)}" for k, v in value.items()) + "}"
    if not isinstance(value, list | tuple):
        return repr(value)
    items = [_show(v) for v in value]
    items = [*items[:6], f"… {len(items) - 6} more"] if len(items) > 8 else items
    return f"[{', '.join(items)}]" if isinstance(value, list) else f"({', '.join(items)})"


def wrap(text: str) -> str:
    """Return text in lines of at most `WIDTH` characters."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
