"""Notebooks under papermill: parameters, names, failures."""

import nbformat
import papermill
import pytest
from papermill.exceptions import PapermillExecutionError

from hacpo_kit.experiments.notebooks import checked_values, run_notebook
from hacpo_kit.experiments.paths import find_notebook


@pytest.fixture
def notebook(tmp_path):
    """notebook(code): the path of a notebook with parameters steps and out, and one cell."""

    def write(code=""):
        cells = [nbformat.v4.new_code_cell(text) for text in ('steps = 2\nout = ""', code)]
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
