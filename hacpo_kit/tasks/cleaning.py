"""Normalised text of an answer: the same mathematics in fewer spellings."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

TEXT_COMMAND = r"\\(?:text|textbf|textit|textrm|textnormal|textsf|mathrm|mathbf|mathit|mathsf|mbox|operatorname)"

_FULL_WIDTH = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_FRACTIONS = {
    character: rf" \frac{{{top}}}{{{bottom}}}"
    for character in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
    for top, bottom in [unicodedata.normalize("NFKC", character).split("⁄")]
}
_SUPERSCRIPTS = {character: f"^{digit}" for digit, character in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
_UNICODE = str.maketrans(
    _FULL_WIDTH
    | _FRACTIONS
    | _SUPERSCRIPTS
    | {"−": "-", "–": "-", "—": "-", "。": ".", "、": ",", "…": r"\ldots ", "\u00a0": " ", "′": "'", "’": "'"}
    | {"π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "∅": r"\emptyset ", "×": r"\times ", "·": r"\cdot ", "÷": "/"}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in "}
    | {"€": "", "£": "", "¥": "", "₹": "", "¢": r"\text{ cents}", "℃": r"^\circ C", "和": ",", "或": ",", "与": ","}
)
_FUNCTIONS = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|exp|pi"
    "|theta|alpha|beta|gamma|lambda|omega|phi|infty"
)
# what follows an answer: "for all n", "(k ∈ ℤ)"
_FOR_ALL = rf"(?<=[\w}})])(?:[\s,;(]+|(?=\\))(?:{TEXT_COMMAND}\s*\{{)?\s*for (?:all|any|every|each|some)\b.*$"
_IN_NUMBERS = r"(?<=[\w})])[\s,;(]+[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\\in\s*\\?(?:mathbb|mathbf|Bbb)?\s*\{?\s*[ZNRQC]\b.*$"
_REPLACEMENTS = [
    (re.compile(r"\\?\$|(?<!\\)\\[()\[\]]"), ""),  # dollar signs and math delimiters
    (re.compile(r"\\[lcd]?dots(?![a-zA-Z])|\.{3,}"), r"\\ldots "),
    (re.compile(r"(?<=\d)(?:,\\!\s*|\\[,!]|\{,\}|~)(?=\d{3}(?!\d))"), ""),  # typeset thousands: 10,\!080
    (re.compile(r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])|\\displaystyle"), " "),
    (re.compile(r"\\(?:left|right)\.|\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:[dtcsx]|nice)frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"^\s*\\approx(?![a-z])"), ""),
    (re.compile(r"\\[dt]?binom\s*(\d)\s*(\d)"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\(?:degree|textdegree)(?![a-zA-Z])"), r"^\\circ "),
    (re.compile(r"\\(l|g)(?:eqq|eqslant|eq)(?![a-zA-Z])"), r"\\\1e"),
    (re.compile(r"\\neq(?![a-zA-Z])"), r"\\ne"),
    (re.compile(r"\\lg(?![a-zA-Z])"), r"\\log_{10}"),
    (re.compile(r"\\([lr])brace(?![a-zA-Z])"), lambda found: {"l": r"\{", "r": r"\}"}[found[1]]),
    (re.compile(r"\\([lr])brack(?![a-zA-Z])"), lambda found: {"l": "[", "r": "]"}[found[1]]),
    (re.compile(r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|\\?[A-Za-z]+))"), r"\\sqrt{\1\2}"),
    (re.compile(r"(?<![\\A-Za-z])sqrt\s*(?:\(([^()]*)\)|\{([^{}]*)\})"), r"\\sqrt{\1\2}"),
    (re.compile(r"\\color\s*\{[^{}]*\}|\\textcolor\s*\{[^{}]*\}(?=\s*\{)"), ""),
    (re.compile(r"\\(?:underline|boldsymbol|bm)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(rf"{TEXT_COMMAND}\s*\{{\s*([:,;.]?)\s*\}}"), r" \1 "),
    (re.compile(r"\^\s*\{?\s*\\prime\s*\}?"), "'"),
    (re.compile(r"(?<![\w\\])(?:np|numpy|math|sp|sympy)\.(?=[a-z])"), ""),
    (re.compile(r"(?<![\\A-Za-z])(?:infinity|oo)(?![A-Za-z])"), r"\\infty"),
    (re.compile(rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])"), r"\\\1"),  # pi/2 is not p·i/2
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(rf",?\s*(?:{TEXT_COMMAND}\s*\{{\s*(?:and|or)\s*\}}|(?<![\\A-Za-z])(?:and|or)(?![A-Za-z]))\s*"), ","),
    (re.compile(r"(?<=\d)\.(?![\d.]|\s*\\overline)"), ""),  # 1./3, and a full stop after a number
    (re.compile(rf"^{TEXT_COMMAND}\s*\{{([^{{}}]*\d[^{{}}]*)\}}$"), r"\1"),  # \text{5 cm} is not a word
    (re.compile(r"_\{\\([A-Za-z]+)\s*\}"), r"_{\1}"),  # a name as an index: m_{\max}
    (re.compile(rf"(?<=\d)(?:\^\s*)?\{{?\s*(?:{TEXT_COMMAND}\s*\{{)?(?:st|nd|rd|th)\}}{{0,2}}(?![A-Za-z])"), ""),  # 5th
    (re.compile(rf"^(?:{TEXT_COMMAND}\s*\{{\s*)?(?:US|USD|EUR|GBP|CNY|RMB|INR|Rs)\.?\s*\}}?\s*(?=[\d.])"), ""),
    (re.compile(_FOR_ALL), ""),
    (re.compile(_IN_NUMBERS), ""),
    (re.compile(r"\s+"), " "),
]


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """Return the text without delimiters, sizes, typographic characters and a final full stop, with single spaces."""
    text = text.translate(_UNICODE)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = text.strip()
    if re.fullmatch(r"-?[1-9]\d{0,2}(?: \d{3})+", text):  # 10 080
        text = text.replace(" ", "")
    return text.rstrip(".,;: ")


def squeeze(text: str) -> str:
    """Return the text without white space, except between two digits: `1 1/4` is not `11/4`."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
