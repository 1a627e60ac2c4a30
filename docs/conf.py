"""Sphinx configuration. `make docs` builds the site into docs/_build/html, offline and with warnings as errors."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import generate  # noqa: E402

import hacpo_kit  # noqa: E402

project = "hacpo_kit"
author = "the hacpo_kit authors"
copyright = "the hacpo_kit authors, Apache-2.0"
release = hacpo_kit.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",
]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are stored executed
nb_merge_streams = True
# a figure's static picture comes before its plotly form, which needs scripts
nb_mime_priority_overrides = [("html", "image/png", 0), ("html", "application/vnd.jupyter.widget-view+json", None)]
suppress_warnings = ["mystnb.unknown_mime_type", "myst.header"]
exclude_patterns = ["_build", "_generated", "_notebooks/exercises/README.md"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
default_role = "literal"  # docstrings write `name` as in Markdown
napoleon_use_rtype = False

html_theme = "furo"
html_title = "hacpo_kit"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def _copy_sources() -> None:
    """Copy the notebooks and pictures that the pages show, and write the pages that are generated from code and reports."""
    target = HERE / "_notebooks"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "notebooks", target, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__"))
    for notebook in target.rglob("*.ipynb"):  # PAPER.md is the page "paper" here
        text = notebook.read_text(encoding="utf-8")
        notebook.write_text(text.replace("../PAPER.md", "../paper.md"), encoding="utf-8")
    generate.write_pages(HERE / "_generated")


_copy_sources()


def _clean_docstring(app, what, name, obj, options, lines: list[str]) -> None:
    """Remove the docstring that Python gives to the fields of a named tuple."""
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()


def setup(app) -> None:
    """Connect the hooks of this file."""
    app.connect("autodoc-process-docstring", _clean_docstring)
