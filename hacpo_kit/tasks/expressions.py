"""LaTeX to sympy, through math-verify's parser."""

from __future__ import annotations

import re
from functools import lru_cache

from hacpo_kit.tasks.notation import DIGITS
from hacpo_kit.tasks.units import split_unit

# notation that the parser drops or reads as a constant; as symbols of their own these stay apart from everything else
_PRIME = re.compile(r"(\\[A-Za-z]+|[A-Za-z])('+)")
_DERIVATIVE = re.compile(
    r"\\frac\s*\{\s*(?P<kind>d|\\partial|\\mathrm\s*\{d\})\s*(?:\^\s*\{?(?P<order>\d)\}?)?\s*\\?(?P<top>[A-Za-z]+)\s*\}"
    r"\s*\{\s*(?:d|\\partial|\\mathrm\s*\{d\})\s*\\?(?P<bottom>[A-Za-z]+)\s*(?:\^\s*\{?\d\}?)?\s*\}"
)
_TRANSPOSED = r"T|\\top|\\intercal|\\math(?:rm|sf)\s*\{\s*T\s*\}"
_SYMBOLS = (
    (re.compile(r"\\gamma(?![A-Za-z])"), " z_{gamma} "),
    (re.compile(r"\\Gamma(?![A-Za-z]|\s*\()"), " z_{Gamma} "),
    (re.compile(rf"\^\s*(?:\{{\s*(?:{_TRANSPOSED})\s*\}}|T(?!_)|\\(?:top|intercal)(?![A-Za-z]))"), "^{z_{T}}"),
)
_SCIENTIFIC = re.compile(r"(?<![\w.\\}])(\d+\.?\d*|\.\d+)[eE](\+?\d+|-\d+)(?![\w.])")
_MIXED = re.compile(
    rf"(-?)({DIGITS}) ?(?:\\frac ?\{{({DIGITS})\}} ?\{{({DIGITS})\}}"
    rf"|\\frac ?(\d) ?(\d)|(?<= )({DIGITS}) ?/ ?({DIGITS}))"
)
_REPEATING = re.compile(rf"(-?)(\d{{0,400}})\.(\d{{0,400}})\\overline ?\{{({DIGITS})\}}")


def explicit_latex(text: str) -> str | None:
    """Return the text in LaTeX that the parser reads correctly, without units; None if it has no unique meaning."""
    text, _ = split_unit(text)
    if mixed := _MIXED.fullmatch(text):
        sign, whole, *pairs = mixed.groups()
        top, bottom = next((t, b) for t, b in zip(pairs[::2], pairs[1::2], strict=True) if t)
        if int(top) < int(bottom):
            return rf"{sign}({whole}+\frac{{{top}}}{{{bottom}}})"
        # 4\frac{10}{3} is a product like 4\frac{\pi}{3}; `4 10/3` is neither a product nor a mixed number
        return rf"{sign}{whole}\cdot\frac{{{top}}}{{{bottom}}}" if "frac" in text else None
    if repeating := _REPEATING.fullmatch(text):
        sign, whole, fixed, period = repeating.groups()
        nines = "9" * len(period) + "0" * len(fixed)
        return rf"{sign}\frac{{{int((whole or '0') + fixed + period) - int((whole or '0') + fixed)}}}{{{nines}}}"
    # half an equation, or two numbers side by side, which the parser would add; \frac 5 9 and \log_2 8 are correct
    if re.search(r"=\s+=|=$", text) or re.search(r"(?<![_^\d])\d+\s+\d", re.sub(r"\\frac ?\d \d", "", text)):
        return None
    for pattern, symbol in _SYMBOLS:
        text = pattern.sub(symbol, text)
    text = _DERIVATIVE.sub(_derivative, text)
    text = _PRIME.sub(lambda found: rf" z_{{{_letters(found[1])}9{len(found[2])}}} ", text)
    return _SCIENTIFIC.sub(r"(\1 \\cdot 10^{\2})", text)


def _derivative(found: re.Match[str]) -> str:
    kind = "D" if found["kind"] != r"\partial" else "P"
    return rf" {kind}_{{{_letters(found['top'])}9{_letters(found['bottom'])}9{found['order'] or 1}}} "


def _letters(text: str) -> str:
    """Return digits that stand for the letters, because the parser reads some as constants or functions (e, I, tr)."""
    return "".join(f"{ord(letter):03}" for letter in text)


@lru_cache(maxsize=4096)
def parse(text: str):
    """Return the sympy object of a cleaned text, or None if it cannot be read as a whole or is undefined (0/0)."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify.grader import should_treat_as_complex
    from sympy import nan, zoo

    latex = None if r"\ldots" in text else explicit_latex(text)
    if not latex:
        return None
    # as math_verify.parse, without its search for an answer in prose, its units and its lower case
    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
    try:
        latex = normalize_latex(latex, normalization)
        parsed = latex2sympy(
            latex,
            is_real=not should_treat_as_complex(latex),
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        return None if hasattr(parsed, "has") and parsed.has(nan, zoo) else parsed
    except MemoryError:
        raise
    except Exception:  # the parser raises many kinds of errors; all mean that it does not know this notation
        return None
