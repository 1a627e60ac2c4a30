"""Folders of the project, and file names made of parameters."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
NOTEBOOKS = PROJECT / "notebooks"


def runs_folder() -> Path:
    """Return the folder of runs: HACPO_KIT_RUNS, else reports/runs in the clone, without one in the current folder."""
    clone = PROJECT if NOTEBOOKS.is_dir() else Path()
    return Path(os.environ.get("HACPO_KIT_RUNS") or clone / "reports" / "runs")


def find_notebook(notebook: str | Path) -> Path:
    """Return a notebook by its path, or by a name in `notebooks/` or its beginning, such as "06".

    Raises FileNotFoundError if there is not exactly one.
    """
    if Path(notebook).is_file():
        return Path(notebook)
    known = {path.stem: path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    found = [path for name, path in known.items() if name.startswith(str(notebook).removesuffix(".ipynb"))]
    if len(found) != 1:
        raise FileNotFoundError(f"no notebook {notebook!s}; there are {', '.join(known) or 'none'} in {NOTEBOOKS}")
    return found[0]


def file_name(text: str, longest: int = 60) -> str:
    """Return text as part of a file name, with a hash of the text if a character was replaced or cut off.

    >>> file_name("lr=1e-4"), file_name("my models/a")
    ('lr=1e-4', 'my+models+a-8ca5c8')
    """
    name = re.sub(r"[^\w.=+-]+", "+", text)[:longest]
    return name if name == text else f"{name.strip('+-.')}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
