"""The command line."""

import pandas as pd
import pytest
from click.testing import CliRunner
from made_runs import line, run, study, together

from hacpo_kit.cli import main


def command(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


# ── report ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_report_leaves_page_notebook_and_table(tmp_path):
    source = tmp_path / "some.parquet"
    together(study(), run("naive", 0, line(0, 0.3), finished=False)).to_parquet(source, index=False)
    page = tmp_path / "out" / "page.html"
    result = command("report", source, "--out", page, "--quiet", "-p", "margin", "0.02")
    assert result.exit_code == 0, result.output
    html = page.read_text(encoding="utf-8")
    assert "pair-naive-0-" in result.output and "pair-naive-0-" in html and "hacpo ends ahead of gspo" in html
    assert html.count("data:image/png;base64,") >= 3
    assert "compare.usable" not in html and "compare.usable" in page.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert len(pd.read_parquet(page.with_suffix(".parquet"))) == len(pd.read_parquet(source))


def test_report_refuses_runs_that_cannot_be_compared(tmp_path):
    source = tmp_path / "some.parquet"
    together(run("gspo", 0, line(0, 1), finished=False)).to_parquet(source, index=False)
    for arguments, message in (
        ([source], "1 unfinished"),
        ([source, "--out", tmp_path / "page"], "HTML page"),
        ([tmp_path], "no runs in"),
    ):
        result = command("report", *arguments)
        assert result.exit_code == 2 and message in result.output, result.output
    assert [p.name for p in tmp_path.iterdir()] == ["some.parquet"]
