"""The stored notebooks, and the notebooks executed with papermill and small parameters.

`make test` also runs each notebook with its own parameters and compares every output (nbval).
"""

import re
import subprocess
from functools import cache
from pathlib import Path

import nbformat
import papermill
import pytest

from hacpo_kit.experiments.pages import write_html

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").rglob("[!.]*.ipynb"))
COURSE = [p for p in NOTEBOOKS if p.parent.name == "notebooks"]
# parameters for a short run in which all assertions of the notebook still hold
SMALL: dict[str, dict] = {
    "00_quickstart": {"steps": 2, "prompts_per_step": 8, "n": 4, "test_size": 20},
    "01_rollout_and_reward": {"problems_per_step": 16},
    "02_capability_and_advantage": {"problems_per_step": 12, "repeats": 4000},
    "03_importance_ratio": {"prompts_per_step": 16},
    "04_stepwise_clipping": {"prompts_per_step": 16, "minibatch": 16},
    "05_one_update": {"held_out": 40},
    "06_experiment": {"steps": 2, "prompts_per_step": 8, "n": 4, "test_size": 20},
    "07_compare": {"margin": 0.02},
    "08_theory": {"repeats": 20_000, "steps": 3, "prompts_per_step": 12},
    "09_three_agents": {"steps": 3},
    "10_when_sharing_hurts": {"steps": 4},
    "11_explorer": {"steps": 2, "problems_per_step": 16},
    "12_monitor": {"prompts_per_step": 8, "test_size": 20},
    "13_gpu_paper_pair": {"trial_steps": 2, "trial_prompts": 8, "test_size": 20},
}


def stem(path: Path) -> str:
    return path.stem


def outputs(notebook):
    return [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=stem)
def test_stored_notebook_is_executed_without_errors_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert sum("parameters" in c.metadata.get("tags", []) for c in code) == 1
    assert all(c.execution_count for c in code), "stored without execution"
    assert not [o for o in outputs(notebook) if o.output_type == "error" or o.get("name") == "stderr"]
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_000_000 and not re.search(r"/(home|root|Users|work|tmp)/", text)
    assert "widgets" not in notebook.metadata, "stored with widget state, which contains plotly itself"
    assert notebook.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("path", COURSE, ids=stem)
def test_course_notebook_has_the_common_structure(path):
    notebook = nbformat.read(path, as_version=4)
    prose = [c.source for c in notebook.cells if c.cell_type == "markdown"]
    assert notebook.cells[0].source.startswith("# ") and "**After this notebook you can**" in prose[0]
    assert [p for p in prose if re.search(r"^##+ What to remember", p, re.M)]
    assert "parameters" in next(c for c in notebook.cells if c.cell_type == "code").metadata.get("tags", [])
    code = [c for c in notebook.cells if c.cell_type == "code"]
    pictures = [c for c in code if has(c, "image/png")]
    assert pictures and all("nbval-ignore-output" in c.metadata.get("tags", []) for c in pictures)
    if path.stem[:2] in ("00", "01", "02", "03", "04", "05", "09"):
        assert [c for c in code if "plots.stages(" in c.source], "the picture of the four stages is missing"
    if path != COURSE[-1]:
        following = COURSE[COURSE.index(path) + 1].name
        assert re.search(rf"\*\*Next:\*\*[^\n]*\]\({following}\)", prose[-1]), (
            f"the last cell does not link to {following}"
        )


def has(cell, kind: str) -> bool:
    return any(kind in o.get("data", {}) for o in cell.outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=stem)
def test_notebook_links_exist(path):
    for target in re.findall(r"\]\(([^)#\s]+)", "\n".join(c.source for c in nbformat.read(path, 4).cells)):
        if "://" not in target and target.endswith((".ipynb", ".md", ".html", ".py", ".png")):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", NOTEBOOKS, ids=stem)
def test_notebook_stores_an_image_for_every_widget_and_figure(path):
    shown = [output.get("data", {}) for output in outputs(nbformat.read(path, as_version=4))]
    for data, following in zip(shown, [*shown[1:], {}], strict=True):
        if "application/vnd.jupyter.widget-view+json" in data:
            assert "image/png" in following, data
        if "application/vnd.plotly.v1+json" in data:
            assert "image/png" in data, "a figure without a static image"


def test_course_page_lists_all_notebooks():
    text = (ROOT / "docs" / "course.md").read_text(encoding="utf-8")
    assert re.findall(r"^_notebooks/(\w+)$", text, re.M) == [p.stem for p in COURSE]


@cache
def executed(path, folder):
    """Execute a notebook with its small parameters and return the path of the result."""
    parameters, out = SMALL[path.stem], Path(folder) / path.name
    if path.stem == "06_experiment":
        parameters = {**parameters, "out": str(out.with_suffix(""))}
    papermill.execute_notebook(str(path), str(out), parameters=parameters, cwd=str(path.parent), progress_bar=False)
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that executes a notebook once and returns the path of the result."""
    folder = str(tmp_path_factory.mktemp("papermill"))
    return lambda path: executed(path, folder)


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in COURSE if p.stem in SMALL], ids=stem)
def test_notebook_runs_with_papermill_and_its_page_shows_every_figure(path, run, tmp_path):
    done = nbformat.read(run(path), as_version=4)
    assert [c for c in done.cells if "injected-parameters" in c.metadata.get("tags", [])]
    assert not [o for o in outputs(done) if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    bars = [o.text for o in outputs(done) if re.search(r"\d+%\|.*\| \d+/\d+ \[", o.get("text", ""))]
    assert not bars, "without a terminal, progress is printed as lines"
    figures = sum("image/png" in o.get("data", {}) for o in outputs(done))
    write_html(run(path), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert figures >= 1 and len(re.findall(r"<img[^>]+data:image/png;base64,", page)) == figures
    assert len(page.encode()) < 6_000_000
    assert not re.search(r"""<(script|link|img)[^>]+(src|href)=["'](https?:)?//""", page), (
        "the page loads from a network"
    )


@pytest.mark.slow
def test_theory_notebook_prints_the_numbers_in_its_text(run):
    done = nbformat.read(run(ROOT / "notebooks" / "08_theory.ipynb"), as_version=4)
    text = "".join(o.text for o in outputs(done) if o.get("name") == "stdout")
    extra = re.search(r"K = 5: [^\n]* \+ ([\d.]+) \(1/\(2KM\) = ([\d.]+)\)", text)
    assert float(extra[1]) == pytest.approx(float(extra[2]), rel=0.1)
    naive = re.search(r"llama-differences, naive: own with peer ([+-][\d.]+)", text)
    assert float(naive[1]) < 0
    assert re.search(r"tiny-state-pair, own with peer[^\n]*: 6 of 6 cosines above 0", text)


def test_small_parameters_exist_for_every_course_notebook():
    assert not {p.stem for p in COURSE} - set(SMALL), "add its parameters to SMALL"


def test_make_notebooks_writes_the_numerics_file():
    """The file says on which machine the stored outputs can be compared."""
    plan = ["make", "-n", "--no-print-directory", "notebooks"]
    commands = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "nbconvert" in commands and commands.rstrip().endswith("tests/numerics.py --write")
    assert (ROOT / "tests" / "numerics.json").exists()


@pytest.mark.parametrize("name", ["05_one_update", "08_theory"])
def test_write_html_renders_formulas_without_a_network(name, tmp_path):
    write_html(ROOT / "notebooks" / f"{name}.ipynb", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<math") >= 2 and 'display="block"' in page
    prose = re.sub(r"<pre.*?</pre>|<code.*?</code>|<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)
    assert "$$" not in prose and r"\hat" not in prose and "⟦" not in prose


def test_write_html_keeps_code_and_invalid_formulas(tmp_path):
    cells = ["`$x$` and $x^2$ and `a` $5", "```\n$HOME$\n```\n$$\\left( a$$ and $\\begin{cases} <b>$"]
    content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(c) for c in cells])
    nbformat.write(content, tmp_path / "n.ipynb")
    write_html(tmp_path / "n.ipynb", tmp_path / "n.html")
    page = (tmp_path / "n.html").read_text(encoding="utf-8")
    assert "<code>$x$</code>" in page and "<msup>" in page and "$HOME$" in page and "$5" in page
    assert r"$$\left( a$$" in page
