"""What a model, a file or another's run folder says is text and never becomes markup: every place that shows it.

The explorer's and the monitor's own tests hold the same for each of their parts, the browser's that nothing runs.
"""

import ast
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest

import hacpo_kit as hk
from hacpo_kit.experiments import compare
from hacpo_kit.experiments.notebooks import write_html
from hacpo_kit.views import plots, rollout_view

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(1)</script></code></table></textarea><svg/onload=alert(1)> <b>x</b> "
    "<a href='javascript:alert(1)'>y</a> $\\frac{1}{2}$ %{x} \u202e\x1b[31m \"' &lt;i&gt;"
)


LINKS = (
    "[y](javascript:alert(1)) [y](java&#115;cript:alert(1)) [y](javascript\\:alert(1)) ![y](data:text/html,1) [y][z] "
    "[next](07_compare.ipynb)\n\n[z]: javascript:alert(1)\n\n"
)


class Tags(HTMLParser):
    """Names of all elements, and all attributes that a browser would act on."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: set[str] = set()
        self.acting: list = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.acting += [(tag, name) for name, value in attributes if name.startswith("on")]
        self.acting += [(tag, value) for _, value in attributes if re.match(r"\s*(javascript|data):", value or "")]


def harmless(page: str, allowed: str) -> None:
    """Raises AssertionError if a page holds other elements than these, or attributes that act."""
    found = Tags(page)
    assert found.tags <= set(allowed.split()), found.tags
    assert not found.acting
    assert "\u202e" not in page and "\x1b" not in page


@pytest.fixture(scope="module")
def pool():
    """Two agents that say hostile things to a hostile problem."""
    from hacpo_kit.records import Pool, Rollout

    problem = hk.Problem("<script>id</script>", HOSTILE, r"<b>\frac12</b>")
    said = [Rollout(problem.id, source, 0, HOSTILE, (1,), (2, 3), pd.Series([-1.0, -2.0]).to_numpy(), True)
            for source in ("A", "B")]  # fmt: skip
    return Pool(tuple(said), (problem,), ("A", "B"), 1)


def test_tables_of_rollouts(pool):
    table = plots.rollout_table(pool)
    harmless(table._repr_html_(), "div table thead tbody tr th td code span")
    assert "&lt;script&gt;alert(1)" in table._repr_html_() and "\x1b" not in repr(table)
    harmless(plots.Table(pd.DataFrame({HOSTILE: [HOSTILE, None, 1.0, [HOSTILE]]}))._repr_html_(),
             "div table thead tbody tr th td code span")  # fmt: skip


def test_the_rollouts_of_a_step_side_by_side(pool):
    result = SimpleNamespace(pool=pool, batches={}, stats={}, metrics={"step": 1})
    page = rollout_view.side_by_side(result, 0)
    harmless(page, "div b code")
    assert "&lt;img src=x" in page


def test_tooltip_text_of_the_explorer():
    from hacpo_kit.views.explorer_figure import tooltip_text

    harmless(tooltip_text(HOSTILE), "br")
    assert "%{" not in tooltip_text(HOSTILE) and "$" not in tooltip_text(HOSTILE)


def test_html_copies_of_notebooks(tmp_path):
    """Printed, displayed and raised text, and computed Markdown, in the page that a run leaves."""
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
    assert not after.tags & {"img", "svg", "b", "i"} and not after.acting
    assert pages[1].count("<script") == pages[0].count("<script")
    assert (
        "<strong>bold</strong>" in pages[1]
        and 'href="07_compare.ipynb"' in pages[1]
        and pages[1].count("&lt;script&gt;alert(1)") >= 6
    )
    assert after.tags - before.tags <= {
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "ul",
        "li",
        "a",
        "span",
        "strong",
        "p",
    }


def test_names_in_figures_and_styled_tables():
    """Methods and agents of a run folder that somebody else made."""
    rows = {"agents": HOSTILE, "agent": compare.MEAN, "method": [HOSTILE, "gspo"], "mean": 0.5, "low": 0.4, "high": 0.6}
    frame = pd.DataFrame({**rows, "seeds": 3, "step": 1, "run": ["a", "b"], "avg@1": 0.5})
    for figure in (
        plots.method_curves(frame, x="step", y="accuracy", title="t"),
        plots.forest(frame, title="t"),
        plots.learning_curves(frame, metric="avg@1", x="step", by=("method",)),
        plots.lines(pd.DataFrame({HOSTILE: [1.0, 2.0]}, index=pd.Index([1, 2], name="step")), title="t", y="y"),
    ):
        told = figure.to_json()
        for text in strings(figure.to_plotly_json()):
            if "alert" in text and not text.startswith("<img"):  # legendgroup is never shown
                harmless(text, "")
        assert "&lt;img" in told
        shown = [t.name for t in figure.data if t.name and "alert" in t.name]
        assert shown and not [name for name in shown if "<" in name or "$" in name]
    index = pd.MultiIndex.from_tuples([(HOSTILE, HOSTILE, HOSTILE)], names=["agents", "agent", "method"])
    table = pd.DataFrame({(HOSTILE, "mean"): [0.5], (HOSTILE, "half"): [0.1], ("seeds", ""): [3.0]}, index=index)
    harmless_but_for_controls = compare.styled(table).to_html()
    assert not Tags(harmless_but_for_controls).tags & {"img", "script", "svg", "b", "a"}
    assert not Tags(harmless_but_for_controls).acting


def strings(value):
    """Every text in a nested structure."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings(item)


def test_no_notebook_makes_html_of_its_own():
    for path in (ROOT / "notebooks").rglob("[!.]*.ipynb"):
        code = "\n".join(c.source for c in nbformat.read(path, 4).cells if c.cell_type == "code")
        assert not re.search(r"\bHTML\(|escape=False|Javascript\(|^%%(html|javascript|js|svg)\b", code, re.M), path.name


def test_the_package_makes_widgets_of_escaped_text_only():
    """Values put into ipywidgets' HTML are literals, made by methods named …html, or hold nothing but escaped names."""
    html = re.compile(r"\bHTML\(")
    known = {"live.py", "monitor_view.py", "explorer.py", "experiments.py"}  # each with tests that feed it hostile text
    found = {p.name for p in Path(hk.__file__).parent.rglob("*.py") if html.search(p.read_text(encoding="utf-8"))}
    assert found <= known
    for path in Path(hk.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in ("escape", "description_allow_html"):
                allowed = (False,) if node.arg == "description_allow_html" else ("html", True)
                assert isinstance(node.value, ast.Constant) and node.value.value in allowed, (path.name, node.lineno)
