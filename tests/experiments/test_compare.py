"""Comparisons of methods against values computed by hand, and everything that a folder of runs may lack."""

import math

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from hacpo_kit.cli import main
from hacpo_kit.config import METHODS, Config
from hacpo_kit.experiments import compare
from hacpo_kit.views.plots import forest, method_curves, method_styles

T1, T2 = 12.706205, 4.302653  # 97.5 % quantile of t with 1 and 2 degrees of freedom


def run(method, seed, values, *, agents="pair", finished=True, metric="avg@1", steps=None, **settings):
    """Rows of one run of agents A and B: `values` is step → (A, B), 10 rollouts a step and agent (gspo_x2: 20)."""
    plain = {**METHODS.get(method, {}), **settings}
    config = {**Config.from_dict({"method": method, **plain, "seed": seed}).to_dict()}
    config.pop("version")
    name = "-".join([agents, method, str(seed), *map(str, settings.values()), str(steps or "")])
    rows = [
        {"run": name, "step": step, "agent": agent, "metric": metric, "value": value,
         "rollouts": 20 * step * config["oversample"], "tokens": 100 * step, "seconds": 1.0 * step}
        for step, pair in values.items() for agent, value in zip("AB", pair, strict=True) if value is not None
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(**config, agents=agents, steps=steps or max(values), finished=finished)


def together(*runs):
    frame = pd.concat(runs, ignore_index=True)
    for column in ("run", "agent", "metric", "method", "agents"):
        frame[column] = frame[column].astype("category")
    return frame


def line(*points):
    """The same for both agents at steps 0, 1, 2, …"""
    return {step: (value, value) for step, value in enumerate(points)}


def study():
    return together(
        run("gspo", 0, {0: (0.0, 0.2), 1: (0.2, 0.4), 2: (0.4, 0.6)}),
        run("gspo", 1, {0: (0.0, 0.2), 1: (0.2, 0.6), 2: (0.6, 0.8)}),
        run("hacpo", 0, {0: (0.0, 0.2), 1: (0.6, 0.8), 2: (0.8, 0.8)}),
        run("hacpo", 1, {0: (0.0, 0.2), 1: (0.4, 0.8), 2: (0.8, 1.0)}),
    )


# ── curves ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_interval_is_over_seeds_of_the_mean_over_agents():
    table = compare.accuracy_curves(study())
    row = table[(table["method"] == "gspo") & (table["step"] == 1)].iloc[0]
    # seeds: (0.2 + 0.4) / 2 = 0.3 and (0.2 + 0.6) / 2 = 0.4; standard error 0.0707 / √2 = 0.05
    assert (row["mean"], row["seeds"]) == (pytest.approx(0.35), 2)
    assert (row["high"] - row["mean"], row["mean"] - row["low"]) == pytest.approx((T1 * 0.05, T1 * 0.05), rel=1e-6)
    assert list(table["method"].unique()) == ["hacpo", "gspo"]  # the package's order


def test_rollouts_are_per_agent_and_a_doubled_method_pays_twice():
    frame = together(run("gspo", 0, line(0, 1, 1)), run("gspo_x2", 0, line(0, 1, 1)))
    table = compare.accuracy_curves(frame)
    assert table[table["method"] == "gspo"]["rollouts"].tolist() == [0, 10, 20]
    assert table[table["method"] == "gspo_x2"]["rollouts"].tolist() == [0, 20, 40]
    assert compare.accuracy_curves(frame, x="tokens")["tokens"].tolist() == [0, 50, 100] * 2
    with pytest.raises(ValueError, match="x='seconds': it must be step, rollouts or tokens"):
        compare.accuracy_curves(frame, x="seconds")


def test_one_seed_has_a_mean_and_no_interval():
    table = compare.accuracy_curves(together(run("gspo", 0, line(0.1, 0.2))), x="step")
    assert table["mean"].tolist() == [0.1, 0.2] and table["seeds"].tolist() == [1, 1]
    assert table[["low", "high"]].isna().all().all()


def test_agents_can_stay_apart():
    table = compare.accuracy_curves(study(), by=("agents", "method", "agent"), x="step")
    ends = table[(table["step"] == 2) & (table["method"] == "gspo")].set_index("agent")["mean"]
    assert ends.to_dict() == {"A": pytest.approx(0.5), "B": pytest.approx(0.7)}


def test_a_missing_agent_makes_no_mean_and_is_named():
    frame = together(run("gspo", 0, {0: (0.0, 0.2), 1: (0.4, None)}))
    table = compare.accuracy_curves(frame, x="step")
    assert table["step"].tolist() == [0]
    assert table.attrs["notes"] == [
        "avg@1 of an agent is missing, so there is no mean over agents: pair-gspo-0- at step 1."
    ]
    frame.loc[0, "value"] = np.nan
    assert "1 values of avg@1 are no numbers" in compare.accuracy_curves(frame).attrs["notes"][0]


# ── which runs ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_unfinished_runs_and_repeats_are_excluded_and_named():
    again = run("gspo", 0, line(0, 0.9)).assign(run="z-again")
    frame = together(run("gspo", 0, line(0, 0.5)), again, run("hacpo", 3, line(0, 0.1), finished=False))
    kept, notes = compare.usable(frame)
    assert set(kept["run"].astype(str)) == {"pair-gspo-0-"} and list(kept["method"].cat.categories) == ["gspo"]
    assert notes == ["1 unfinished run left out: pair-hacpo-3-.", "1 repeat of a seed left out: z-again."]
    assert compare.usable(kept)[1] == []
    with pytest.raises(ValueError, match=r"no finished run to compare \(1 unfinished\)"):
        compare.usable(frame[frame["method"] == "hacpo"])
    with pytest.raises(ValueError, match="no column 'finished'"):
        compare.usable(frame.drop(columns="finished"))


def test_settings_are_never_pooled_with_seeds():
    frame = together(*(run("hacpo", s, line(0, a / 10), alpha=a) for s in (0, 1) for a in (1.0, 3.0)))
    frame = together(frame, run("hacpo", 0, line(0, 0.7, 0.7, 0.7), steps=3))
    kept, notes = compare.usable(frame)
    assert list(kept["method"].cat.categories) == ["hacpo", "hacpo · alpha=3.0 · steps=1", "hacpo · steps=1"]
    assert notes[0].startswith("hacpo was run on pair with several values of alpha, steps: hacpo, hacpo · alpha=3.0")
    ends = compare.final_table(frame)[("avg@1", "mean")].xs(compare.MEAN, level="agent").droplevel("agents")
    assert ends["hacpo · alpha=3.0 · steps=1"] == pytest.approx(0.3)


def test_a_run_that_changed_on_the_way_is_not_pooled_with_the_others():
    """Not even where it is alone: it is no run of its method."""
    changed = run("gspo", 7, line(0.0, 0.5)).assign(changed="lr=1e-05 from step 1")
    same_seed = run("gspo", 0, line(0.0, 0.5)).assign(changed="lr=1e-05 from step 1", run="other")
    for frame in (together(changed, same_seed), together(changed, same_seed, run("gspo", 0, line(0.0, 0.4)))):
        usable, notes = compare.usable(frame)
        apart = usable[usable["method"] == "gspo · lr=1e-05 from step 1"]
        assert set(apart["run"]) == {"other", changed["run"][0]} and usable["run"].nunique() == frame["run"].nunique()
        assert "Settings changed within 2 runs" in notes[0] and "other" in notes[0]
        again, more = compare.usable(usable)
        assert again.equals(usable) and not more
        assert not compare.accuracy_curves(frame).empty


def test_a_method_of_one_s_own_keeps_its_name_and_unequal_settings_are_told():
    mine = run("hacpo", 0, line(0, 1), lr=3e-4).assign(method="mine", run="mine")
    frame = together(mine, run("hacpo", 0, line(0, 1), lr=3e-4), run("gspo", 0, line(0, 1)))
    kept, notes = compare.usable(frame)
    assert list(kept["method"].cat.categories) == ["hacpo", "gspo", "mine"]
    assert len(notes) == 1 and notes[0].startswith("On pair the methods differ in lr too (mine: 0.0003; hacpo: 0.0003")


def test_an_unknown_metric_is_named():
    with pytest.raises(ValueError, match=r"no metric 'avg@2'; did you mean 'avg@1'\?"):
        compare.accuracy_curves(study(), metric="avg@2")


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sets_of_problems():
    runs = []
    for seed, gain in ((0, 0.0), (1, 0.1), (2, 0.2)):
        for method, base in (("gspo", 0.4), ("hacpo", 0.6)):
            for name, shift in (("sums", 0.0), ("mixed", 0.1)):
                values = {0: (0.1, 0.1), 2: (base + gain + shift, base)}
                runs.append(run(method, seed, values, metric=f"avg@1/{name}"))
            runs.append(run(method, seed, {0: (0.1, 0.1), 2: (0.9, 0.9)}))
    return together(*runs)


def test_final_table_has_a_column_for_each_set_and_their_average():
    table = compare.final_table(sets_of_problems())
    assert list(dict.fromkeys(table.columns.get_level_values(0))) == ["sums", "mixed", "average", "seeds"]
    row = table.loc[("pair", "A", "gspo")]
    assert row[("sums", "mean")] == pytest.approx(0.5) and row[("mixed", "mean")] == pytest.approx(0.6)
    assert row[("average", "mean")] == pytest.approx(0.55) and row[("seeds", "")] == 3
    assert row[("average", "half")] == pytest.approx(T2 * 0.1 / math.sqrt(3), rel=1e-6)
    # the agents' mean moves half as much from seed to seed, since B does not move
    assert table.loc[("pair", compare.MEAN, "gspo"), ("sums", "half")] == pytest.approx(
        T2 * 0.05 / math.sqrt(3), rel=1e-6
    )
    assert [m for _, a, m in table.index if a == "A"] == [compare.BEFORE, "hacpo", "gspo"]
    assert table.loc[("pair", "A", compare.BEFORE), ("sums", "mean")] == pytest.approx(0.1)


def test_the_best_method_of_an_agent_is_bold_and_a_lone_one_is_not():
    html = compare.styled(compare.final_table(sets_of_problems())).to_html()
    assert "70.0 ± 24.8" in html and html.count("font-weight: bold") == 1  # one rule for all bold cells
    lone = compare.styled(compare.final_table(together(run("gspo", 0, line(0, 0.5))))).to_html()
    assert "bold" not in lone and ">50.0<" in lone and "nan" not in lone


def test_an_average_over_fewer_sets_is_no_average():
    frame = sets_of_problems()
    frame = frame[~((frame["metric"] == "avg@1/mixed") & (frame["method"] == "gspo"))]
    table = compare.final_table(frame)
    assert np.isnan(table.loc[("pair", "A", "gspo"), ("average", "mean")])
    assert table.loc[("pair", "A", "hacpo"), ("average", "mean")] == pytest.approx(0.75)


def test_ablations_are_paired_with_hacpo_early_and_at_the_end():
    frame = together(
        *(run("hacpo", s, line(0, 0.5, 0.6, 0.8, 0.9)) for s in (0, 1)),
        *(run("no_clip", s, line(0, 0.3 + 0.1 * s, 0.5, 0.6, 0.7)) for s in (0, 1)),
    )
    table = compare.ablation_table(frame, last=2).set_index(["method", "when"])
    early, end = table.loc[("no_clip", "early")], table.loc[("no_clip", "end")]
    assert (early["step"], end["step"]) == (1, 4)  # a quarter of 4 steps
    assert early["difference"] == pytest.approx(-0.15)
    assert early["difference_low"] == pytest.approx(-0.15 - T1 * 0.05, rel=1e-6)
    assert end["mean"] == pytest.approx(0.65) and end["difference"] == pytest.approx(-0.2) and end["pairs"] == 2
    assert np.isnan(table.loc[("hacpo", "end"), "difference"])
    notes = compare.ablation_table(frame).attrs["notes"]
    assert notes == ["No finished run on pair of: no_capability_baseline, no_discrepancy, alpha=0, delta_step=0."]
    assert len(compare.ablation_table(together(run("gspo", 0, line(0, 1))))) == 0


# ── rollouts to reach ────────────────────────────────────────────────────────────────────────────────────────────


def test_rollouts_to_reach_go_straight_between_evaluations_and_count_who_never_does():
    frame = together(
        run("gspo", 0, line(0, 0.4, 0.8)),  # 0.6 at one and a half steps: 15 rollouts
        run("gspo", 1, line(0, 0.2, 0.6)),  # 20
        run("gspo", 2, line(0, 0.2, 0.5)),  # never
        run("hacpo", 0, line(0.7, 0.8, 0.8)),  # from the start
        run("naive", 0, line(0, 0.1, 0.1)),
    )
    table = compare.rollouts_to_reach(frame, 0.6).set_index("method")
    row = table.loc["gspo"]
    assert (row["median"], row["earliest"], row["latest"]) == (pytest.approx(20), pytest.approx(15), math.inf)
    assert (row["reached"], row["seeds"], row["sampled"]) == (2, 3, 20)
    assert table.loc["hacpo", "median"] == 0 and table.loc["naive", "median"] == math.inf
    assert "2 of 5 runs never reach it" in compare.rollouts_to_reach(frame, 0.6).attrs["notes"][0]
    none = compare.rollouts_to_reach(frame, {"other": 0.5})
    assert len(none) == 0 and none.attrs["notes"] == ["No accuracy to reach was given for pair."]


def test_targets_are_a_share_of_the_way_of_the_baseline():
    # gspo: from 0.1 to the mean of 0.5 and 0.7
    assert compare.targets(study(), share=0.5) == {"pair": pytest.approx(0.1 + 0.5 * 0.5)}
    assert compare.targets(study(), against="grpo") == {}


# ── differences ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_differences_are_of_the_same_seed():
    table = compare.paired_differences(study(), "gspo", step=1).set_index("agent")
    # A: 0.4 and 0.2; B: 0.4 and 0.2; the mean of agents alike
    for agent in ("A", "B", compare.MEAN):
        row = table.loc[agent]
        assert row["mean"] == pytest.approx(0.3) and row["high"] - row["mean"] == pytest.approx(T1 * 0.1, rel=1e-6)
        assert row["seeds"] == 2 and row["unpaired"] == ""
    for last in (2, 9):  # B: (0.4 + 0.2) / 2 and (0.2 + 0.2) / 2; step 0 is never part of the end
        end = compare.paired_differences(study(), "gspo", last=last).set_index("agent")
        assert end.loc["B", "mean"] == pytest.approx((0.3 + 0.2) / 2)


def test_unpaired_seeds_are_counted_and_named():
    frame = together(
        *(run("gspo", s, line(0, 0.5)) for s in (0, 1, 2)), *(run("hacpo", s, line(0, 0.6)) for s in (1, 2, 7)),
        run("naive", 9, line(0, 1)), run("hacpo", 0, line(0, 1), agents="trio"),
    )  # fmt: skip
    table = compare.paired_differences(frame, "gspo")
    row = table[(table["method"] == "hacpo") & (table["agent"] == compare.MEAN)].iloc[0]
    assert (row["seeds"], row["unpaired"]) == (2, "0, 7") and row["mean"] == pytest.approx(0.1)
    alone = table[(table["method"] == "naive") & (table["agent"] == compare.MEAN)].iloc[0]
    assert alone["seeds"] == 0 and np.isnan(alone["mean"]) and alone["unpaired"] == "0, 1, 2, 9"
    assert "No finished run of gspo on trio, so nothing can be compared with it there." in table.attrs["notes"]
    assert "hacpo and gspo on pair: only one of them has seed 0, 7; not in the difference." in table.attrs["notes"]
    with pytest.raises(ValueError, match="no run was evaluated at step 5; there are 0, 1"):
        compare.paired_differences(frame, step=5)
    with pytest.raises(ValueError, match="last=0"):
        compare.paired_differences(frame, last=0)


def test_ends_at_different_steps_are_told():
    frame = together(run("gspo", 0, line(0, 0.5, 0.6)), run("hacpo", 0, line(0, 0.5), steps=1))
    notes = compare.paired_differences(frame).attrs["notes"]
    assert "On pair the runs end at different steps (hacpo: 1; gspo: 2)." in notes


def test_ahead_at_half_compares_at_half_the_rollouts():
    frame = together(
        *(run("gspo_x2", s, line(0, 0.2, 0.4, 0.6, 0.8)) for s in (0, 1)),  # 20 rollouts a step and agent: 80
        run("hacpo", 0, line(0, 0.5, 0.7, 0.8, 0.9)), run("hacpo", 1, line(0, 0.7, 0.9, 0.8, 0.9)),
    )  # fmt: skip
    table = compare.ahead_at_half(frame, shares=(0.25, 0.5, 1.0), last=1).set_index("point")
    assert table["rollouts_against"].tolist() == [20, 40, 80, 80] and table["rollouts_method"].tolist() == [
        10,
        20,
        40,
        40,
    ]
    assert table.loc["25%", "mean"] == pytest.approx((0.5 + 0.7) / 2 - 0.2)
    assert table.loc["50%", "mean"] == pytest.approx(0.4) and table.loc["50%", "low"] == pytest.approx(
        0.4 - T1 * 0.1, rel=1e-6
    )
    assert table.loc["100%", "mean"] == table.loc["end", "mean"] == pytest.approx(0.1)
    # between evaluations: gspo_x2 at 30 rollouts (0.3), hacpo at 15 (0.6 and 0.8)
    assert compare.ahead_at_half(frame, shares=(0.375,))["mean"].iloc[0] == pytest.approx(0.4)


def test_what_was_never_sampled_has_no_difference():
    frame = together(run("gspo_x2", 0, line(0, 0.2, 0.4)), run("hacpo", 0, line(0, 0.5), steps=1))
    table = compare.ahead_at_half(frame, shares=(1.0,)).set_index("point")
    assert np.isnan(table.loc["100%", "mean"]) and table.loc["100%", "seeds"] == 0
    assert "On pair hacpo never sampled 20 rollouts per agent." in table.attrs["notes"]
    empty = compare.ahead_at_half(study())
    assert len(empty) == 0 and empty.attrs["notes"] == ["No finished run of gspo_x2 on pair."]


# ── what held ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.001, 0.1, "ahead"), (-0.009, 0.1, "not worse"), (-0.02, 0.1, "undecided"), (-0.009, -0.001, "slightly behind"),
     (-0.1, -0.001, "behind"), (float("nan"), float("nan"), "no interval")],
)  # fmt: skip
def test_verdicts(low, high, said):
    assert compare.verdict(low, high, margin=0.01) == said


def test_claims_hold_fail_or_stay_open():
    def three(method, start, end, noise=0.01):
        return [
            run(method, s, {0: (0, 0), 1: (start, start), 2: (end + s * noise, end + s * noise)}) for s in (0, 1, 2)
        ]

    frame = together(
        *three("hacpo", 0.5, 0.8), *three("gspo", 0.2, 0.85), *three("gspo_x2", 0.3, 0.801), *three("naive", 0.5, 0.7, 0.2),
        run("no_clip", 0, line(0, 0.5, 0.7)), run("no_discrepancy", 7, line(0, 0.5, 0.7)),
    )  # fmt: skip
    table = compare.claims(frame, last=1).set_index("claim")
    assert table["result"].to_dict() == {
        "hacpo is ahead of gspo early (step 1)": "held",
        "hacpo ends ahead of gspo": "did not hold",
        "no agent ends worse than with gspo": "did not hold",
        "half way, hacpo is ahead of gspo_x2 with half of its rollouts": "held",
        "hacpo ends no worse than gspo_x2 with half of its rollouts": "held",  # 0.1 points behind, the margin is 1
        "hacpo ends ahead of naive sharing": "undecided",
        "without a part (no_capability_baseline), hacpo ends lower": "not run",
        "without a part (no_discrepancy), hacpo ends lower": "no common seed",
        "without a part (alpha=0), hacpo ends lower": "not run",
        "without a part (delta_step=0), hacpo ends lower": "not run",
        "without a part (no_clip), hacpo ends lower": "no interval",
    }
    assert table.loc["without a part (no_clip), hacpo ends lower", "mean"] == pytest.approx(0.1)
    assert table.loc["hacpo ends ahead of gspo", "mean"] == pytest.approx(-0.05)


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_method_has_one_colour_on_every_page():
    whole = pd.Series(pd.Categorical(["hacpo", "gspo", "mine", "yours"]))
    part = whole[whole == "yours"]
    assert method_styles(part) == method_styles(whole)
    styles = method_styles(whole)
    assert len({styles[m] for m in (*METHODS, "mine", "yours")}) == len(METHODS) + 2


def test_curves_have_a_panel_a_set_a_band_and_a_place_for_one_seed():
    frame = together(study(), run("gspo", 0, line(0, 1), agents="trio"))
    table = compare.accuracy_curves(frame)
    figure = method_curves(table, x="rollouts", y="accuracy", title="t", reference=0.5)
    assert (
        figure.layout.meta["panels"] == ["pair", "trio"]
        and figure.layout.title.text == "t (95 % intervals over 1 to 2 seeds)"
    )
    drawn = [(t.name, t.xaxis, t.fill) for t in figure.data]
    assert [d for d in drawn if d[2]] == [(None, "x", "toself")] * 2  # one seed has no band
    assert ("gspo", "x2", None) in drawn and len(figure.layout.shapes) == 2
    assert [t.showlegend for t in figure.data if t.name == "gspo"] == [True, False]
    assert len(figure.png()) > 1000
    with pytest.raises(ValueError, match="several values of a method at one step"):
        method_curves(table.assign(all=""), y="accuracy", title="t", panel="all")
    with pytest.raises(KeyError, match="no column 'tokens'"):
        method_curves(table, x="tokens", y="accuracy", title="t")


def test_forest_shows_the_interval_of_the_mean_and_every_agent():
    figure = forest(compare.paired_differences(study(), "gspo", step=1), title="t", margin=0.01)
    agents, mean = figure.data
    assert list(agents.text) == ["A", "B"] and agents.error_x.array is None
    assert mean.x[0] == pytest.approx(30) and mean.error_x.array[0] == pytest.approx(100 * T1 * 0.1, rel=1e-6)
    assert list(figure.layout.yaxis.ticktext) == ["hacpo"]
    strip = next(s for s in figure.layout.shapes if s.type == "rect")
    assert (strip.x0, strip.x1) == (-1, 1)
    assert len(figure.png()) > 1000


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_report_leaves_page_notebook_and_table(tmp_path):
    source = tmp_path / "some.parquet"
    together(study(), run("naive", 0, line(0, 0.3), finished=False)).to_parquet(source, index=False)
    page = tmp_path / "out" / "page.html"
    result = CliRunner().invoke(main, ["report", str(source), "--out", str(page), "--quiet", "-p", "margin", "0.02"])
    assert result.exit_code == 0, result.output
    assert "note      1 unfinished run left out: pair-naive-0-." in result.output
    html = page.read_text(encoding="utf-8")
    assert "1 unfinished run left out: pair-naive-0-." in html and "hacpo ends ahead of gspo" in html
    assert html.count("data:image/png;base64,") >= 3
    assert "compare.usable" not in html and "compare.usable" in page.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert len(pd.read_parquet(page.with_suffix(".parquet"))) == len(pd.read_parquet(source))
    assert "No finished run of gspo_x2 on pair." in html


def test_report_refuses_what_it_cannot_compare(tmp_path):
    source = tmp_path / "some.parquet"
    together(run("gspo", 0, line(0, 1), finished=False)).to_parquet(source, index=False)
    for arguments, message in (
        ([source], "no finished run to compare (1 unfinished)"),
        ([source, "--out", tmp_path / "page"], "give the name of an HTML page"),
        ([tmp_path], "holds no runs"),
    ):
        result = CliRunner().invoke(main, ["report", *map(str, arguments)])
        assert result.exit_code == 2 and message in result.output, result.output
    assert [p.name for p in tmp_path.iterdir()] == ["some.parquet"]


def test_what_could_not_be_read_reaches_the_page(tmp_path, monkeypatch):
    import warnings

    def half_read(path):
        warnings.warn("1 of 2 runs in x: broken", stacklevel=2)
        return study()

    monkeypatch.setattr("hacpo_kit.experiments.sweeps.read_runs", half_read)
    frame = compare.load(tmp_path)
    frame.to_parquet(tmp_path / "t.parquet", index=False)
    stored = pd.read_parquet(tmp_path / "t.parquet")
    assert compare.usable(stored)[1] == ["Not all could be read: 1 of 2 runs in x: broken."]
    with pytest.raises(FileNotFoundError, match="no folder of runs"):
        compare.load(tmp_path / "nowhere")


def test_no_worse_is_said_only_of_what_the_whole_interval_says():
    """With a margin of one point: an agent a little behind must not hide one that may be far behind, nor count as worse."""
    table = pd.DataFrame(
        {
            "method": "hacpo",
            "agent": ["a", "b"],
            "mean": [-0.004, -0.07],
            "low": [-0.008, -0.2],
            "high": [-0.001, 0.05],
            "seeds": 5,
        }
    )
    assert compare._result(compare._weakest(table, "hacpo", 0.01), 0.01) == "undecided"
    close = {"mean": -0.015, "low": -0.03, "high": -0.002, "seeds": 5}
    assert compare._result(close, 0.01) == "undecided"
    assert compare._result(close | {"high": -0.012}, 0.01) == "did not hold"
    assert compare._result(close, 0.0) == "did not hold"
