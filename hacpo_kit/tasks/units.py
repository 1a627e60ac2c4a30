"""Units and other words behind a number."""

from __future__ import annotations

import re
from functools import lru_cache

from hacpo_kit.tasks.cleaning import TEXT_COMMAND

# the spellings of a unit, the short form first
_SPELLINGS = """m meter metre; cm centimeter centimetre; mm millimeter millimetre; km kilometer kilometre; in inch; ft foot feet;
yd yard; mi mile; g gram; kg kilogram; mg milligram; lb pound; oz ounce; l liter litre L; ml milliliter millilitre mL;
s sec second; min minute; h hr hour; day; week; month; year yr; cent ¢; dollar usd; euro eur; degree deg; radian rad; unit;
percent; J joule j; N newton n; W watt w; V volt v; Hz hertz hz"""
_SHORT_FORM = {word: unit.split()[0] for unit in _SPELLINGS.split(";") for word in unit.split()}
_SHORT_FORM |= {"mph": "mi per h", "kph": "km per h"}
_UNITS = set(_SHORT_FORM.values())
_SQUARES = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
# words that are a factor of the number before them, in the singular
_FACTORS = {
    "dozen": "12", "score": "20", "hundred": "10^{2}", "thousand": "10^{3}", "million": "10^{6}", "billion": "10^{9}",
    "trillion": "10^{12}", "half": r"\frac{1}{2}", "halve": r"\frac{1}{2}", "third": r"\frac{1}{3}", "quarter": r"\frac{1}{4}",
    "fourth": r"\frac{1}{4}", "fifth": r"\frac{1}{5}", "sixth": r"\frac{1}{6}", "eighth": r"\frac{1}{8}", "tenth": "10^{-1}",
    "hundredth": "10^{-2}", "thousandth": "10^{-3}", "millionth": "10^{-6}",
}  # fmt: skip
# words that change a number in other ways: what they mean is not computed
_OPERATION = re.compile(
    r"squared|cubed|factorials?|inverse|powers?|root|times|plus|minus|negative|over|less|more|fewer|short|mod|modulo|or|and|not"
    r"|to|below|above|off|pairs?|gross|couple|double|triple|twice|percentage|choose|nd|st"
    r"|mille|permille|halved|doubled|tripled|at|least|most",
    re.IGNORECASE,
)
_WORD = r"(?P<word>[A-Za-z¢]{2,}[A-Za-z ./^\d-]*|[b-df-hjl-moq-wA-Z¢](?:[ ./^-][A-Za-z ./^\d-]*)?)"
_BARE = "[A-Za-z]{3,}(?: [A-Za-z]+)*|cm|mm|km|kg|mg|ml|ft|in|lb|oz|hr|(?:m|km|ft|mi)/(?:s|h|hr|min)"
_PATTERNS = (
    # \text{ cm}^2 after anything with a number or a command in it; not \mathrm{e}, \mathrm{i}
    rf"(?P<head>.*[\d\\].*?)\s*{TEXT_COMMAND}\s*\{{\s*{_WORD}\s*\}}(?P<power>\s*\^\s*\{{?-?\d\}}?)?",
    # words without markup after a plain number only; one letter would be a variable
    rf"(?P<head>-?[\d.,/]+) (?P<word>{_BARE})(?P<power>\s*\^\s*\{{?\d\}}?)?",
    rf"(?P<head>-?[\d.,/]+)\s*(?:{TEXT_COMMAND}\s*\{{)?\s*(?P<word>[\u4e00-\u9fff]+)\s*\}}?(?P<power>)",
)


@lru_cache(maxsize=4096)
def split_unit(text: str) -> tuple[str, str]:
    r"""Return a text without the unit behind it, and the unit in its short form ("" without one).

    A word that is a factor stays as a factor: `5\text{ dozen}` is 60. A word that means an operation is no unit.

    >>> split_unit(r"72\text{ square inches}"), split_unit(r"5\text{ dozen eggs}"), split_unit(r"5\text{ squared}")
    (('72', 'in^2'), ('5 \\cdot 12', 'egg'), ('5\\text{ squared}', ''))
    """
    match = next((found for pattern in _PATTERNS if (found := re.fullmatch(pattern, text))), None)
    if match is None:
        return text, ""
    words = match["word"].replace("/", " per ").replace(".", " ").split()
    if any(map(_OPERATION.fullmatch, words)):
        return text, ""
    head, power = match["head"], re.sub(r"[^-\d]", "", match["power"] or "")
    while words and (factor := _FACTORS.get(words[0].casefold().removesuffix("s"))):
        head, words = rf"{head} \cdot {factor}", words[1:]
    short = []
    for word in words:
        if square := _SQUARES.get(word.casefold()):
            power = square
        else:
            short.append(_short(word))
    return head, " ".join(short) + (f"^{power}" if short and power else "")


def _short(word: str) -> str:
    """Return a word in the singular, and the name of a unit in its short form."""
    word, _, power = word.partition("^")
    for candidate in (word, word.casefold(), word.casefold().removesuffix("es"), word.casefold().removesuffix("s")):
        if candidate in _SHORT_FORM:
            return _SHORT_FORM[candidate] + (f"^{power}" if power else "")
    return word.casefold().removesuffix("s") + (f"^{power}" if power else "")


def same_units(left: str, right: str) -> bool:
    """Return whether two units can belong to the same number: one of them is missing, or they are equal."""
    known = [unit.split("^")[0].split(" ")[0] in _UNITS for unit in (left, right)]
    return not left or not right or left == right or known[0] != known[1]
