"""The exercises with their reference functions, cases and known mistakes. This package contains the solutions.

Use in a notebook: `checks.group_advantage(group_advantage)`. `judge.py` compares; `mistakes.yaml` has the messages.
"""

from checks.e1_reward import best_of, box
from checks.e2_advantage import capability_baseline, group_advantage, update_weights
from checks.e3_ratio import importance_ratio, response_mask
from checks.e4_clip_and_loss import clip_range, hacpo, peer_objective
from checks.e5_find_the_bug import accumulate, effective_advantages, numbered, which_line
from checks.e6_predict import clip_curves, closes_at
from checks.e7_tune import tuning

__all__ = ["EXERCISES", "clip_curves", "effective_advantages", "numbered", "tuning"]

EXERCISES = {
    exercise.label: exercise
    for exercise in (
        box, best_of, group_advantage, capability_baseline, update_weights, importance_ratio, response_mask, clip_range,
        peer_objective, hacpo, accumulate, which_line, closes_at,
    )
}  # fmt: skip
