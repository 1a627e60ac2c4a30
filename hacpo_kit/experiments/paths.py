"""Folders of the project, and file names made of parameters."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
NOTEBOOKS = PROJECT / "notebooks"


def runs_folder() -> Path:
    """Return the folder for new runs: HACPO_KIT_RUNS, else reports/runs of the clone, else of the current folder."""
    clone = PROJECT if NOTEBOOKS.is_dir() else Path()
    return Path(os.environ.get("HACPO_KIT_RUNS") or clone / "reports" / "runs")


def find_notebook(notebook: str | Path) -> Path:
    """Return a notebook by its path, or by the beginning of its name in `notebooks/`, such as "06".

    Raises FileNotFoundError if there is none, or more than one.
    """
    path = Path(notebook)
    if path.is_file():
        return path
    found = sorted(NOTEBOOKS.glob(f"{path.name.removesuffix('.ipynb')}*.ipynb")) if path.name == str(notebook) else []
    if len(found) != 1:
        names = ", ".join(p.stem for p in sorted(NOTEBOOKS.glob("*.ipynb")))
        raise FileNotFoundError(f"no notebook {notebook!s}; there are {names or 'none'} in {NOTEBOOKS}")
    return found[0]


def file_name(text: str, longest: int = 60) -> str:
    """Return text as part of a file name; if characters are replaced or cut, a hash of the text keeps it unique.

    >>> file_name("lr=1e-4"), file_name("my models/a")
    ('lr=1e-4', 'my+models+a-0bcfd3')
    """
    name = re.sub(r"[^\w.=+-]+", "+", text)[-longest:]
    return name if name == text else f"{name.strip('+-.')}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
