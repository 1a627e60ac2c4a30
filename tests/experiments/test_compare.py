"""Comparisons of methods against values computed by hand, and incomplete tables."""

import math

import numpy as np
import pandas as pd
import pytest
from made_runs import T1, T2, line, run, study, together

from hacpo_kit.experiments.compare import (
    accuracy_curves,
    ahead_at_half,
    claims,
    final_table,
    final_text,
    paired_differences,
    result,
    rollouts_to_reach,
    targets,
    weakest,
)
from hacpo_kit.experiments.statistics import BEFORE, MEAN

# ── curves ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_accuracy_curves_have_intervals_over_seeds_of_the_mean_over_agents():
    table = accuracy_curves(study())
    row = table[(table["method"] == "gspo") & (table["step"] == 1)].iloc[0]
    # seeds: (0.2 + 0.4) / 2 = 0.3 and (0.2 + 0.6) / 2 = 0.4; standard error 0.0707 / √2 = 0.05
    assert (row["mean"], row["seeds"]) == (pytest.approx(0.35), 2)
    assert (row["high"] - row["mean"], row["mean"] - row["low"]) == pytest.approx((T1 * 0.05, T1 * 0.05), rel=1e-6)
    assert list(table["method"].unique()) == ["hacpo", "gspo"]  # the order of METHODS


def test_accuracy_curves_count_rollouts_per_agent():
    frame = together(run("gspo", 0, line(0, 1, 1)), run("gspo_x2", 0, line(0, 1, 1)))
    table = accuracy_curves(frame)
    assert table[table["method"] == "gspo"]["rollouts"].tolist() == [0, 10, 20]
    assert table[table["method"] == "gspo_x2"]["rollouts"].tolist() == [0, 20, 40]
    assert accuracy_curves(frame, x="tokens")["tokens"].tolist() == [0, 50, 100] * 2
    with pytest.raises(ValueError, match="x='seconds'"):
        accuracy_curves(frame, x="seconds")


def test_accuracy_curves_of_one_seed_have_no_interval():
    table = accuracy_curves(together(run("gspo", 0, line(0.1, 0.2))), x="step")
    assert table["mean"].tolist() == [0.1, 0.2] and table["seeds"].tolist() == [1, 1]
    assert table[["low", "high"]].isna().all().all()


def test_accuracy_curves_by_agent():
    table = accuracy_curves(study(), by=("agents", "method", "agent"), x="step")
    ends = table[(table["step"] == 2) & (table["method"] == "gspo")].set_index("agent")["mean"]
    assert ends.to_dict() == {"A": pytest.approx(0.5), "B": pytest.approx(0.7)}


def test_accuracy_curves_have_no_mean_where_an_agent_is_missing():
    frame = together(run("gspo", 0, {0: (0.0, 0.2), 1: (0.4, None)}))
    table = accuracy_curves(frame, x="step")
    assert table["step"].tolist() == [0]
    assert len(table.attrs["notes"]) == 1 and "pair-gspo-0- at step 1" in table.attrs["notes"][0]
    frame.loc[0, "value"] = np.nan
    assert "at step 0" in accuracy_curves(frame).attrs["notes"][0]


def test_accuracy_curves_name_an_unknown_metric():
    with pytest.raises(ValueError, match=r"'avg@2'; did you mean 'avg@1'"):
        accuracy_curves(study(), metric="avg@2")


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def two_test_sets():
    runs = []
    for seed, gain in ((0, 0.0), (1, 0.1), (2, 0.2)):
        for method, base in (("gspo", 0.4), ("hacpo", 0.6)):
            for name, shift in (("sums", 0.0), ("mixed", 0.1)):
                values = {0: (0.1, 0.1), 2: (base + gain + shift, base)}
                runs.append(run(method, seed, values, metric=f"avg@1/{name}"))
            runs.append(run(method, seed, {0: (0.1, 0.1), 2: (0.9, 0.9)}))
    return together(*runs)


def test_final_table_has_each_set_and_their_average():
    table = final_table(two_test_sets())
    assert list(dict.fromkeys(table["set"])) == ["sums", "mixed", "average"]
    of_a = table[table["agent"] == "A"]
    assert list(dict.fromkeys(of_a["method"])) == [BEFORE, "hacpo", "gspo"] and table["agent"].iloc[-1] == MEAN
    gspo = of_a[of_a["method"] == "gspo"].set_index("set")
    assert gspo["mean"].to_dict() == pytest.approx({"sums": 0.5, "mixed": 0.6, "average": 0.55})
    assert list(gspo["seeds"]) == [3, 3, 3]
    average = gspo.loc["average"]
    assert average["high"] - average["mean"] == pytest.approx(T2 * 0.1 / math.sqrt(3), rel=1e-6)
    # B has the same accuracy for all seeds, so the agents' mean varies half as much as A
    mean = table[(table["agent"] == MEAN) & (table["method"] == "gspo")].set_index("set").loc["sums"]
    assert mean["high"] - mean["mean"] == pytest.approx(T2 * 0.05 / math.sqrt(3), rel=1e-6)
    before = of_a[of_a["method"] == BEFORE]
    assert before["mean"].tolist() == pytest.approx([0.1] * 3) and before["low"].isna().all()


def test_final_table_has_no_average_over_fewer_sets():
    frame = two_test_sets()
    frame = frame[~((frame["metric"] == "avg@1/mixed") & (frame["method"] == "gspo"))]
    table = final_table(frame).set_index(["agent", "method", "set"])
    assert ("A", "gspo", "average") not in table.index
    assert table.loc[("A", "hacpo", "average"), "mean"] == pytest.approx(0.75)


# ── rollouts to reach ────────────────────────────────────────────────────────────────────────────────────────────────


def test_rollouts_to_reach_interpolate_and_count_runs_that_never_reach_it():
    frame = together(
        run("gspo", 0, line(0, 0.4, 0.8)),  # 0.6 at one and a half steps: 15 rollouts
        run("gspo", 1, line(0, 0.2, 0.6)),  # 20
        run("gspo", 2, line(0, 0.2, 0.5)),  # never
        run("hacpo", 0, line(0.7, 0.8, 0.8)),  # at step 0
        run("naive", 0, line(0, 0.1, 0.1)),
    )
    table = rollouts_to_reach(frame, 0.6).set_index("method")
    row = table.loc["gspo"]
    assert (row["median"], row["earliest"], row["latest"]) == (pytest.approx(20), pytest.approx(15), math.inf)
    assert (row["reached"], row["seeds"], row["sampled"]) == (2, 3, 20)
    assert table.loc["hacpo", "median"] == 0 and table.loc["naive", "median"] == math.inf
    assert "2 of 5 runs" in rollouts_to_reach(frame, 0.6).attrs["notes"][0]
    none = rollouts_to_reach(frame, {"other": 0.5})
    assert len(none) == 0 and "pair" in none.attrs["notes"][0]


def test_targets_are_a_share_of_the_improvement_of_the_baseline():
    # gspo improves from 0.1 to the mean of 0.5 and 0.7
    assert targets(study(), share=0.5) == {"pair": pytest.approx(0.1 + 0.5 * 0.5)}
    assert targets(study(), against="grpo") == {}


# ── differences ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_paired_differences_are_of_the_same_seed():
    table = paired_differences(study(), "gspo", step=1).set_index("agent")
    # A: 0.4 and 0.2; B: 0.4 and 0.2; so is the mean of agents
    for agent in ("A", "B", MEAN):
        row = table.loc[agent]
        assert row["mean"] == pytest.approx(0.3) and row["high"] - row["mean"] == pytest.approx(T1 * 0.1, rel=1e-6)
        assert row["seeds"] == 2 and row["unpaired"] == ""
    for last in (2, 9):  # B: (0.4 + 0.2) / 2 and (0.2 + 0.2) / 2; step 0 is never part of the end
        end = paired_differences(study(), "gspo", last=last).set_index("agent")
        assert end.loc["B", "mean"] == pytest.approx((0.3 + 0.2) / 2)


def test_paired_differences_count_and_name_unpaired_seeds():
    frame = together(
        *(run("gspo", s, line(0, 0.5)) for s in (0, 1, 2)), *(run("hacpo", s, line(0, 0.6)) for s in (1, 2, 7)),
        run("naive", 9, line(0, 1)), run("hacpo", 0, line(0, 1), agents="trio"),
    )  # fmt: skip
    table = paired_differences(frame, "gspo")
    row = table[(table["method"] == "hacpo") & (table["agent"] == MEAN)].iloc[0]
    assert (row["seeds"], row["unpaired"]) == (2, "0, 7") and row["mean"] == pytest.approx(0.1)
    alone = table[(table["method"] == "naive") & (table["agent"] == MEAN)].iloc[0]
    assert alone["seeds"] == 0 and np.isnan(alone["mean"]) and alone["unpaired"] == "0, 1, 2, 9"
    notes = " ".join(table.attrs["notes"])
    assert "trio of: gspo" in notes and "hacpo and gspo on pair" in notes and "seed 0, 7" in notes
    with pytest.raises(ValueError, match="step 5; there are 0, 1"):
        paired_differences(frame, step=5)
    with pytest.raises(ValueError, match="last=0"):
        paired_differences(frame, last=0)


def test_ahead_at_half_compares_at_half_the_rollouts():
    frame = together(
        *(run("gspo_x2", s, line(0, 0.2, 0.4, 0.6, 0.8)) for s in (0, 1)),  # 20 rollouts per step and agent: 80
        run("hacpo", 0, line(0, 0.5, 0.7, 0.8, 0.9)), run("hacpo", 1, line(0, 0.7, 0.9, 0.8, 0.9)),
    )  # fmt: skip
    table = ahead_at_half(frame, shares=(0.25, 0.5, 1.0), last=1).set_index("point")
    assert table["rollouts_against"].tolist() == [20, 40, 80, 80]
    assert table["rollouts_method"].tolist() == [10, 20, 40, 40]
    assert table.loc["25%", "mean"] == pytest.approx((0.5 + 0.7) / 2 - 0.2)
    assert table.loc["50%", "mean"] == pytest.approx(0.4)
    assert table.loc["50%", "low"] == pytest.approx(0.4 - T1 * 0.1, rel=1e-6)
    assert table.loc["100%", "mean"] == table.loc["end", "mean"] == pytest.approx(0.1)
    # between evaluations: gspo_x2 at 30 rollouts (0.3), hacpo at 15 (0.6 and 0.8)
    assert ahead_at_half(frame, shares=(0.375,))["mean"].iloc[0] == pytest.approx(0.4)


def test_ahead_at_half_has_no_value_beyond_the_sampled_rollouts():
    frame = together(run("gspo_x2", 0, line(0, 0.2, 0.4)), run("hacpo", 0, line(0, 0.5), steps=1))
    table = ahead_at_half(frame, shares=(1.0,)).set_index("point")
    assert np.isnan(table.loc["100%", "mean"]) and table.loc["100%", "seeds"] == 0
    assert "never sampled 20 rollouts" in table.attrs["notes"][-1]
    empty = ahead_at_half(study())
    assert len(empty) == 0 and "gspo_x2" in empty.attrs["notes"][0]


def test_final_text_has_a_column_for_each_set():
    text = final_text(final_table(two_test_sets()))
    assert list(text.columns) == ["sums", "mixed", "average"]
    assert (
        text.loc[("pair", "A", "hacpo"), "sums"] == "70.0 ± 24.8" and text.loc[("pair", "A", BEFORE), "sums"] == "10.0"
    )


# ── claims ───────────────────────────────────────────────────────────────────────────────────────────────────────────


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
