"""Curves of runs and methods, and forests of differences."""

import numpy as np
import pandas as pd
import pytest
from made_runs import T1, line, run, study, together

from hacpo_kit.config import METHODS
from hacpo_kit.experiments import compare
from hacpo_kit.views.curves import forest, learning_curves, lines, method_curves
from hacpo_kit.views.style import method_styles


def runs():
    """Two methods, two agents, three seeds, four steps."""
    rows = [
        {"method": m, "agent": a, "run": f"{m}{seed}", "step": s, "rollouts": 512 * s,
         "avg@1": 0.1 * s + 0.01 * seed + 0.2 * (m == "hacpo")}
        for m in ("hacpo", "gspo") for a in "AB" for seed in range(3) for s in range(4)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_learning_curves_have_intervals_over_runs_and_not_over_agents():
    figure = learning_curves(runs(), x="rollouts")
    interval, curve = figure.data[:2]
    assert curve.name == "hacpo" and list(curve.x) == [0, 512, 1024, 1536]
    np.testing.assert_allclose(curve.y, [0.21, 0.31, 0.41, 0.51])
    # the t quantile with 2 degrees of freedom
    assert interval.y[0] == pytest.approx(0.21 + 4.302653 * 0.01 / np.sqrt(3), rel=1e-5)
    assert "3 runs" in figure.layout.title.text
    assert len(learning_curves(runs().drop(columns="run")).data) == 2  # no interval


def test_learning_curves_have_a_colour_for_the_first_column_and_a_dash_for_the_last():
    figure = learning_curves(runs(), by=("agent", "method"))
    styles = {t.name: (t.line.color, t.line.dash) for t in figure.data if t.name}
    assert styles["A · hacpo"][0] == styles["A · gspo"][0] != styles["B · gspo"][0]
    assert styles["A · hacpo"][1] == styles["B · hacpo"][1] != styles["B · gspo"][1]


def test_learning_curves_name_a_missing_column():
    with pytest.raises(KeyError, match=r"best@9"):
        learning_curves(runs(), metric="best@9")


def test_lines_with_logarithmic_axes():
    frame = pd.DataFrame({"a": [1.0, 0.1], "b": [2.0, np.nan]}, index=pd.Index([1, 10], name="window K (steps)"))
    figure = lines(frame, title="T", y="bias", log="xy", colors=[2, 3], dashes=["solid", "dot"], level=0.5)
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")
    assert figure.layout.xaxis.title.text == "window K (steps)" and figure.layout.shapes[0].y0 == 0.5
    assert [(t.name, len(t.x), t.line.dash) for t in figure.data] == [("a", 2, "solid"), ("b", 1, "dot")]
    with pytest.raises(ValueError, match="y values of 'Zero'"):
        lines(frame - 0.1, title="Zero", y="bias", log="y")


def test_lines_with_columns_of_two_levels_fill_areas():
    columns = pd.MultiIndex.from_product([["a", "b"], ["mean", "low", "high"]])
    figure = lines(pd.DataFrame([[1, 0, 2, 5, 4, 6]] * 3, columns=columns), title="T", x="step", y="y")
    assert [(t.name, t.fill) for t in figure.data] == [(None, "toself"), ("a", None), (None, "toself"), ("b", None)]
    assert list(figure.data[2].y) == [6, 6, 6, 4, 4, 4] and list(figure.data[3].y) == [5, 5, 5]


def test_method_styles_do_not_depend_on_the_other_methods():
    whole = pd.Series(pd.Categorical(["hacpo", "gspo", "mine", "yours"]))
    part = whole[whole == "yours"]
    assert method_styles(part) == method_styles(whole)
    styles = method_styles(whole)
    assert len({styles[m] for m in (*METHODS, "mine", "yours")}) == len(METHODS) + 2


def test_method_curves_have_a_panel_for_each_set_and_an_interval():
    table = compare.accuracy_curves(together(study(), run("gspo", 0, line(0, 1), agents="trio")))
    figure = method_curves(table, x="rollouts", y="accuracy", title="t", reference=0.5)
    assert figure.layout.meta["panels"] == ["pair", "trio"]
    assert figure.layout.title.text == "t (95 % intervals over 1 to 2 seeds)"
    drawn = [(t.name, t.xaxis, t.fill) for t in figure.data]
    assert [d for d in drawn if d[2]] == [(None, "x", "toself")] * 2  # one seed has no interval
    assert ("gspo", "x2", None) in drawn and len(figure.layout.shapes) == 2
    assert [t.showlegend for t in figure.data if t.name == "gspo"] == [True, False]
    assert len(figure.png()) > 1000


def test_method_curves_refuse_several_values_at_one_place():
    table = compare.accuracy_curves(together(study(), run("gspo", 0, line(0, 1), agents="trio")))
    with pytest.raises(ValueError, match="several values of a method"):
        method_curves(table.assign(all=""), y="accuracy", title="t", panel="all")
    with pytest.raises(KeyError, match="tokens"):
        method_curves(table, x="tokens", y="accuracy", title="t")


def test_forest_has_the_interval_of_the_mean_and_every_agent():
    figure = forest(compare.paired_differences(study(), "gspo", step=1), title="t", margin=0.01)
    agents, mean = figure.data
    assert list(agents.text) == ["A", "B"] and agents.error_x.array is None
    assert mean.x[0] == pytest.approx(30) and mean.error_x.array[0] == pytest.approx(100 * T1 * 0.1, rel=1e-6)
    assert list(figure.layout.yaxis.ticktext) == ["hacpo"]
    margin = next(s for s in figure.layout.shapes if s.type == "rect")
    assert (margin.x0, margin.x1) == (-1, 1)
    assert len(figure.png()) > 1000
