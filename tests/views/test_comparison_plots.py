"""Figures of comparisons: curves of methods, and forests of differences."""

import pandas as pd
import pytest
from made_runs import T1, line, run, study, together

from hacpo_kit.config import METHODS
from hacpo_kit.experiments import compare
from hacpo_kit.views.plots import forest, method_curves, method_styles


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
    with pytest.raises(ValueError, match="several values of a method"):
        method_curves(table.assign(all=""), y="accuracy", title="t", panel="all")
    with pytest.raises(KeyError, match="no column 'tokens'"):
        method_curves(table, x="tokens", y="accuracy", title="t")


def test_forest_shows_the_interval_of_the_mean_and_every_agent():
    figure = forest(compare.paired_differences(study(), "gspo", step=1), title="t", margin=0.01)
    agents, mean = figure.data
    assert list(agents.text) == ["A", "B"] and agents.error_x.array is None
    assert mean.x[0] == pytest.approx(30) and mean.error_x.array[0] == pytest.approx(100 * T1 * 0.1, rel=1e-6)
    assert list(figure.layout.yaxis.ticktext) == ["hacpo"]
    margin = next(s for s in figure.layout.shapes if s.type == "rect")
    assert (margin.x0, margin.x1) == (-1, 1)
    assert len(figure.png()) > 1000
