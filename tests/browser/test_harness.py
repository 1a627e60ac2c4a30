"""The helpers of the browser tests: cells, sliders, errors, themes, memory."""

import pytest

from . import jupyter

SLIDER = """
import ipywidgets, plotly.graph_objects as go
slider = ipywidgets.IntSlider(3, 0, 10).add_class("the-slider")
fig = go.FigureWidget().add_scatter(y=[0, 3])
fig.add_class("the-plot")
def moved(change):
    fig.data[0].y = [0, change.new]
slider.observe(moved, "value")
display(slider, fig)
"""


def test_press_moves_a_slider_and_its_plot(open_cells, lab):
    page = open_cells("slider", [SLIDER])
    jupyter.run_all(page)
    page.locator(".the-slider .noUi-handle").wait_for()
    page.locator(".the-plot .scatterlayer path.js-line").wait_for()
    jupyter.press(page, "the-slider", "ArrowRight", 4)
    page.wait_for_function(
        "document.querySelector('.the-plot .js-plotly-plot, .the-plot.js-plotly-plot')._fullData[0].y[1] === 7"
    )
    assert jupyter.readout(page, "the-slider") == "7" and jupyter.plot_data(page, "the-plot") == [0, 7]
    jupyter.no_errors(page)
    jupyter.run_cell(page, "slider.value, fig.data[0].y")
    assert jupyter.last_output(page) == "(7, (0, 7))"
    jupyter.theme(page, "dark")
    assert page.evaluate("getComputedStyle(document.body).getPropertyValue('--jp-layout-color1').trim()") != "white"
    jupyter.theme(page, "light")
    memory = jupyter.page_memory(page)
    assert memory["heap_mib"] > 1 and memory["nodes"] > 100 and lab.kernel_memory() > 30


def test_no_errors_fails_after_an_error_in_a_cell(open_cells):
    page = open_cells("failing", ["1 / 0"])
    jupyter.run_all(page)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        jupyter.no_errors(page)


def test_kernel_imports_this_package(open_cells):
    page = open_cells("home", ["import hacpo_kit"])
    jupyter.run_all(page)
    jupyter.run_cell(page, "print(hacpo_kit.__file__)")
    assert jupyter.last_output(page).strip() == str(jupyter.ROOT / "hacpo_kit" / "__init__.py")
