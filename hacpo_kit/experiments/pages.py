"""HTML pages of notebooks."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from hacpo_kit.common.files import write_text

# code comes first: a dollar sign between backticks does not begin a formula
FORMULA = re.compile(r"(?P<code>```.*?```|`[^`\n]*`)|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n]+?)\$", re.DOTALL)


def write_html(notebook: str | Path, html: str | Path, code: bool = True) -> None:
    """Write a notebook as one HTML file that loads nothing else; pictures and formulas are part of it.

    `code=False` hides the code.
    """
    import nbformat
    from nbconvert import HTMLExporter

    notebook, html = Path(notebook), Path(html)
    content = nbformat.read(notebook, as_version=4)
    formulas: dict[str, str] = {}
    for cell in content.cells:
        if cell.cell_type == "markdown":
            cell.source = FORMULA.sub(lambda found: _placeholder(found, formulas), cell.source)
        for data in (output.data for output in cell.get("outputs", []) if "data" in output):
            if "text/markdown" in data:
                data["text/markdown"] = _without_html(data["text/markdown"])
    exporter = HTMLExporter(embed_images=True, mathjax_url="", require_js_url="", jquery_url="", mermaid_js_url="")
    exporter.exclude_input = exporter.exclude_input_prompt = exporter.exclude_output_prompt = not code
    body, _ = exporter.from_notebook_node(content, {"metadata": {"name": notebook.stem, "path": str(notebook.parent)}})
    write_text(html, re.sub(r"⟦formula \d+⟧", lambda mark: formulas.get(mark[0], mark[0]), body))


def _placeholder(found: re.Match, formulas: dict[str, str]) -> str:
    """Store a formula as MathML, which browsers draw without scripts, and return a placeholder for it."""
    from latex2mathml.converter import convert

    if found["code"]:
        return found[0]
    mark = f"⟦formula {len(formulas)}⟧"
    try:
        formulas[mark] = convert(found["block"] or found["inline"], display="block" if found["block"] else "inline")
    except Exception:  # the library raises many types; a formula that it cannot read is shown as LaTeX
        formulas[mark] = escape(found[0])
    return mark


def _without_html(markdown: str) -> str:
    """Return Markdown output, which can contain names from other sources, without HTML and script links."""
    text = markdown.replace("&", "&amp;").replace("<", "&lt;")
    text = re.sub(r"\]\((?!https?://|[\w./-]+[)#])", r"]\\(", text)  # nbconvert would keep a link to javascript:
    return re.sub(r"^(\s*)\[(?=[^\]\n]*\]:)", r"\1\\[", text, flags=re.M)
