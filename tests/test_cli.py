"""The commands run, resume and report."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from click.testing import CliRunner
from made_runs import line, run, study, together

from hacpo_kit.cli import main
from hacpo_kit.common.files import read_lines
from hacpo_kit.runs.checkpoints import checkpoints

SMALL = {
    "steps": 2, "prompts_per_step": 4, "n": 2, "test_size": 6, "eval_every": 1, "save_every": 1, "minibatch": 8, "alpha": 2,
}  # fmt: skip


def command(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def as_options(parameters):
    return [x for name, value in parameters.items() for x in ("-p", name, value)]


# ── run and resume ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One small run from the command line."""
    out = tmp_path_factory.mktemp("runs")
    result = command("run", *as_options(SMALL), "--name", "small", "--out", out, "--quiet")
    assert result.exit_code == 0, result.output
    return out, result.output


def test_run_writes_notebook_page_and_run_folder(finished):
    out, printed = finished
    assert all(str(out / name) in printed for name in ("small.ipynb", "small.html", "small"))
    assert json.loads((out / "small" / "config.json").read_text())["alpha"] == 2.0
    assert [line["step"] for line in read_lines(out / "small" / "metrics.jsonl")] == [0, 1, 2]
    notebook = nbformat.read(out / "small.ipynb", as_version=4)
    texts = [o.get("text", "") for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    assert any("step 2/2: mean reward" in t for t in texts)  # plain lines, no bar
    assert not any("%|" in t for t in texts)


def test_run_page_contains_its_plots_and_loads_nothing(finished):
    html = (finished[0] / "small.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") >= 4
    loaded = re.findall(r"""(?:<script[^>]*\ssrc|<link[^>]*\shref)\s*=\s*["']([^"']+)""", html)
    assert not [address for address in loaded if not address.startswith("data:")]
    assert len(html) < 6e6


@pytest.mark.slow
def test_run_and_resume_continue_a_run(finished):
    out, _ = finished
    before = read_lines(out / "small" / "metrics.jsonl")
    assert command("run", *as_options(SMALL), "--name", "small", "--out", out, "--quiet").exit_code == 0
    assert read_lines(out / "small" / "metrics.jsonl") == before
    result = command("resume", out / "small", "--steps", "3")
    assert result.exit_code == 0 and "3 steps" in result.output
    assert read_lines(out / "small" / "metrics.jsonl")[:3] == before
    assert checkpoints(out / "small")[-1].name == "step-000003"


def test_fork_writes_a_run_that_resumes(finished, tmp_path):
    out, _ = finished
    result = command("fork", out / "small", "2", tmp_path / "forked", "-p", "method", "sgt")
    assert result.exit_code == 0 and "resume" in result.output
    result = command("resume", tmp_path / "forked", "--steps", "3")
    assert result.exit_code == 0 and "3 steps" in result.output
    result = command("fork", out / "small", "9", tmp_path / "none")
    assert result.exit_code == 2 and "no checkpoint of step 9" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "alhpa", "2"], "unknown parameter 'alhpa'; did you mean 'alpha'?"),
        (["-p", "steps", "many"], "steps='many'"),
        (["nowhere"], "no notebook nowhere"),
        (["00_quickstart", "-p", "alpha", "2"], "00_quickstart.ipynb has no parameter 'alpha'"),
        (["00_quickstart", "-p", "steps", "few"], "steps='few'"),
        (["--name", "a/b"], "name 'a/b'"),
    ],
)
def test_run_reports_wrong_arguments_in_one_line(arguments, message, tmp_path):
    result = command("run", *arguments, "--out", tmp_path)
    assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_run_names_a_run_after_its_parameters_and_keeps_the_page_of_a_failure(tmp_path):
    result = command("run", "-p", "agents", "no-such-set, ../my models/a", "--out", tmp_path, "--quiet")
    assert result.exit_code == 1 and "the notebook failed" in result.output, result.output
    (page,) = tmp_path.glob("06_experiment-agents=no-such-set+..+my+models+a-*.html")
    assert "no-such-set" in page.read_text()


@pytest.mark.slow
def test_run_quickstart_with_other_parameters(tmp_path):
    small = {"steps": "2", "prompts_per_step": "4", "n": "2", "test_size": "10"}
    result = command("run", "00_quickstart", *as_options(small), "--name", "q", "--out", tmp_path, "--quiet")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "q.html").read_text(encoding="utf-8").count("data:image/png;base64,") >= 5


def test_command_is_installed():
    hacpo_kit = Path(sys.executable).with_name("hacpo-kit")
    out = subprocess.run([hacpo_kit, "--help"], capture_output=True, text=True, check=True)
    assert "run" in out.stdout and "resume" in out.stdout


# ── report ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_report_writes_page_notebook_and_table(tmp_path):
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
