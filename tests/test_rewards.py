"""The verifier: which answers are correct, and that no answer can stop, slow or mislead the others."""

import json
import math
import random
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hacpo_kit.rewards import Verdict, boxed_math, score
from hacpo_kit.tasks import workers
from hacpo_kit.tasks.boxes import MAX_CHARS, last_box, same_text

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


UNUSABLE = ["", "  ", "$$", "nan", "None", r"\frac{1}{", "}{", "???", r"\text{}", "1/0", r"\foo{3} 4", "4 10/3"]


@pytest.mark.parametrize("gold", UNUSABLE)
def test_unusable_gold_is_unscorable_whatever_the_response(gold):
    responses = [r"\boxed{1}", "no box", r"\boxed{" + gold + "}", ""]
    assert [(v.reward, v.status) for v in score([(r, gold) for r in responses])] == [(None, "unscorable")] * 4


def test_gold_none_is_unscorable_and_other_types_are_refused():
    assert score([(r"\boxed{1}", None)])[0].status == "unscorable"
    with pytest.raises(TypeError, match="item 1"):
        score([("", "1"), ("", 27.0)])


def test_integers_of_any_length():
    long = "7" * 6000  # beyond what int() reads
    assert statuses(score([(rf"\boxed{{0{long}}}", long), (rf"\boxed{{{long}1}}", long)])) == ["correct", "wrong"]


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


@pytest.mark.slow
def test_score_returns_a_verdict_for_every_hostile_response(benchmark):
    """The full one, of 10,000, is `python benchmarks/boxed_math.py`."""
    found = benchmark.judge_hostile(120, timeout=0.3, workers=2)  # raises for an item that was at work longer
    assert found["different"] == sum(found["statuses"].values()) == 120
    assert set(found["statuses"]) <= set(REWARD) and {"wrong", "no_answer"} < set(found["statuses"])
    assert 0 < found["peak_memory_of_a_worker"] < workers.MEMORY_LIMIT
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
