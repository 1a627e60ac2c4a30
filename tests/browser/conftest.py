"""One JupyterLab per session and one browser per file. Without Chromium the tests are skipped; in CI they fail."""

import os

import pytest

from . import jupyter


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A running JupyterLab server."""
    if jupyter.chromium() is None:
        message = "no Chromium: install it (Debian: apt-get install chromium) or name its program in HACPO_KIT_CHROMIUM"
        (pytest.fail if os.environ.get("HACPO_KIT_REQUIRE_BROWSER") == "1" else pytest.skip)(message)
    with jupyter.server(tmp_path_factory.mktemp("jupyter") / "lab") as running:
        yield running


@pytest.fixture(scope="module")
def context(lab, tmp_path_factory):
    """A browser; it ends with the file, since other tests need this thread's event loop."""
    with jupyter.browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def open_cells(lab, context):
    """open_cells("name", [code, …]): a new notebook with these cells, opened and not yet run; its tab closes after the test."""
    pages = []

    def make(name, cells):
        pages.append(jupyter.open_notebook(context, lab, jupyter.notebook(f"{name}.ipynb", cells, lab)))
        return pages[-1]

    yield make
    for page in pages:
        page.close()


def pytest_collection_modifyitems(items):
    """Mark every browser test as slow, except the quick one of each widget."""
    for item in items:
        if item.path.parent.name == "browser" and not item.get_closest_marker("quick_browser"):
            item.add_marker(pytest.mark.slow)
