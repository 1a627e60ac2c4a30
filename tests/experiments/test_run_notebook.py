"""Notebooks under papermill: parameters, names, failures."""

import datetime
from pathlib import Path

import nbformat
import numpy as np
import papermill
import psutil
import pytest
from papermill.exceptions import PapermillExecutionError

from hacpo_kit.experiments.notebooks import checked_values, run_notebook
from hacpo_kit.experiments.paths import find_notebook


@pytest.fixture
def notebook(tmp_path):
    """notebook(code, parameters): the path of a notebook with a cell of parameters, and one cell."""

    def write(code="", parameters='steps = 2\nout = ""'):
        cells = [nbformat.v4.new_code_cell(text) for text in (parameters, code)]
        cells[0].metadata["tags"] = ["parameters"]
        metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), tmp_path / "short.ipynb")
        return tmp_path / "short.ipynb"

    return write


def test_run_notebook_writes_notebook_and_page(notebook, tmp_path):
    executed, html = run_notebook(notebook("print(steps, out)"), {"steps": "3"}, name="lr=1e-4.v1.5", out=tmp_path)
    assert (executed.name, html.name) == ("lr=1e-4.v1.5.ipynb", "lr=1e-4.v1.5.html")
    content = nbformat.read(executed, as_version=4)
    assert content.cells[-1].outputs[0].text == f"3 {tmp_path / 'lr=1e-4.v1.5'}\n" and html.exists()
    assert content.metadata.papermill.input_path == "short.ipynb"  # no path of this machine


def test_run_notebook_keeps_the_page_of_a_failure(notebook, tmp_path):
    with pytest.raises(PapermillExecutionError, match="wrong value"):
        run_notebook(notebook("raise ValueError('wrong value')"), {}, name="bad", out=tmp_path, progress=False)
    assert "wrong value" in (tmp_path / "bad.html").read_text()


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "a\\b", ".hidden", "-a", "a b", "a\n", "a\x00", "~", "a" * 201, "é" * 101]
)
def test_run_notebook_refuses_names_before_anything_is_written(name, tmp_path):
    with pytest.raises(ValueError, match="name '"):
        run_notebook("06_experiment", {}, name=name, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_run_notebook_tries_again_if_a_kernel_cannot_start(notebook, tmp_path, monkeypatch):
    calls, execute = [], papermill.execute_notebook

    def clash_once(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("zmq.error.ZMQError: Address already in use")
        return execute(*args, **options)

    monkeypatch.setattr(papermill, "execute_notebook", clash_once)
    _, html = run_notebook(notebook(), {}, name="x", out=tmp_path, progress=False)
    assert len(calls) == 2 and html.exists()


def test_checked_values_are_those_that_differ_from_the_defaults():
    source = find_notebook("06")
    values = checked_values(source, {"steps": "3", "seed": 0, "temperature": "0.8", "alpha": "none", "lr": "2e-4"})
    assert values == {"steps": 3, "lr": 2e-4, "settings": {"temperature": 0.8}}
    assert checked_values(find_notebook("00_quickstart"), {"steps": "3"}) == {"steps": 3}


def test_checked_values_are_converted_without_loss_or_refused(notebook):
    source = notebook(parameters='steps = 2\nshare, items = 0.5, [1]\nfree = None\nagents = "a"')
    values = {"steps": np.int64(3), "items": (np.float32(0.5), Path("x")), "free": {"a": (1, 2)}, "agents": Path("b")}
    converted = checked_values(source, values)
    assert converted == {"steps": 3, "items": [0.5, "x"], "free": {"a": [1, 2]}, "agents": "b"}
    assert type(converted["steps"]) is int and checked_values(source, {"items": "[2, 3]"}) == {"items": [2, 3]}
    wrong = [("free", datetime.date(2026, 1, 2)), ("free", {1}), ("free", "[a]"), ("items", "[a,b]"), ("share", [1])]
    for name, value in [*wrong, ("agents", "[a,b]"), ("agents", ["a", "b"]), ("steps", Path("3.5"))]:
        with pytest.raises(ValueError, match=f"{name}="):
            checked_values(source, {name: value})


def test_run_notebook_takes_infinity_and_writes_a_page(notebook, tmp_path):
    source = notebook("print(share)", parameters="share = 0.5")
    executed, html = run_notebook(source, {"share": "inf"}, name="x", out=tmp_path, progress=False)
    content = nbformat.read(executed, as_version=4)
    assert content.cells[-1].outputs[0].text == "inf\n" and html.exists()
    assert content.metadata.papermill.parameters.share == "inf"


def test_run_notebook_ends_after_its_time_limit_with_name_and_output(notebook, tmp_path):
    source = notebook("import time\nprint('begun', flush=True)\ntime.sleep(100)")
    with pytest.raises(TimeoutError, match=r"notebook hangs did not end within 3 s.*hangs\.ipynb"):
        run_notebook(source, {}, name="hangs", out=tmp_path, progress=False, time_limit=3)
    assert "begun" in (tmp_path / "hangs.ipynb").read_text() and "begun" in (tmp_path / "hangs.html").read_text()
    kernels = [p for p in psutil.Process().children() if "ipykernel_launcher" in p.cmdline()]
    assert not kernels


def test_checked_values_need_a_parameters_cell(tmp_path):
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1")]), tmp_path / "plain.ipynb")
    with pytest.raises(ValueError, match="'parameters'"):
        checked_values(tmp_path / "plain.ipynb", {})


def test_experiment_notebook_refuses_a_misspelt_parameter_of_papermill(tmp_path):
    with pytest.raises(PapermillExecutionError, match="'alhpa'; did you mean 'alpha'"):
        papermill.execute_notebook(
            str(find_notebook("06")), str(tmp_path / "o.ipynb"), parameters={"alhpa": 2, "out": str(tmp_path / "o")},
            progress_bar=False, kernel_name="python3",
        )  # fmt: skip
    assert not (tmp_path / "o").exists()
