"""An exercise in JupyterLab: what is folded stays folded, the check answers, and unfolding shows the solution."""

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


def test_a_solution_stays_folded_until_it_is_asked_for(page):
    page.get_by_text("E3a: not solved yet").first.wait_for()  # as stored
    solution = page.locator(".jp-CodeCell", has=page.locator(".jp-InputPlaceholder")).first
    solution.scroll_into_view_if_needed()
    assert page.locator(".jp-CodeCell .jp-InputPlaceholder").count() == 2  # one a solution
    assert page.get_by_text("learner_mean_logp").count() == 0
    assert not page.get_by_text("✓ E3a").first.is_visible()  # nor does its output tell a learner that all is right
    jupyter.run_all(page)
    jupyter.no_errors(page)
    solution.locator(".jp-InputPlaceholder").click()
    page.get_by_text("learner_mean_logp").first.wait_for()
