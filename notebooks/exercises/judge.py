"""How an exercise is checked: your function runs beside the right one and beside known mistakes, on telling inputs."""

from __future__ import annotations

import copy
import inspect
import linecache
import textwrap
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

RTOL, ATOL = 1e-4, 1e-5  # of float32 sums over a few tokens
WIDTH = 110  # characters of a line of a verdict
NO_GRADIENT = (
    "But no gradient flows from your result to the input (.detach(), .item(), torch.no_grad(), or a new tensor made of "
    "numbers): the optimiser would have nothing to follow."
)


@dataclass(frozen=True)
class Mistake:
    """A known way to get it wrong: what it does, why that is wrong, and where to look."""

    name: str
    wrong: Callable | Sequence[Callable]  # it, or several ways to make it
    told: str
    look: str

    @property
    def ways(self) -> tuple[Callable, ...]:
        """The wrong implementations."""
        return (self.wrong,) if callable(self.wrong) else tuple(self.wrong)


@dataclass(frozen=True)
class Case:
    """An input, and what is special about it."""

    about: str
    arguments: tuple = ()


@dataclass(frozen=True)
class Outcome:
    """What a function did with a case: its value and gradient in plain form, or what it raised; and remarks on the form."""

    value: Any = None
    gradient: Tensor | None = None
    dtype: torch.dtype | None = None  # of a tensor; None for anything else
    raised: Exception | None = None
    remarks: dict[str, str] = field(default_factory=dict)  # kind → sentence


@dataclass(frozen=True)
class Verdict:
    """The result of a check; `mistake` is the name of what was recognised, "" where all is right or nothing is solved yet."""

    solved: bool
    mistake: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Exercise:
    """The right function, cases that tell mistakes apart, and the catalogue of mistakes; call it with your function."""

    label: str
    reference: Callable
    cases: Sequence[Case]
    mistakes: Sequence[Mistake]
    learned: str  # one sentence for who has solved it
    gradient: int | None = None  # position of the argument by which the sum of the result is differentiated as well

    def __call__(self, answer: Callable, *, details: bool = False) -> None:
        """Says whether `answer` is right, or which mistake it makes; `details` shows every case."""
        print(self.judge(answer))
        if details:
            print(self.table(answer))

    def judge(self, answer: Callable) -> Verdict:
        """The verdict on a learner's function."""
        if not callable(answer):
            told = f"Give the function itself, not its result (you gave {_show(answer)}): the name without parentheses."
            return Verdict(False, "not_a_function", f"✗ {self.label}: {told}")
        expected = [self.outcome(self.reference, c) for c in self.cases]
        seen = [self.outcome(answer, c, e) for c, e in zip(self.cases, expected, strict=True)]
        if any(isinstance(s.raised, NotImplementedError) for s in seen):
            return Verdict(False, "", f"… {self.label}: not solved yet.")
        wrong = [i for i, (s, e) in enumerate(zip(seen, expected, strict=True)) if not same(s, e)]
        if wrong:
            return self._explain(seen, expected, wrong)
        remarks = {kind: text for s in seen for kind, text in s.remarks.items()}
        if remarks:
            kind, text = next(iter(remarks.items()))
            return Verdict(False, kind, wrap(f"✗ {self.label}, not yet ({kind}). The numbers are right. {text}"))
        return Verdict(True, "", wrap(f"✓ {self.label}: right{_count(self.cases)}. {self.learned}"))

    def outcome(self, function: Callable, case: Case, expected: Outcome | None = None) -> Outcome:
        """Runs a function on a copy of a case; `expected`, where given, says which form the result should have."""
        given = [copy.deepcopy(a) for a in case.arguments]
        leaf = None
        if self.gradient is not None:
            leaf = given[self.gradient].requires_grad_()
            given[self.gradient] = leaf.clone()  # not the leaf, which would refuse to be changed in place
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = function(*given)
                value = _plain(result)
                gradient = _gradient(result, leaf)
        except Exception as error:  # whatever a learner's function raises is told, not passed on
            return Outcome(raised=error)
        remarks = {} if expected is None else _remarks(result, gradient, expected, given, case)
        return Outcome(value, gradient, result.dtype if isinstance(result, Tensor) else None, None, remarks)

    def recognise(self, seen: Sequence[Outcome], expected: Sequence[Outcome], wrong: Sequence[int]):
        """The mistake that does the same in every case, or else the one that explains most wrong cases; and if it is all."""
        partly: dict[str, int] = {}
        for mistake in self.mistakes:
            for way in mistake.ways:
                done = [self.outcome(way, c) for c in self.cases]
                if all(map(same, seen, done)):
                    return mistake, True
                # two faults at once: a case in which this one alone shows, and shows in finite numbers
                hits = sum(
                    same(seen[i], done[i]) and not same(done[i], expected[i]) and _telling(done[i]) for i in wrong
                )
                partly[mistake.name] = max(hits, partly.get(mistake.name, 0))
        most = max(partly.values(), default=0)
        best = [m for m in self.mistakes if partly[m.name] == most]
        return (best[0], False) if most and len(best) == 1 else (None, False)

    def _explain(self, seen, expected, wrong) -> Verdict:
        mistake, whole = self.recognise(seen, expected, wrong)
        first = wrong[0]
        if mistake is not None:
            way = "I recognise this" if whole else "One thing I recognise, and there is something else besides"
            if not whole:  # show a case that this mistake explains
                done = [[self.outcome(w, c) for c in self.cases] for w in mistake.ways]
                explained = [i for i in wrong if any(same(seen[i], d[i]) for d in done)]
                first = explained[0]
            name, lines = mistake.name, [wrap(f"{way}: {mistake.told}"), wrap(f"Look at: {mistake.look}")]
        else:
            name, told = _generic(seen[first], expected[first])
            lines = [told if "\n" in told else wrap(told)]
        about = self.cases[first].about
        lines += [f"Case: {about}", *_compare(seen[first], expected[first])]
        if mistake is None:
            lines += [f"    input     {self._input(first)}"]
        told = {name} if mistake is None or not whole else {name, "no_gradient"}  # the catalogue knows of gradients
        remarks = {kind: text for s in seen for kind, text in s.remarks.items() if kind not in told}
        lines += [wrap(f"Besides: {text.removeprefix('But ')}") for text in remarks.values()]
        return Verdict(False, name, "\n".join([f"✗ {self.label}, not yet ({name}).", *lines]))

    def _input(self, case: int) -> str:
        names = list(inspect.signature(self.reference).parameters)
        return ", ".join(f"{n} = {_show(a)}" for n, a in zip(names, self.cases[case].arguments, strict=True))

    def table(self, answer: Callable) -> str:
        """Every case with its input, what is right and what the learner's function gives."""
        lines = []
        for i, case in enumerate(self.cases):
            expected = self.outcome(self.reference, case)
            seen = self.outcome(answer, case, expected)
            unsolved = isinstance(seen.raised, NotImplementedError)
            mark = "…" if unsolved else "✓" if same(seen, expected) else "✗"
            lines += (
                [f"{mark} {case.about}", f"    input     {self._input(i)}"]
                if case.arguments
                else [f"{mark} {case.about}"]
            )
            lines += [] if unsolved else _compare(seen, expected)
        return "\n".join(lines)


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────


def same(a: Outcome, b: Outcome) -> bool:
    """Whether two functions did the same: the same kind of error, or equal values and equal gradients."""
    if a.raised or b.raised:
        return type(a.raised) is type(b.raised)
    return _equal(a.value, b.value) and _equal(a.gradient, b.gradient)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=RTOL, atol=ATOL, equal_nan=True)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and not isinstance(a, Tensor) and a == b


def _plain(result: Any) -> Any:
    """Numbers of any kind as a float64 tensor, so that values can be compared; texts and None as they are."""
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
    """∇ of the sum of a result, zero where it does not depend on the leaf; None where autograd knows nothing of it."""
    if leaf is None or not isinstance(result, Tensor) or not result.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(result.sum(), leaf, allow_unused=True)
    return (torch.zeros_like(leaf) if gradient is None else gradient).to(torch.float64)


def _telling(outcome: Outcome) -> bool:
    """Errors and NaN look alike, whatever caused them: they prove nothing about one of two faults."""
    parts = [p for p in (outcome.value, outcome.gradient) if isinstance(p, Tensor)]
    return outcome.raised is None and all(bool(p.isfinite().all()) for p in parts)


# ── remarks and words ────────────────────────────────────────────────────────────────────────────────────────────


def _remarks(result: Any, gradient: Tensor | None, expected: Outcome, given: Sequence, case: Case) -> dict[str, str]:
    """What is wrong with the form of a result, whatever its numbers: kind → sentence."""
    out = {}
    if expected.dtype is not None and isinstance(result, bool | Real | np.ndarray | list | tuple):
        out["not_a_tensor"] = (
            f"But you returned a {type(result).__name__}, where a tensor is asked for: the next stage indexes it, moves it to a "
            "GPU and differentiates it. Stay in torch: no .item(), float(), .tolist() or numpy on the way."
        )
    elif isinstance(result, Tensor) and expected.dtype not in (None, result.dtype):
        out["dtype"] = (
            f"But the result is {result.dtype}, and should be {expected.dtype}: a wrong type surfaces three functions later, as "
            "an error or as lost digits."
        )
    if expected.gradient is not None and gradient is None and "not_a_tensor" not in out:
        out["no_gradient"] = NO_GRADIENT
    changed = [i for i, (a, b) in enumerate(zip(given, case.arguments, strict=True)) if not _unchanged(a, b)]
    if changed:
        out["changed_input"] = (
            f"But your function changed its {_ordinal(changed[0])} input in place: whoever calls it finds other data afterwards. "
            "Work on a copy: methods that end in _ and assignments such as x[i] = … change x itself."
        )
    return out


def _unchanged(a: Any, b: Any) -> bool:
    if isinstance(b, Tensor):
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    return a == b


def _ordinal(place: int) -> str:
    return ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")[place]


def _generic(seen: Outcome, expected: Outcome) -> tuple[str, str]:
    """What can be said of a result that no known mistake explains."""
    if seen.raised is not None:
        return "crash", f"Your function raised {type(seen.raised).__name__}: {seen.raised}{_where(seen.raised)}"
    value, want = seen.value, expected.value
    if value is None and want is not None:
        return "returned_none", "Your function returns None: is its last line a return?"
    if not isinstance(value, Tensor) and isinstance(want, Tensor):
        return "type", f"Your function returns {_kind(value)}; {_kind(want)} is asked for."
    if isinstance(value, Tensor) and not isinstance(want, Tensor):
        return "type", f"Your function returns {_kind(value)}; {_show(want)} is right here."
    if isinstance(value, Tensor) and value.shape != want.shape:
        told = f"Your result has shape {tuple(value.shape)}, {tuple(want.shape)} is right: see the shapes in the signature."
        return "shape", told
    if isinstance(value, Tensor) and not value.isfinite().all() and want.isfinite().all():
        told = "Your result holds NaN or infinity: 0/0, 0·NaN (a mask that multiplies) or the logarithm of 0 make them."
        return "not_finite", told
    if _equal(value, want) and "not_a_tensor" in seen.remarks:
        return "not_a_tensor", f"The values are right. {seen.remarks['not_a_tensor']}"
    if _equal(value, want) and seen.gradient is None:
        return "no_gradient", f"The values are right. {NO_GRADIENT}"
    if _equal(value, want):
        return (
            "gradient",
            "The values are right, their gradient is not: what did you stop, and what did you let through?",
        )
    return "unknown", "I do not recognise this one. Work through the smallest case by hand and compare:"


def _where(error: Exception) -> str:
    """The line of the learner's own code in which it happened."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    if not own:
        return ""
    line = linecache.getline(own[0].filename, own[0].lineno).strip()
    return f"\n    in your line {own[0].lineno}: {line}" if line else f"\n    in your line {own[0].lineno}"


def _compare(seen: Outcome, expected: Outcome) -> list[str]:
    got = f"{type(seen.raised).__name__}: {seen.raised}" if seen.raised is not None else _show(seen.value)
    lines = [f"    expected  {_show(expected.value)}", f"    got       {got}"]
    if expected.gradient is not None and seen.raised is None and _equal(seen.value, expected.value):
        got = "none at all" if seen.gradient is None else _show(seen.gradient)
        lines += [f"    gradient  {_show(expected.gradient)}", f"    got       {got}"]
    return lines


def _show(value: Any) -> str:
    """A value as short text: numbers with four digits."""
    if isinstance(value, Tensor):
        return _show(value.tolist())
    if isinstance(value, bool) or not isinstance(value, float | list | tuple | dict):
        return repr(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_show(v)}" for k, v in value.items()) + "}"
    items = [_show(v) for v in value]
    items = [*items[:6], f"… {len(items) - 6} more"] if len(items) > 8 else items
    return f"[{', '.join(items)}]" if isinstance(value, list) else f"({', '.join(items)})"


def wrap(text: str) -> str:
    """Text in lines that fit a notebook's output."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"numbers of shape {tuple(value.shape)}" if value.ndim else "a number"
    return f"a value of type {type(value).__name__}" if value is not None else "None"


def _count(cases: Sequence[Case]) -> str:
    return f" in all {len(cases)} cases" if len(cases) > 1 else ""
