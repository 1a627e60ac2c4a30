"""Tables as text."""

from made_runs import line, run, together
from test_comparisons import two_test_sets

from hacpo_kit.experiments.comparisons import final_table
from hacpo_kit.experiments.formatting import styled


def test_styled_marks_the_best_method_of_an_agent():
    html = styled(final_table(two_test_sets())).to_html()
    assert "70.0 ± 24.8" in html and html.count("font-weight: bold") == 1  # one CSS rule for all bold cells


def test_styled_marks_no_single_method():
    html = styled(final_table(together(run("gspo", 0, line(0, 0.5))))).to_html()
    assert "bold" not in html and ">50.0<" in html and "nan" not in html
