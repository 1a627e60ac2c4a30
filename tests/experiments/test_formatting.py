"""Tables as text."""

from test_comparisons import two_test_sets

from hacpo_kit.experiments.compare import final_table, final_text
from hacpo_kit.experiments.statistics import BEFORE


def test_final_text_has_a_column_for_each_set():
    text = final_text(final_table(two_test_sets()))
    assert list(text.columns) == ["sums", "mixed", "average"]
    assert (
        text.loc[("pair", "A", "hacpo"), "sums"] == "70.0 ± 24.8" and text.loc[("pair", "A", BEFORE), "sums"] == "10.0"
    )
