r"""Pairs of gold and answer: stored ones, and variants of each kind by hypothesis."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hacpo_kit.rewards import boxed_math, score
from hacpo_kit.tasks.verifier import compare

PAIRS = [
    json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text(encoding="utf-8").splitlines()
]
names = st.sampled_from("abcfghkmnpqrstuvwxyz")
numbers = st.integers(-99, 99)
properties = settings(max_examples=5, deadline=None)


def equal(answer, gold):
    return compare(answer, gold) == (1.0, "correct")


def unequal(answer, gold):
    return compare(answer, gold) == (0.0, "wrong")


@pytest.mark.slow
def test_score_is_right_on_the_stored_pairs():
    verdicts = score([(pair["response"], pair["gold"]) for pair in PAIRS], timeout=20)
    mistakes = [(p["gold"], p["response"], v) for p, v in zip(PAIRS, verdicts, strict=True) if v.reward != p["want"]]
    assert len(PAIRS) == 515 and mistakes == []


@pytest.mark.slow
@properties
@given(numbers, numbers, names, st.sampled_from(["<", r"\le "]), st.sampled_from(["<", r"\le "]))
def test_compare_inequality_equals_its_interval_and_not_its_end_points(a, b, x, low, high):
    assume(a < b)
    inequality = f"{a}{low}{x}{high}{b}"
    interval = f"{'(' if low == '<' else '['}{a},{b}{')' if high == '<' else ']'}"
    reverse = {"<": ">", r"\le ": r"\ge "}
    for same in (
        interval,
        f"{b}{reverse[high]}{x}{reverse[low]}{a}",
        rf"\{{{x} \mid {inequality}\}}",
        rf"{x}\in {interval}",
    ):
        assert equal(inequality, same) and equal(same, inequality)
    for points in (f"{a}, {b}", rf"\{{{a}, {b}\}}", f"{x}={a} or {x}={b}", str(a), f"{a}<{x}<{b + 1}"):
        assert unequal(inequality, points) and unequal(points, inequality)


@pytest.mark.slow
@properties
@given(st.integers(1, 30), names)
def test_compare_inequality_of_an_absolute_value_is_not_plus_minus(a, x):
    for inequality in (f"|{x}|<{a}", f"{x}^2<{a * a}"):
        assert equal(f"-{a}<{x}<{a}", inequality) or r"^2" in inequality
        for points in (rf"\pm {a}", rf"{x}=\pm {a}", f"-{a}, {a}"):
            assert unequal(inequality, points) and unequal(points, inequality)


@properties
@given(st.sampled_from("ABCMPQ"), names, names)
@example("A", "r", "t")  # the parser reads tr as the trace
@example("A", "x", "e")
@example("A", "x", "I")
def test_compare_keeps_the_marks_that_the_parser_drops(matrix, x, y):
    assume(x != y and not {x, y} & set("d"))
    for marked, plain in (
        (f"{matrix}^T", matrix),
        (f"(1+{x})^T", f"1+{x}"),
        (f"{y}'=2{x}", f"{y}=2{x}"),
        (f"{y}''", f"{y}'"),
        (rf"\frac{{d{y}}}{{d{x}}}", "0"),
        (rf"\frac{{\partial {y}}}{{\partial {x}}}", rf"\frac{{\partial {x}}}{{\partial {y}}}"),
    ):
        assert unequal(plain, marked) and unequal(marked, plain) and equal(marked, marked)


@properties
@given(st.sampled_from(["Alice", "True", "June"]), st.integers(0, 4), st.integers(2, 31))
def test_compare_letters_and_digits_are_no_product(name, place, number):
    assert unequal(f"{name[:place]}{number}{name[place:]}", name)
    dated = rf"\text{{{name} {number}}}"
    assert equal(f"{name} {number}", dated) and unequal(f"{name[::-1]} {number}", dated)


@properties
@given(st.integers(2, 99), st.sampled_from(["red", "blue"]))
def test_compare_ignores_colours_and_reads_factors(n, colour):
    assert equal(rf"\color{{{colour}}}{{{n}}}", str(n)) and equal(rf"\textcolor{{{colour}}}{{{n}}}", str(n))
    assert unequal(rf"{n}\text{{ per mille}}", str(n)) and unequal(rf"{n}\text{{x}}", str(n))
    assert equal(f"sqrt({n})", rf"\sqrt{{{n}}}") and equal(rf"\sqrt{{{n}}}", f"sqrt({n})")


@properties
@given(st.permutations("EDACB"), st.permutations("EDACB"))
def test_compare_letters_are_a_word_and_no_product(left, right):
    left, right = "".join(left), "".join(right)
    assert equal(left, right) == (left == right)
    assert equal(rf"\angle {left[:3]}", rf"\angle {right[:3]}") == (left[:3] == right[:3])


@properties
@given(st.integers(1, 12), st.sampled_from(["dozen", "tenths", "squared", "factorial", "halves"]))
def test_compare_word_that_changes_a_number_is_no_unit(n, word):
    assert unequal(rf"{n}\text{{ {word}}}", str(n)) or (n == 1 and word in ("squared", "factorial")) or n == 2
    assert equal(rf"{n}\text{{ dozen}}", str(12 * n)) and equal(rf"{n}\text{{ tenths}}", str(n / 10))


@properties
@given(st.integers(2, 99), st.sampled_from([("cm", "m"), ("kg", "g"), ("hours", "minutes"), ("profit", "loss")]))
def test_compare_unit_is_optional_but_not_another(n, units):
    one, other = (rf"{n}\text{{ {unit}}}" for unit in units)
    assert equal(one, str(n)) and equal(str(n), one) and unequal(one, other) and unequal(other, one)


@properties
@given(st.integers(1, 12), st.integers(0, 59), st.sampled_from(["am", "a.m.", "AM"]))
def test_compare_clock_times(hour, minute, half):
    time = f"{hour}:{minute:02}"
    assert equal(time, time) and equal(f"{time} {half}", rf"{time}\text{{ {half}}}") and equal(f"{time} {half}", time)
    assert unequal(f"{time} PM", f"{time} {half}") and unequal(f"{hour} pm", f"{hour} {half}")
    assert unequal(f"{hour}.{minute:02}", time) and unequal(f"{hour}:{(minute + 1) % 60:02}", time)


@properties
@given(st.integers(12, 40))
def test_compare_exact_numbers_have_no_tolerance(k):
    assert unequal(rf"\sqrt{{10^{{{2 * k}}}+1}}", f"10^{{{k}}}") and equal(rf"\sqrt{{10^{{{2 * k}}}}}", f"10^{{{k}}}")
    assert unequal(str(10**k + 1), f"10^{{{k}}}") and equal(str(10**k), f"10^{{{k}}}")


@properties
@given(names)
def test_compare_functions_also_at_integers(x):
    assert unequal(rf"\lceil {x}\rceil-1", rf"\lfloor {x}\rfloor")
    assert equal(r"\cos(n\pi)", "(-1)^n") and unequal("(-1)^{n+1}", "(-1)^n")


@properties
@given(st.integers(2, 8), st.sampled_from(["gamma", "Gamma", "beta", "zeta", "psi", "phi"]))
def test_compare_greek_letter_is_a_symbol(n, letter):
    import math

    assert unequal(rf"\{letter}+{n}", str(math.factorial(n - 1))) and unequal("0.5772156649", rf"\{letter}")
    assert equal(rf"{n}+\{letter}", rf"\{letter}+{n}") and equal(rf"\{letter}={n}", str(n))


@properties
@given(numbers, numbers, names)
def test_compare_label_before_an_answer(value, argument, x):
    labels = [
        f"f({argument})",
        f"{x}",
        rf"{x}_{{10}}",
        r"\det A",
        rf"\gcd({x},b)",
        rf"f'({argument})",
        r"\text{Area}",
        r"|z|",
    ]
    for label in labels:
        assert equal(f"{label}={value}", str(value)) and unequal(f"{label}={value + 1}", str(value))
    assert unequal(f"{x}+2={value}", str(value)) and unequal(f"2{x}={value}", str(value + 1))


@properties
@given(numbers, st.integers(1, 30), numbers)
def test_compare_plus_minus_inside_lists_and_sets(a, b, c):
    assume(c not in (a + b, a - b))
    for gold in (rf"\{{{a}\pm{b}, {c}\}}", rf"{c}, {a}\pm{b}"):
        assert equal(f"{a - b}, {c}, {a + b}", gold) and equal(rf"\{{{c}, {a + b}, {a - b}\}}", gold)
        assert unequal(f"{a + b}, {c}", gold) and unequal(f"{a + b}, {c}, {a - b + 1}", gold)


@pytest.mark.parametrize("degrees", [30, 45, 60, 90, 120, 180])
def test_compare_degrees(degrees):
    radians = rf"\frac{{{degrees}\pi}}{{180}}"
    assert (
        equal(rf"{degrees}^\circ", radians)
        and equal(radians, rf"{degrees}^\circ")
        and equal(str(degrees), rf"{degrees}^\circ")
    )
    assert equal(rf"\sin {degrees}^\circ", rf"\sin({radians})") and unequal(rf"{degrees + 1}^\circ", radians)


@properties
@given(st.text("是否三角形的面积", min_size=1, max_size=5), st.integers(1, 99))
def test_compare_equal_texts_are_equal_answers(word, n):
    assert equal(word, word) and equal(f"{n}厘米", str(n)) and unequal(word + "大", word)
    assert equal(f"√{n}", rf"\sqrt{{{n}}}") and equal(f"{n}或{n + 1}", f"{n}, {n + 1}")


@properties
@given(st.sampled_from("ABCDE"), st.sampled_from("ABCDE"), st.integers(1, 9))
def test_compare_options(letter, other, n):
    for answer in (
        rf"\textbf{{({letter}) }}{n}",
        f"({letter}) {n}",
        f"{letter}. {n}",
        f"({letter})",
        rf"\text{{{letter}}}",
        letter,
    ):
        assert equal(answer, other) == (letter == other)


@pytest.mark.parametrize(
    ("gold", "verdict"),
    [
        ("He buys 3 * 24 = 72 eggs in all.\n#### 72", "correct"),
        (r"Adding both equations gives $x = \boxed{72}$.", "correct"),
        (r"First \boxed{5}, then \boxed{72}.", "correct"),
        (r"It is \boxed{72", "unscorable"),
        ("First we add the two numbers, and then we multiply the sum by six. The result is 72.", "unscorable"),
    ],
)
def test_boxed_math_reads_the_answer_of_a_worked_solution_or_refuses_it(gold, verdict):
    found = boxed_math(r"\boxed{72}", gold)
    assert found.status == verdict and (verdict == "correct" or found.detail)
    assert boxed_math(r"\boxed{73}", gold).reward == (0.0 if verdict == "correct" else None)


def table():
    """Gold, answer and verdict of every example in the documentation's table."""
    page = (Path(__file__).parents[2] / "docs/how-to/rewards.md").read_text(encoding="utf-8")
    rows = [re.split(r" \| ", line.strip("| ")) for line in page.splitlines() if line.startswith("| `")]
    for gold, same, other in rows:
        for answers, verdict in ((same, True), (other, False)):
            for answer in re.findall(r"`([^`]+)`", answers):
                yield re.search(r"`([^`]+)`", gold)[1], answer.replace(r"\|", "|"), verdict  # escaped in a table


@pytest.mark.parametrize(("gold", "answer", "verdict"), list(table()))
def test_compare_agrees_with_the_documentation(gold, answer, verdict):
    assert equal(answer, gold) == verdict
