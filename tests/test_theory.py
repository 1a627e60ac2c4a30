"""The notebook of the two theorems, run small: what it asserts about bias and angles holds there too."""

import re

import nbformat
import papermill
import pytest

from hacpo_kit.experiments import find_notebook


def test_the_claims_of_the_theory_notebook_hold(tmp_path):
    small = {"repeats": 20_000, "steps": 3, "prompts_per_step": 12}
    path = find_notebook("08_theory")
    papermill.execute_notebook(str(path), str(tmp_path / "o.ipynb"), parameters=small, progress_bar=False, cwd=tmp_path)
    notebook = nbformat.read(tmp_path / "o.ipynb", as_version=4)
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    text = "".join(o.text for o in outputs if o.get("name") == "stdout")
    # three numbers that the text rests on, read from what it printed
    extra = re.search(r"K = 5: one more right answer .* \+ ([\d.]+) \(1/\(2KM\) = ([\d.]+)\)", text)
    assert float(extra[1]) == pytest.approx(float(extra[2]), rel=0.1)
    naive = re.search(r"llama-differences, naive: own with foreign ([+-][\d.]+)", text)
    assert float(naive[1]) < 0
    assert re.search(r"tiny-state-pair, own with foreign, all answers: 6 of 6 cosines above 0", text)
