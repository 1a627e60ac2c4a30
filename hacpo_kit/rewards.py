"""② reward: a verifier scores each rollout.

Statuses: correct (reward 1), wrong (0), no_answer (0: no usable box), timeout (0), error (None: the verifier or the user's
function failed), unscorable (None: the gold cannot be used). None is not a reward of 0: the rollout is excluded from
training and counted.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hacpo_kit.tasks.boxes import MAX_CHARS, integer, is_prose, last_box, reference_answer
from hacpo_kit.tasks.cleaning import clean
from hacpo_kit.tasks.units import split_unit
from hacpo_kit.tasks.workers import Verdict, verify

if TYPE_CHECKING:
    from hacpo_kit.records import Pool


SHORT = 40  # characters of an answer that is compared in this process, without a time limit


def boxed_math(response: str, gold: str, *, timeout: float = 5.0) -> Verdict:
    r"""Return the verdict on the last `\boxed{...}` of a response, compared with the gold as mathematics.

    A gold that cannot be used is unscorable for every response. `timeout` is in seconds.

    >>> boxed_math(r"It is \boxed{\frac{1}{2}}.", "0.5")
    Verdict(reward=1.0, status='correct', detail='')
    """
    return score([(response, gold)], timeout=timeout)[0]


def reward(
    pool: Pool,
    function: Callable = boxed_math,
    *,
    timeout: float = 5.0,
    workers: int | None = None,
    progress: bool = False,
) -> Pool:
    """Return the pool with a reward and a status for every rollout; parameters and errors are those of `score`.

    Rollouts that could not be scored (status unscorable or error) have the reward None; a warning counts them. Stored peer
    rollouts that already have a reward keep it.
    """
    pairs = [(r.text, pool.problem(r.problem).gold) for r in pool]
    try:
        verdicts = score(pairs, fn=function, timeout=timeout, workers=workers, progress=progress)
    except ValueError as error:
        if not hasattr(error, "item"):
            raise
        from hacpo_kit.models.faults import invalid_reward  # needs torch, which scoring does not

        raise invalid_reward(error, pool, error.item) from None
    verdicts = [
        Verdict(r.reward, r.status) if r.source in pool.stored and r.status != "unscored" else verdict
        for r, verdict in zip(pool, verdicts, strict=True)
    ]
    unscored = [(r, v) for r, v in zip(pool, verdicts, strict=True) if v.reward is None]
    if unscored:
        first, verdict = unscored[0]
        warnings.warn(
            f"{len(unscored)} of {len(pool)} rollouts could not be scored and are excluded from training; the first, "
            f"{first.problem!r} by {first.source!r}: {verdict.status} {verdict.detail}".rstrip(),
            stacklevel=2,
        )
    return pool.with_rewards([v.reward for v in verdicts], [v.status for v in verdicts])


def score(
    pairs: Sequence[tuple[str, str]],
    *,
    fn: Callable = boxed_math,
    timeout: float = 5.0,
    workers: int | None = None,
    progress: bool = False,
) -> list[Verdict]:
    r"""Return the verdict on each (response, gold); equal pairs are verified once.

    `fn(response, gold)` returns a number, a bool or a Verdict. A function other than `boxed_math` runs in this process
    without a time limit; a reward above 0 counts as correct, and an exception gives the status error. `timeout` is in
    seconds per item, from when a worker process starts it. `workers` defaults to min(4, number of CPUs).

    Raises ValueError, with the position of the pair in its attribute `item`, for a reward that is not a finite number;
    TypeError for a pair that is not text (a gold of None is unscorable); RuntimeError if no worker process can start.

    >>> [v.status for v in score([(r"\boxed{7}", "7"), (r"\boxed{5}", "7"), ("7?", "7"), (r"\boxed{7}", "")])]
    ['correct', 'wrong', 'no_answer', 'unscorable']
    """
    pairs = list(pairs)
    workers = min(4, os.cpu_count() or 1) if workers is None else workers
    _check(pairs, fn, timeout, workers)
    if fn is not boxed_math:
        return [_call(fn, response, gold, item) for item, (response, gold) in enumerate(pairs)]
    golds = {gold: gold and reference_answer(gold) for _, gold in pairs}
    keys = [(last_box(response), golds[gold]) for response, gold in pairs]
    verdicts = {key: _simple_verdict(*key) for key in dict.fromkeys(keys)}
    if hard := [key for key, verdict in verdicts.items() if verdict is None]:
        found = verify(hard, timeout=timeout, workers=workers, progress=progress)
        verdicts.update(zip(hard, found, strict=True))
    return [verdicts[key] for key in keys]


def _check(pairs: list, fn: Callable, timeout: float, workers: int) -> None:
    if not callable(fn):
        raise TypeError(f"the reward function must be callable as fn(response, gold); got {fn!r}")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout}: set a positive number of seconds")
    if workers < 1:
        raise ValueError(f"workers={workers}: set at least 1")
    for item, (response, gold) in enumerate(pairs):
        if not isinstance(response, str) or not isinstance(gold, str | None):
            kinds = f"{type(response).__name__} and {type(gold).__name__}"
            raise TypeError(f"item {item}: response and gold must be text, not {kinds}")


def _simple_verdict(answer: str | None, gold: str | None) -> Verdict | None:
    """Return the verdict on integers and on texts that are never parsed; None if a worker process is needed."""
    if gold is None or not gold.strip():
        return Verdict(None, "unscorable", "the gold is empty")
    if len(gold) > MAX_CHARS:
        return Verdict(None, "unscorable", f"the gold has {len(gold)} characters, the limit is {MAX_CHARS}")
    if is_prose(gold):
        return Verdict(None, "unscorable", "the gold is a text: give the answer alone, or mark it by #### or \\boxed{}")
    number = integer(gold.strip())
    if number is None:
        return None
    if answer is None:
        return Verdict(0.0, "no_answer")
    if len(answer) > MAX_CHARS:
        # the response is at fault: an "answer" of this length is none
        return Verdict(0.0, "no_answer", f"the box has {len(answer)} characters, the limit is {MAX_CHARS}")
    found = integer(answer)
    if found is None and len(answer) <= SHORT:  # \text{72 eggs}: patterns take no time on short texts
        found = integer(split_unit(clean(answer))[0])
    if found is None:
        return None
    return Verdict(1.0, "correct") if found == number else Verdict(0.0, "wrong")


def _call(fn: Callable, response: str, gold: str, item: int) -> Verdict:
    """Return the verdict of a user's reward function on one pair."""
    try:
        value = fn(response, gold)
    except Exception as fault:
        return Verdict(None, "error", f"{type(fault).__name__}: {fault}")
    verdict = value if isinstance(value, Verdict) else None
    number = verdict.reward if verdict else value
    if verdict and number is None:
        return verdict
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        # the plain number, also in a Verdict: numbers of numpy and torch cannot be stored as JSON
        if not isinstance(number, str | bytes) and math.isfinite(number := float(number)):
            return replace(verdict, reward=number) if verdict else Verdict(number, "correct" if number > 0 else "wrong")
    error = ValueError(
        f"item {item}: the reward function returned {repr(value)[:80]}; return a finite number or a Verdict"
    )
    error.item = item
    raise error
