"""PAPER.md: the functions, settings and tests that it names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_paper_names_only_functions_and_tests_that_exist():
    text = (ROOT / "PAPER.md").read_text(encoding="utf-8")
    code = "\n".join(
        p.read_text(encoding="utf-8") for folder in ("hacpo_kit", "tests") for p in (ROOT / folder).rglob("*.py")
    )
    names = re.findall(r"`((?:test_)?[a-z_]+)(?:\(\))?`", text)
    assert len(names) > 20
    assert not [name for name in names if not re.search(rf"\b{name}\b", code)]
