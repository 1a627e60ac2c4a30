"""Claims that hold, do not hold, or stay undecided."""

import pandas as pd
import pytest
from made_runs import line, run, together

from hacpo_kit.experiments.compare import claims, result, weakest


def test_claims_hold_fail_or_stay_undecided():
    def three(method, start, end, noise=0.01):
        return [run(method, s, line(0, start, end + s * noise)) for s in (0, 1, 2)]

    frame = together(
        *three("hacpo", 0.5, 0.8), *three("gspo", 0.2, 0.85), *three("gspo_x2", 0.3, 0.801), *three("naive", 0.5, 0.7, 0.2),
        run("no_clip", 0, line(0, 0.5, 0.7)), run("no_discrepancy", 7, line(0, 0.5, 0.7)),
    )  # fmt: skip
    table = claims(frame, last=1).set_index("claim")
    assert table["result"].to_dict() == {
        "hacpo is ahead of gspo early (step 1)": "held",
        "hacpo ends ahead of gspo": "did not hold",
        "no agent ends worse than with gspo": "did not hold",
        "half way, hacpo is ahead of gspo_x2 with half of its rollouts": "held",
        "hacpo ends no worse than gspo_x2": "held",  # 0.1 points behind, the margin is 1
        "hacpo ends ahead of naive sharing": "undecided",
        "without a part (no_capability_baseline), hacpo ends lower": "not run",
        "without a part (no_discrepancy), hacpo ends lower": "not run",
        "without a part (alpha=0), hacpo ends lower": "not run",
        "without a part (delta_step=0), hacpo ends lower": "not run",
        "without a part (no_clip), hacpo ends lower": "no interval",
    }
    assert table.loc["without a part (no_clip), hacpo ends lower", "mean"] == pytest.approx(0.1)
    assert table.loc["hacpo ends ahead of gspo", "mean"] == pytest.approx(-0.05)


def test_result_of_no_worse_needs_the_whole_interval():
    """With a margin of one point, an agent slightly behind must not hide one that may be far behind."""
    table = pd.DataFrame(
        {"method": "hacpo", "agent": ["a", "b"], "mean": [-0.004, -0.07], "low": [-0.008, -0.2], "high": [-0.001, 0.05],
         "seeds": 5}
    )  # fmt: skip
    assert result(weakest(table, "hacpo", 0.01), 0.01) == "undecided"
    close = {"mean": -0.015, "low": -0.03, "high": -0.002, "seeds": 5}
    assert result(close, 0.01) == "undecided"
    assert result(close | {"high": -0.012}, 0.01) == "did not hold"
    assert result(close, 0.0) == "did not hold"
