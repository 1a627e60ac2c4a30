"""Text of models, files and other people's run folders is displayed as text in every place, and never becomes markup.

The tests of the explorer and the monitor check their own parts; those in a browser check that no script runs.
"""

import ast
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pandas as pd
import pytest

import hacpo_kit as hk
from hacpo_kit.experiments import compare
from hacpo_kit.experiments.pages import write_html
from hacpo_kit.records import Pool, Rollout
from hacpo_kit.views import monitor_panes, plots
from hacpo_kit.views.explorer_figure import tooltip_text
from hacpo_kit.views.markup import escaped

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(1)</script></code></table></textarea><svg/onload=alert(1)> <b>x</b> "
    "<a href='javascript:alert(1)'>y</a> $\\frac{1}{2}$ %{x} \u202e\x1b[31m \"' &lt;i&gt;"
)
LINKS = (
    "[y](javascript:alert(1)) [y](java&#115;cript:alert(1)) [y](javascript\\:alert(1)) ![y](data:text/html,1) [y][z] "
    "[next](07_compare.ipynb)\n\n[z]: javascript:alert(1)\n\n"
)
TABLE = "div table thead tbody tr th td code span"


class Tags(HTMLParser):
    """The names of all elements of a page, and all attributes that can run a script."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: set[str] = set()
        self.active: list = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.active += [(tag, name) for name, value in attributes if name.startswith("on")]
        self.active += [(tag, value) for _, value in attributes if re.match(r"\s*(javascript|data):", value or "")]


def check_harmless(page: str, allowed: str) -> None:
    """Raise AssertionError if a page has other elements, active attributes or control characters."""
    found = Tags(page)
    assert found.tags <= set(allowed.split()), found.tags
    assert not found.active
    assert not re.search("[\u202e\x1b$]", page)


@pytest.fixture(scope="module")
def pool():
    """Two agents with hostile responses to a hostile problem."""
    problem = hk.Problem("<script>id</script>", HOSTILE, r"<b>\frac12</b>")
    rollouts = [Rollout(problem.id, name, 0, HOSTILE, (1,), (2, 3), np.array([-1.0, -2.0]), True) for name in "AB"]
    return Pool(tuple(rollouts), (problem,), ("A", "B"), 1)


@pytest.mark.parametrize("hidden", ["\u061c", "\u2060", "\u00ad", "\ud83d", "\ufff9", "\U000e0041"])
def test_escaped_names_invisible_characters(hidden):
    assert escaped(hidden) == hidden.encode("unicode_escape").decode().replace("\\x", "\\u00")


def test_escaped_counts_missing_characters():
    assert escaped("9" * 500, 400) == "9" * 400 + " … (+100 characters)"


def test_rollout_table_of_a_pool(pool):
    table = plots.rollout_table(pool, limit=1)
    check_harmless(table._repr_html_(), TABLE)
    assert "&lt;script&gt;alert(1)" in table._repr_html_() and "1 more rows" in table._repr_html_()
    # a terminal gets no control characters and short lines
    assert (
        not re.search("[\u202e\x1b]", repr(table)) and len(repr(plots.Table(pd.DataFrame({"a": ["x" * 10_000]})))) < 500
    )


def test_rollout_table_of_rows():
    rows = [{"text": "a", "reward": None, "ended": True, "length": 3, "mean_logp": -0.123456}]
    page = plots.rollout_table(rows, ["text", "reward", "ended", "length", "mean_logp"])._repr_html_()
    assert all(cell in page for cell in (">–<", ">yes<", ">3<", ">-0.1235<")) and "more rows" not in page
    with pytest.raises(KeyError, match="txt"):
        plots.rollout_table(rows, ["txt"])


def test_table_with_hostile_columns_and_lists():
    check_harmless(plots.Table(pd.DataFrame({HOSTILE: [HOSTILE, None, 1.0, [HOSTILE]]}))._repr_html_(), TABLE)


def test_rollouts_html(pool):
    result = SimpleNamespace(pool=pool, batches={}, stats={}, metrics={"step": 1})
    page = monitor_panes.rollouts_html(result, 0)
    check_harmless(page, "div b code")
    assert "&lt;img src=x" in page


def test_tooltip_text_of_the_explorer():
    check_harmless(tooltip_text(HOSTILE), "br")
    assert "%{" not in tooltip_text(HOSTILE)


def test_write_html_of_hostile_outputs(tmp_path):
    """Printed, displayed and raised text, and computed Markdown."""
    v4 = nbformat.v4
    outputs = [
        v4.new_output("stream", text=HOSTILE, name="stdout"),
        v4.new_output("stream", text=HOSTILE, name="stderr"),
        v4.new_output("execute_result", {"text/plain": HOSTILE}, execution_count=1),
        v4.new_output("display_data", {"text/markdown": f"- {HOSTILE}\n- {LINKS} **bold**", "text/plain": ""}),
        v4.new_output("display_data", {"text/html": pd.DataFrame({HOSTILE: [HOSTILE]}).to_html(), "text/plain": ""}),
        v4.new_output("error", ename="ValueError", evalue=HOSTILE, traceback=[HOSTILE]),
    ]
    empty, full = (v4.new_notebook(cells=[v4.new_code_cell("1", outputs=o)]) for o in ([], outputs))
    pages = []
    for name, notebook in (("empty", empty), ("full", full)):
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
        write_html(tmp_path / f"{name}.ipynb", tmp_path / f"{name}.html")
        pages.append((tmp_path / f"{name}.html").read_text(encoding="utf-8"))
    before, after = map(Tags, pages)
    assert not after.tags & {"img", "svg", "b", "i"} and not after.active
    assert pages[1].count("<script") == pages[0].count("<script")
    assert "<strong>bold</strong>" in pages[1] and 'href="07_compare.ipynb"' in pages[1]
    assert pages[1].count("&lt;script&gt;alert(1)") >= 6
    assert after.tags - before.tags <= set(f"{TABLE} ul li a strong p".split())


def test_names_in_figures():
    """Names of methods and agents of another person's run folder."""
    rows = {"agents": HOSTILE, "agent": compare.MEAN, "method": [HOSTILE, "gspo"], "mean": 0.5, "low": 0.4, "high": 0.6}
    frame = pd.DataFrame({**rows, "seeds": 3, "step": 1, "run": ["a", "b"], "avg@1": 0.5})
    for figure in (
        plots.method_curves(frame, x="step", y="accuracy", title="t"),
        plots.forest(frame, title="t"),
        plots.learning_curves(frame),
        plots.lines(pd.DataFrame({HOSTILE: [1.0, 2.0]}, index=pd.Index([1, 2], name="step")), title="t", y="y"),
        plots.capability_matrix(hk.Capability().with_step({HOSTILE: 0.5, "B": 0.25})),
        plots.gradient_shares(pd.DataFrame({HOSTILE: [0.5], "B": [0.5]})),
        plots.clip_bands({HOSTILE: hk.Config()}),
    ):
        assert "&lt;img" in figure.to_json()
        # legendgroup and meta are never displayed
        content = figure.update_traces(legendgroup=None).update_layout(meta=None).to_plotly_json()
        for text in strings(content):
            if "alert" in text:
                check_harmless(text, "")


def test_final_text():
    names = dict.fromkeys(("agents", "agent", "method", "set"), HOSTILE)
    table = pd.DataFrame([{**names, "mean": 0.5, "low": 0.4, "high": 0.6, "seeds": 3}])
    found = Tags(compare.final_text(table).to_html())
    assert not found.tags & {"img", "script", "svg", "b", "a"} and not found.active


def strings(value):
    """Yield every text in a nested structure."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings(item)


def test_notebooks_make_no_html():
    for path in (ROOT / "notebooks").rglob("[!.]*.ipynb"):
        code = "\n".join(c.source for c in nbformat.read(path, 4).cells if c.cell_type == "code")
        assert not re.search(r"\bHTML\(|escape=False|Javascript\(|^%%(html|javascript|js|svg)\b", code, re.M), path.name


def test_package_puts_only_escaped_text_into_html():
    """The modules with ipywidgets' HTML have tests of their own with hostile text."""
    known = {"live.py", "monitor.py", "explorer.py", "stages.py"}
    for path in Path(hk.__file__).parent.rglob("*.py"):
        code = path.read_text(encoding="utf-8")
        assert path.name in known or not re.search(r"\bHTML\(", code), path.name
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.keyword) and node.arg in ("escape", "description_allow_html"):
                allowed = (False,) if node.arg == "description_allow_html" else ("html", True)
                assert isinstance(node.value, ast.Constant) and node.value.value in allowed, (path.name, node.lineno)
