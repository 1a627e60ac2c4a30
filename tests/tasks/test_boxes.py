r"""The last `\boxed{...}` of a response, and comparisons of answers as text."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacpo_kit.tasks.boxes import MAX_CHARS, integer, last_box, same_text


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{5}. No: \boxed{7}", "7"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{a\\}", r"a\\"),
        (r"\boxed {5}", "5"),
        (r"\boxed{5} is my \boxed answer", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        ("no box", None),
        (r"\boxed{5} or rather \boxed{7", None),
        (r"\boxed{}", None),
        (r"\boxed{5}, \boxed{ }", None),
        (r"\boxed{5\}", None),
    ],
)
def test_last_box(text, box):
    assert last_box(text) == box


balanced = st.recursive(
    st.text(st.characters(exclude_characters="{}\\"), max_size=5) | st.sampled_from([r"\{", r"\}", r"\\", r"\frac"]),
    lambda inner: st.lists(inner | inner.map(lambda text: "{" + text + "}"), max_size=4).map("".join),
    max_leaves=20,
)


@given(before=st.text(max_size=20), inside=balanced, after=st.text(st.characters(exclude_characters="\\"), max_size=20))
def test_last_box_ends_at_its_own_brace(before, inside, after):
    assert last_box(before + " \\boxed{" + inside + "}" + after) == (inside.strip() or None)


@given(st.text(alphabet="\\boxed{} 5\n", max_size=60))
def test_last_box_takes_any_text(text):
    box = last_box(text)
    assert box is None or (box == box.strip() and box in text)


def test_last_box_is_linear():
    start = time.process_time()
    for text in (r"\boxed{" * 40_000, r"\boxed" * 40_000, r"\boxed" + " " * 240_000, r"\boxed{" + "{" * 240_000):
        assert last_box(text) is None
    assert time.process_time() - start < 2


@given(st.integers(), st.integers())
def test_integer_compares_as_integers(a, b):
    assert (integer(f"{a:,}") == integer(str(b))) == (a == b)


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True), (r"\left( 1, 2 \right)", "(1,2)", True), ("$5$.", "5", True),
        ("0.5", r"\frac{1}{2}", False), ("", "", False), (None, "5", False), (r"\leftarrow", "arrow", False),
        ("5" * (MAX_CHARS + 1), "5" * (MAX_CHARS + 1), False),
    ],
)  # fmt: skip
def test_same_text(answer, gold, same):
    assert same_text(answer, gold) is same
