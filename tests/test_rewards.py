"""The verifier: which answers are paid, and that nothing an answer contains can stop, slow or mislead the others."""

import json
import math
import random
import re
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hacpo_kit.rewards import Verdict, boxed_math, score
from hacpo_kit.tasks import workers
from hacpo_kit.tasks.verifier import MAX_CHARS, compare, integer, last_box, same_text, usable

ROOT = Path(__file__).resolve().parent.parent
ROWS = [json.loads(line) for line in (Path(__file__).parent / "golden" / "answers.jsonl").read_text().splitlines()]
KNOWN_EXCEPTIONS: dict[str, str] = {}  # row id → why it gets another reward; PAPER.md repeats them
HANG = r"\boxed{\dfrac{5^{(5^{(5^{(5^5)})} - 4)} - 5}{16}}"


REWARD = {"correct": 1.0, "wrong": 0.0, "no_answer": 0.0, "timeout": 0.0, "error": None, "unscorable": None}


def statuses(verdicts):
    return [verdict.status for verdict in verdicts]


# ---------------------------------------------------------------------------------------------- the golden rows


@pytest.fixture(scope="module")
def golden_verdicts():
    verdicts = score([(row["response"], row["gold"]) for row in ROWS], timeout=2.0)
    return {row["id"]: verdict for row, verdict in zip(ROWS, verdicts, strict=True)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_golden_row(row, golden_verdicts):
    if row["id"] in KNOWN_EXCEPTIONS:
        assert golden_verdicts[row["id"]].reward != row["reward"], "no exception any more: take it off the list"
        pytest.xfail(KNOWN_EXCEPTIONS[row["id"]])
    assert golden_verdicts[row["id"]].reward == row["reward"]


def test_golden_statuses(golden_verdicts):
    expected = {"N1": "no_answer", "N2": "no_answer", "N6": "unscorable", "N7": "correct", "N9": "timeout"}
    assert {name: golden_verdicts[name].status for name in expected} == expected
    assert len(ROWS) == 30
    assert len(KNOWN_EXCEPTIONS) <= 3


# ---------------------------------------------------------------------------------------------- the rules

EQUAL = r"""
1 1/4 | 5/4;  -1 1/4 | -5/4;  12\frac12 | 12.5;  0.\overline{3} | 1/3;  27.0 | 27;  1{,}234 | 1234
10\,080 | 10,\!080;  28\% | 0.28;  28\% | 28;  62.5 | 62.5%;  4.5\times10^{33} | 4.5e33;  0.00001 | 1e-5
1.4142136 | \sqrt2;  0.333333 | 1/3;  pi/2 | \dfrac{\pi}{2};  2 pi r | 2\pi r;  arctan(2) | \tan^{-1} 2;  \log_2 8 | 3
90 | 90^\circ;  \$18 | 18;  ３ | 3;  −3 | -3;  72\text{ eggs} | 72;  18 dollars | 18;  5 \text{ cm}^2 | 5
5\text{ million} | 5,000,000;  \frac{1}{3}. | \frac13;  x=5 | 5;  5 | x=5;  f(x)=x+1 | x+1;  2x+2y=4 | x+y=2
xy=1 | y=1/x;  x=2y | y=x/2;  x+y=5 | 5;  1,2 | 2,1;  \{3,1\} | 1,3;  x=1 or x=2 | 2,1;  y=2,x=1 | x=1,y=2
19, 46 and 82 | 82, 19, 46;  (1,2),(3,4) | (3,4),(1,2);  -3, 3 | \pm 3;  1+\sqrt{19},1-\sqrt{19} | 1 \pm \sqrt{19}
1,2,...,n | 1, 2, \dots, n;  x>2 | 2<x;  2<x | (2,\infty);  x \in [1,2] | [1,2];  (1,2)\cup(3,4) | (3,4)\cup(1,2)
\frac{1}{\sqrt{n}} | \sqrt{1/n};  (x+1)^2 | x^2+2x+1;  \sqrt{x^2} | |x|;  \frac{1-i}{4} | \frac{1}{2+2i}
m_{\max}=2 | m_{\max}=4/2;  \begin{pmatrix} 1/2 \\ 2 \end{pmatrix} | \begin{pmatrix} 0.5 \\ 2 \end{pmatrix}
52 | 52_8;  52_{8} | 52_8;  C | \text{(C)};  (C) | \text{(C)};  \text{Even} | even;  np.arcsin(10/13) | \arcsin(10/13)
\sqrt{2}\sqrt{3}-\sqrt{6} | 0;  x = 1,234 | 1234;  k=4 | k=4.0;  y = 9,829 \text{ cm} | 9829;  N=0.5 | \frac{1}{2}
"""
UNEQUAL = r"""
1 1/4 | 11/4;  4 10/3 | 10;  4 10/3 | 14/3;  28 | 0.28;  0.33 | 1/3;  1.414 | \sqrt2;  123456.5 | 123456
4.6e33 | 4.5e33;  2.7e-7 | 2.8e-7;  \frac{1}{2006!} | \frac{1}{2004!};  2^{100} | 2^{100}+1;  5\text{ million} | 5
2.5\% | 2;  2021 | \pm 2021;  (1,2) | (2,1);  \{1,3\} | (1,3);  {1,3} | (3,1);  [3,4] | (3,4);  [3,4) | (3,4]
1,2 | 1,2,3;  7=5 | 5;  x=7=5 | 5;  5 6 | 11;  5, 7 | 5;  5 \text{ or } 7 | 5;  \infty | 9.6;  n=1,2,3 | n=2,3,4
x=1,y=2 | 2,1;  y=5 | x=5;  x+y=3 | x+y=2;  x^2+2=0 | x^2+1=0;  x'+x-1=0 | 0;  2 | k \ge 2;  x>2 | x>3
5 | 5, 7;  x \in [1,2] | y=3;  x \in [1,2] | x=2
1, 2, 3, ... | 1, 2, 3;  1, 3, \ldots, 2n-1 | 1, 2, \ldots, n;  \frac{n(n+1)}{2} | 1+2+\ldots+n;  52_8 | 52_9
52_8 | 52;  |x| | x;  \ln(x^2) | 2\ln x;  \frac{1+i}{4} | \frac{1}{2+2i};  6 | 6m;  2\cos 3 | 2\cos 3t
\pi(r^2-R^2) | \pi(R^2-r^2);  0 | \pi(R^2-r^2);  c | C;  D | \text{(C)};  evil | live;  no | yes;  2n | even
4 | \foo{3} 4;  \begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 2 \\ 1 \end{pmatrix};  1/0 | 5
10^{10^{10}} | 3;  x = = 4 | 4;  x = 1,235 | 1234;  e=3 | 3;  y=4 | x=4;  x=3=4 | 4
"""


def cases(table):
    return [tuple(case.split(" | ")) for line in table.strip().splitlines() for case in line.split(";  ")]


@pytest.mark.parametrize(("answer", "gold"), cases(EQUAL))
def test_equal(answer, gold):
    assert compare(answer, gold) == (1.0, "correct")


@pytest.mark.parametrize(("answer", "gold"), [c for c in cases(UNEQUAL) if usable(c[1])])
def test_unequal(answer, gold):
    assert compare(answer, gold) == (0.0, "wrong")


UNUSABLE = ["", "  ", "$$", "nan", "None", r"\frac{1}{", "}{", "???", r"\text{}", "1/0", r"\foo{3} 4", "4 10/3"]


@pytest.mark.parametrize("gold", UNUSABLE)
def test_unusable_gold_is_unscorable_whatever_the_response(gold):
    responses = [r"\boxed{1}", "no box", r"\boxed{" + gold + "}", ""]
    assert [(v.reward, v.status) for v in score([(r, gold) for r in responses])] == [(None, "unscorable")] * 4


def test_gold_none_is_unscorable_and_other_types_are_refused():
    assert score([(r"\boxed{1}", None)])[0].status == "unscorable"
    with pytest.raises(TypeError, match="item 1"):
        score([("", "1"), ("", 27.0)])


@given(st.integers(), st.integers())
def test_integers_compare_as_integers(a, b):
    assert (integer(f"{a:,}") == integer(str(b))) == (a == b)


def test_integers_of_any_length():
    long = "7" * 6000  # beyond what int() reads
    assert statuses(score([(rf"\boxed{{0{long}}}", long), (rf"\boxed{{{long}1}}", long)])) == ["correct", "wrong"]


# ---------------------------------------------------------------------------------------------- the box


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
def test_box_ends_at_its_own_brace(before, inside, after):
    assert last_box(before + " \\boxed{" + inside + "}" + after) == (inside.strip() or None)


@given(st.text(alphabet="\\boxed{} 5\n", max_size=60))
def test_last_box_takes_any_text(text):
    box = last_box(text)
    assert box is None or (box == box.strip() and box in text)


def test_last_box_is_linear():
    began = time.process_time()  # its own work: what else the machine does, does not count
    for text in (r"\boxed{" * 40_000, r"\boxed" * 40_000, r"\boxed" + " " * 240_000, r"\boxed{" + "{" * 240_000):
        assert last_box(text) is None
    assert time.process_time() - began < 2


# ---------------------------------------------------------------------------------------------- many at once


def test_score_keeps_the_order_and_verifies_equal_answers_once(monkeypatch):
    verified = []

    def verify(items, **how):
        verified.extend(items)
        return workers.verify(items, **how)

    monkeypatch.setattr("hacpo_kit.rewards.verify", verify)
    pairs = [(rf"so \boxed{{\frac{{{i % 7}}}{{8}}}}", r"\frac{3}{8}") for i in range(70)]
    assert statuses(score(pairs)) == ["correct" if i % 7 == 3 else "wrong" for i in range(70)]
    assert len(verified) == 7


def test_score_compares_integers_without_a_process(monkeypatch):
    monkeypatch.setattr("hacpo_kit.rewards.verify", None)
    pairs = [("thinking " * 500 + rf"\boxed{{{i % 97:,}}}", str(i % 89)) for i in range(512)] + [("none", "5")]
    start = time.process_time()
    verdicts = score(pairs)
    assert time.process_time() - start < 0.1
    assert [v.reward for v in verdicts] == [float(i % 97 == i % 89) for i in range(512)] + [0.0]
    assert verdicts[-1].status == "no_answer"


def test_score_takes_an_overlong_box_for_no_answer():
    verdicts = score([(r"\boxed{" + "1+" * MAX_CHARS + "1}", gold) for gold in ("5", r"\frac{1}{2}")])
    assert {v.status for v in verdicts} == {"no_answer"}
    assert "characters" in verdicts[0].detail
    assert boxed_math(r"\boxed{5}", "1+" * MAX_CHARS + "1").status == "unscorable"


@pytest.fixture(scope="module")
def benchmark(script):
    """benchmarks/boxed_math.py, whose hostile responses are used here, too."""
    return script("boxed_math")


def test_score_survives_a_storm_of_hostile_responses(benchmark):
    """The full one, of 10,000, is `python benchmarks/boxed_math.py`."""
    storm = benchmark.weather(120, timeout=0.3, workers=2)  # raises for an item that was at work longer
    assert storm["different"] == sum(storm["statuses"].values()) == 120
    assert set(storm["statuses"]) <= set(REWARD) and {"wrong", "no_answer"} < set(storm["statuses"])
    assert 0 < storm["peak_memory_of_a_worker"] < workers.MEMORY_LIMIT
    assert boxed_math(r"\boxed{\frac{6}{14}}", r"\frac{3}{7}").status == "correct"


def test_score_needs_little_time_in_this_process(benchmark, monkeypatch):
    """What is done outside the worker processes, where nothing could end it, is linear in the text."""
    monkeypatch.setattr("hacpo_kit.rewards.verify", lambda items, **how: [Verdict(None, "error")] * len(items))
    draw = random.Random(0)
    for kind, make in benchmark.HOSTILE.items():
        for text in (make(draw), (make(draw) * 2_000)[:500_000]):
            start = time.process_time()
            score([(rf"\boxed{{{text}}}", "5")])
            same_text(last_box(rf"\boxed{{{text}}}"), text[:MAX_CHARS])
            assert time.process_time() - start < 0.5, kind


def test_benchmark_has_correct_and_wrong_answers(benchmark):
    rates = benchmark.speeds(64, repeats=1, workers=2)  # raises unless about half are correct
    assert set(rates) == set(benchmark.WANTED) and min(rates.values()) > 0


PIECES = [r"\pi", r"\infty", r"\text{even}", r"\ldots", r"\pm 3", "\x00", "\u202e1", r"\left(", r"\{1,2\}", "9^{9^9}"]
FORMS = ["{%s}", "(%s)", r"\frac{%s}{2}", r"\sqrt{%s}", "2^{%s}", r"\sin(%s)", "%s,%s", r"\boxed{%s}", "%s = 3", "%s"]
LATEX = st.recursive(
    st.text(r"0123456789xyn+-*/^_=(),.[]\ %|!<>&", max_size=8) | st.text(max_size=6) | st.sampled_from(PIECES),
    lambda inner: st.tuples(st.sampled_from(FORMS), inner).map(lambda made: made[0].replace("%s", made[1])),
    max_leaves=6,
)


@settings(max_examples=25)
@given(answers=st.lists(LATEX, min_size=1, max_size=6), gold=LATEX)
def test_hostile_latex_gets_a_verdict_each(answers, gold):
    verdicts = score([(rf"\boxed{{{answer}}}", gold) for answer in answers], timeout=0.5, workers=2)
    assert [v.reward for v in verdicts] == [REWARD[v.status] for v in verdicts]
    assert len({v.status == "unscorable" for v in verdicts}) == 1 or "not read" in str(
        verdicts
    )  # it is the gold's fault


@given(LATEX)
def test_the_second_opinion_takes_any_text(text):
    assert same_text(text, text) == bool(re.sub(r"\s|\.+$", "", text)) or re.search(r"[\\$~.]", text)
    assert not same_text(None, text)


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True), (r"\left( 1, 2 \right)", "(1,2)", True), ("$5$.", "5", True),
        ("0.5", r"\frac{1}{2}", False), ("", "", False), (None, "5", False), (r"\leftarrow", "arrow", False),
        ("5" * (MAX_CHARS + 1), "5" * (MAX_CHARS + 1), False),
    ],
)  # fmt: skip
def test_a_second_opinion_compares_texts(answer, gold, same):
    assert same_text(answer, gold) is same


# ---------------------------------------------------------------------------------------------- the user's own function


def test_score_calls_a_user_function_here_and_in_order():
    calls = []
    verdicts = score([("a", "1"), ("bb", "2"), ("", "3")], fn=lambda r, g: (calls.append((r, g)), len(r) / 2)[1])
    assert calls == [("a", "1"), ("bb", "2"), ("", "3")]
    assert verdicts == [Verdict(0.5, "correct"), Verdict(1.0, "correct"), Verdict(0.0, "wrong")]


@pytest.mark.parametrize("value", [True, 1, 1.0, torch.tensor(1.0), Verdict(1.0, "correct")])
def test_score_takes_a_number_or_a_verdict(value):
    assert score([("", "")], fn=lambda r, g: value) == [Verdict(1.0, "correct")]


def test_score_gives_an_error_where_a_user_function_fails():
    def fn(response, gold):
        return {"a": 1.0}[response]

    assert score([("a", ""), ("b", "")], fn=fn) == [Verdict(1.0, "correct"), Verdict(None, "error", "KeyError: 'b'")]


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, None, "1.0", [1.0], 10**400, torch.ones(2), Verdict(math.nan, "correct")]
)
def test_score_refuses_a_reward_that_is_no_finite_number(value):
    with pytest.raises(ValueError, match="item 1") as caught:
        score([("a", ""), ("b", "")], fn=lambda r, g: 0.0 if r == "a" else value)
    assert caught.value.item == 1  # by which a run names agent, problem and rollout


@pytest.mark.parametrize("setting", [{"timeout": 0}, {"timeout": math.nan}, {"workers": 0}])
def test_score_refuses_bad_settings(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        score([(r"\boxed{1}", "1")], **setting)


def test_score_refuses_a_reward_function_that_cannot_be_called():
    with pytest.raises(TypeError, match="callable"):
        score([(r"\boxed{1}", "1")], fn="exact")


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet=r"0123456789xyn+-*/^_=(),.{}[]\ %", max_size=12))
def test_boxed_math_gives_any_answer_a_verdict(answer):
    verdict = boxed_math(r"\boxed{" + answer + "}", r"\frac{1}{2}", timeout=2.0)
    assert verdict.status in ("correct", "wrong", "no_answer", "timeout")
