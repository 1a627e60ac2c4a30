"""The explorer in a real JupyterLab: every slider by keyboard, one picture a move, switches, steps, both themes, HTML export."""

import re

import pytest
from nbconvert import HTMLExporter

import hacpo_kit as hk

from . import jupyter

CELL = "import hacpo_kit as hk\nview = hk.widgets.explorer('run', agent='qwen3-sums')\nview"
SLIDERS = {
    "alpha": "ArrowRight",
    "delta": "ArrowRight",
    "delta-step": "ArrowRight",
    "window": "ArrowLeft",
    "m": "ArrowRight",
}
PLOT = "document.querySelector('.hk-explorer-plot .js-plotly-plot, .hk-explorer-plot.js-plotly-plot')"
# a page that has not painted yet has no plot: `pictures` counts what plotly draws from now on
COUNT = f"() => {{ window.pictures = 0; {PLOT}.on('plotly_afterplot', () => {{ window.pictures += 1; }}); }}"
STATE = f"() => [{PLOT}.layout.title.text, JSON.stringify({PLOT}._fullData.map(t => Array.from(t.y ?? [])))]"


@pytest.fixture(scope="module")
def folder(lab):
    """A recorded run where the notebooks are."""
    agents = hk.load_agents("tiny-model-pair", device="cpu")
    problems = hk.load_problems("arithmetic", split="train", size=60)
    config = hk.Config(prompts_per_step=8, n=4, minibatch=16, lr=5e-4)
    return hk.train(agents, problems, config, 3, out=lab.folder / "run", progress="off").folder


@pytest.fixture
def page(open_cells, folder, request):
    # a name of its own gives each test a new kernel: a page that restores the widgets of an old one may lose new messages
    page = open_cells(request.node.name, [CELL])
    jupyter.run_all(page)
    page.locator(".hk-alpha .noUi-handle").first.wait_for()
    page.locator(".hk-explorer-plot .scatterlayer path.point").first.wait_for(state="attached")
    page.wait_for_timeout(1500)  # the figure takes the width of the page
    page.evaluate(COUNT)
    return page


def moved(page, act) -> int:
    """Act, wait for the new picture, and return how many pictures were drawn."""
    before = page.evaluate("window.pictures")
    act()
    page.wait_for_function("n => window.pictures > n", arg=before)
    page.wait_for_timeout(400)
    return page.evaluate("window.pictures") - before


def press(page, name, key):
    return lambda: jupyter.press(page, f"hk-{name}", key)


def test_explorer_sliders_move_numbers_and_curves_with_one_picture(page, tmp_path):
    before = page.evaluate(STATE)
    assert "the recorded settings" in before[0]
    shown = page.locator(".hk-explorer").bounding_box()
    assert 900 < shown["width"] < 1200
    assert page.evaluate(f"{PLOT}.getBoundingClientRect().width") > 900, "the figure does not fill the page"
    for name, key in SLIDERS.items():
        readout = jupyter.readout(page, f"hk-{name}")
        assert moved(page, press(page, name, key)) == 1, name
        after = page.evaluate(STATE)
        assert jupyter.readout(page, f"hk-{name}") != readout and after[0] != before[0], name
        before = after
    page.screenshot(path=tmp_path / "light.png")
    # far enough, every slider moves the curves too (after m = 0 alone, δ_step could not)
    for name, key in SLIDERS.items():
        moved(page, page.locator(".hk-reset").first.click)
        curves = page.evaluate(STATE)[1]
        for _ in range(20):
            moved(page, press(page, name, key))
            if (after := page.evaluate(STATE)[1]) != curves:
                break
        assert after != curves, f"{name} moves nothing"
    summary = page.locator(".hk-explorer-summary").inner_text()
    jupyter.run_cell(page, "print(view.values['alpha'])")
    assert float(jupyter.last_output(page)) == float(jupyter.readout(page, "hk-alpha"))
    assert re.search(r"peer share of the gradient: \d+% \(recorded \d+%\)", summary)
    jupyter.theme(page, "dark")
    page.screenshot(path=tmp_path / "dark.png")
    jupyter.theme(page, "light")
    jupyter.no_errors(page)


@pytest.mark.quick_browser
def test_explorer_switches_reset_step_and_learner(page):
    start = page.evaluate(STATE)
    for name in ("capability-baseline", "discrepancy", "exponential", "clipping"):
        assert moved(page, page.locator(f".hk-{name} input").first.click) == 1, name
    off = page.evaluate(STATE)
    assert off[0].count("on → off") == 4 and off[1] != start[1]
    assert page.locator(".hk-alpha[disabled], .hk-alpha .noUi-target[disabled]").count(), "α has no effect now"
    assert moved(page, page.locator(".hk-reset").first.click) == 1
    assert page.evaluate(STATE) == start
    assert moved(page, press(page, "step", "ArrowLeft")) == 1
    assert "in step 2" in page.evaluate(STATE)[0]
    choose = page.locator(".hk-learner select").first
    assert moved(page, lambda: choose.select_option("llama-differences")) == 1
    assert "Gradient of llama-differences in step 2" in page.evaluate(STATE)[0]
    page.locator(".hk-order select").first.select_option("clipped")
    column = ".hk-explorer-table tbody tr td:nth-child(9)"
    page.wait_for_function(
        "css => { const all = [...document.querySelectorAll(css)]; return all.length && all.every(d => d.innerText === 'yes') }",
        arg=column,
    )
    jupyter.no_errors(page)


def test_explorer_keeps_its_settings_in_a_tab_that_is_opened_again(page, lab, request):
    for _ in range(3):
        moved(page, press(page, "alpha", "ArrowRight"))
    chosen = page.evaluate(STATE)
    jupyter.save(page, lab, request.node.name)
    jupyter.reopen(page)
    page.locator(".hk-explorer-plot .scatterlayer path.point").first.wait_for(state="attached")
    page.wait_for_function(f"title => {PLOT}.layout.title.text === title", arg=chosen[0])
    assert page.evaluate(STATE) == chosen
    jupyter.no_errors(page)


def test_explorer_shows_model_text_as_text(open_cells, folder):
    """Table and tooltips show markup, scripts and formulas of a response as text, and no script runs."""
    hostile = r"<img src=x onerror='window.hacked=1'></code><script>window.hacked=1</script> $\\frac{1}{2}$ <b>bold</b>"
    cell = f"""
from hacpo_kit.runs.experience import Experience
import hacpo_kit as hk
e = Experience.of_run('run')
e.frame['text'] = {hostile!r}
e.frame['prompt'] = {hostile!r}
hk.widgets.explorer(e)
"""
    page = open_cells("hostile", [cell])
    jupyter.run_all(page)
    table = page.locator(".hk-explorer-table").first
    table.locator("tbody tr").first.wait_for()
    page.locator(".hk-explorer-plot .subplot.x2y2 path.point").first.wait_for(state="attached")
    page.wait_for_timeout(1500)  # a script would run within this time
    assert hostile in table.locator("tbody tr").first.inner_text()
    assert not table.locator("img, script, b, mjx-container").count()
    tips = page.evaluate(f"{PLOT}._fullData.flatMap(t => Array.from(t.customdata ?? []))")
    assert tips and all("<img" not in tip and "<b>" not in tip and "$" not in tip and "&lt;img" in tip for tip in tips)
    point = page.locator(".hk-explorer-plot .subplot.x2y2 path.point").first
    point.dispatch_event("mousemove")
    page.mouse.move(*(point.bounding_box()[k] + 2 for k in ("x", "y")))
    page.locator(".hk-explorer-plot .hoverlayer .hovertext").first.wait_for()
    assert "<img src=x" in page.locator(".hk-explorer-plot .hoverlayer .hovertext").first.text_content()
    assert page.evaluate("window.hacked") is None


def test_explorer_in_a_saved_notebook_is_a_picture(page, lab, request):
    stored = jupyter.save(page, lab, request.node.name)
    shown = [o["data"] for c in stored.cells for o in c.outputs if "data" in o]
    place = next(i for i, data in enumerate(shown) if "application/vnd.jupyter.widget-view+json" in data)
    assert "image/png" in shown[place + 1]
    html, _ = HTMLExporter().from_notebook_node(stored)
    assert len(re.findall(r"<img[^>]+data:image/png;base64,", html)) == 1 and "widget-view" not in html
