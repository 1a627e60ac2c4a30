"""An exercise in JupyterLab: its solution is folded until a click, and its check runs."""

import shutil

import pytest

from . import jupyter

FOLDER = jupyter.ROOT / "notebooks" / "exercises"


@pytest.fixture
def page(lab, context):
    for path in FOLDER.glob("*.*"):
        shutil.copy(path, lab.folder / path.name)
    opened = jupyter.open_notebook(context, lab, "E3_ratio.ipynb")
    yield opened
    opened.close()


def test_exercise_solution_stays_folded_until_a_click(page):
    page.get_by_text("E3a: not solved yet").first.wait_for()  # as stored
    solution = page.locator(".jp-CodeCell", has=page.locator(".jp-InputPlaceholder")).first
    solution.scroll_into_view_if_needed()
    assert page.locator(".jp-CodeCell .jp-InputPlaceholder").count() == 2  # one per solution
    assert page.get_by_text("learner_mean_logp").count() == 0
    assert not page.get_by_text("✓ E3a").first.is_visible()  # the output of the solution is folded too
    jupyter.run_all(page)
    jupyter.no_errors(page)
    solution.locator(".jp-InputPlaceholder").click()
    page.get_by_text("learner_mean_logp").first.wait_for()
