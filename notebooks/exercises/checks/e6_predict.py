"""E6: predict the effect of δ (E6a) and the update at which the clipping range closes (E6b)."""

import math
import random
from collections.abc import Sequence

import pandas as pd
from judge import Case, Exercise, Mistake
from torch import Tensor

from checks.catalogue import make_exercise
from hacpo_kit.objective import clip_band

# ── E6a: which curve belongs to the largest δ ────────────────────────────────────────────────────────────────────


def clip_curves(
    ratios: Tensor, deltas: Sequence[float], delta_step: float, updates: int, seed: int = 0
) -> tuple[pd.DataFrame, Exercise]:
    """Return one curve per δ with the share of clipped peer rollouts at each update, and the exercise about them.

    The curves are named A, B, C in an order that depends on `seed`. The exercise asks for the curve of the largest δ.
    """
    shuffled = random.Random(seed).sample(list(deltas), len(deltas))
    delta_of = dict(zip("ABCDEF", shuffled, strict=False))

    def clipped_share(delta: float, m: int) -> float:
        lower, upper = clip_band(m, delta, delta_step)
        return ((ratios < lower) | (ratios > upper)).float().mean().item()

    columns = {name: [clipped_share(delta, m) for m in range(updates)] for name, delta in delta_of.items()}
    curves = pd.DataFrame(columns, index=pd.RangeIndex(updates, name="update within the step, m"))
    largest = max(delta_of, key=delta_of.get)
    lower = 1 - delta_of[largest]
    mistakes = [
        Mistake(
            f"delta_{delta:g}",
            [lambda name=name: name],
            f"Curve {name} belongs to δ = {delta:g}: its range begins at {1 - delta:g} and excludes {curves[name][0]:.0%}.",
            f"The range of δ = {delta_of[largest]:g} begins at {lower:g}. A wider range excludes fewer answers.",
        )
        for name, delta in delta_of.items()
        if name != largest
    ]
    summary = (
        f"The range begins at {lower:g}, so only {curves[largest][0]:.0%} lie outside at m = 0. "
        f"{(ratios > 1).float().mean().item():.0%} lie above 1, for any δ."
    )
    return curves, Exercise("E6a", lambda: largest, [Case("the three curves above")], mistakes, summary)


# ── E6b: when the range closes ───────────────────────────────────────────────────────────────────────────────────


def _closes_at(delta: float, delta_step: float) -> int:
    return next(m for m in range(10_000) if clip_band(m, delta, delta_step)[0] >= 1)


closes_at = make_exercise(
    "E6b",
    _closes_at,
    [
        Case("δ = 0.25, δ_step = 0.03125", (0.25, 0.03125)),
        Case("δ = 0.75, δ_step = 0.03125", (0.75, 0.03125)),
        Case("δ = 0.75, δ_step = 0.5: δ/δ_step is not an integer", (0.75, 0.5)),
        Case("δ = 0: closed from the start", (0.0, 0.25)),
    ],
    {
        "rounded_down": lambda d, s: int(d / s),
        "not_rounded": lambda d, s: d / s,
        "one_too_late": [lambda d, s: math.ceil(d / s) + 1, lambda d, s: int(d / s) + 1],
        "one_too_early": lambda d, s: math.ceil(d / s) - 1,
        "wrong_width": [lambda d, s: math.ceil((1 - d) / s), lambda d, s: math.ceil(1 / s)],
    },
)
