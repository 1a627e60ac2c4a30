"""Problem and Problems: checks of one problem, and the order in which a run uses them."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hacpo_kit.tasks
from hacpo_kit.tasks.loading import load_problems
from hacpo_kit.tasks.order import epoch_order, shuffled_indices
from hacpo_kit.tasks.problems import Problem, Problems

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def numbered(n):
    return Problems([Problem(str(i), f"{i}+0=", str(i)) for i in range(n)])


def ids(problems):
    return [p.id for p in problems]


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(hacpo_kit.tasks.__path__)])
def test_tasks_docstring_examples_hold(name):
    assert doctest.testmod(importlib.import_module(f"hacpo_kit.tasks.{name}")).failed == 0


def test_tasks_import_is_light():
    code = (
        "import sys, hacpo_kit; hacpo_kit.load_problems('arithmetic'); from hacpo_kit.tasks import boxes;"
        "print({'torch', 'transformers', 'datasets', 'pyarrow', 'pandas', 'sympy', 'math_verify'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_problem_is_frozen_and_hashable():
    chat = Problem("a", CHAT, "2", {"level": 1})
    assert chat.prompt == tuple(CHAT)
    assert {chat: 1}[Problem("a", CHAT, "2")] == 1
    with pytest.raises(FrozenInstanceError):
        chat.gold = "3"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("id", "", "id must be text"),
        ("prompt", "  ", "prompt is empty"),
        ("prompt", [], "prompt is empty"),
        ("prompt", None, "prompt must be text"),
        ("prompt", {"role": "user"}, "prompt must be text"),
        ("prompt", [{"role": "user"}], "chat message"),
        ("prompt", ["hello"], "chat message"),
        ("prompt", "\ud83d", "surrogates not allowed"),
        ("prompt", [{"role": "user", "content": "\ud800"}], "surrogates not allowed"),
        ("prompt", [{"role": "user", "content": "1", "weight": float("nan")}], "not JSON compliant"),
        ("gold", 2, "gold must be text"),
        ("gold", "\udfff", "surrogates not allowed"),
    ],
)
def test_problem_refuses(field, value, message):
    with pytest.raises(ValueError, match=message):
        Problem(**{"id": "a", "prompt": "1+1=", "gold": "2", field: value})


def test_problems_is_an_immutable_sequence():
    problems = numbered(10)
    assert len(problems) == 10 and problems[-1].id == "9" and problems[1] in problems
    assert isinstance(problems[2:4], Problems) and ids(problems[2:4]) == ["2", "3"]
    assert problems == numbered(10) != numbered(9) and hash(problems) == hash(numbered(10))
    with pytest.raises(FrozenInstanceError):
        problems.name = "other"
    with pytest.raises(TypeError):
        problems[0] = problems[1]


def test_problems_refuses_repeated_ids():
    with pytest.raises(ValueError, match="1 ids occur more than once: 'a'"):
        Problems([Problem("a", "1", "1"), Problem("b", "2", "2"), Problem("a", "3", "3")])


def test_problems_fingerprint_depends_on_content_and_order():
    a, b = numbered(2)
    variants = [
        (a, b), (b, a), (a,), (), (replace(a, gold="7"), b), (replace(a, id="x"), b), (replace(a, prompt="?"), b),
        (replace(a, prompt=[{"role": "user", "content": a.prompt}]), b),
    ]  # fmt: skip
    fingerprints = [Problems(v).fingerprint() for v in variants]
    assert len(set(fingerprints)) == len(fingerprints)
    assert Problems((a, b), "another name").fingerprint() == fingerprints[0]
    assert load_problems("arithmetic").fingerprint() == "31debf65e009ae44"


def test_problems_sample_has_no_repetition_and_depends_on_its_seed():
    problems = numbered(50)
    assert sorted(ids(problems.sample(50)), key=int) == ids(problems)
    assert ids(problems.sample(20, seed=3)) == ids(problems.sample(20, seed=3)) != ids(problems.sample(20, seed=4))
    assert len(problems.sample(0)) == 0
    for k in (51, -1):
        with pytest.raises(ValueError, match=str(k)):
            problems.sample(k)


def test_problems_order_is_fixed():
    assert ids(numbered(8).sample(8, seed=0)) == ["4", "0", "7", "5", "1", "2", "6", "3"]
    assert ids(numbered(8).batch(5, 6, seed=1)) == ["0", "1", "4", "5", "6", "7"]


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 25), st.integers(-3, 2**40))
def test_problems_batch_uses_every_problem_once_per_epoch(data, n, seed):
    size = data.draw(st.integers(1, n))
    problems = numbered(n)
    stream = [i for position in range(0, 4 * n + size, size) for i in ids(problems.batch(position, size, seed))]
    for epoch in range(4):
        assert sorted(stream[epoch * n : (epoch + 1) * n], key=int) == ids(problems)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 25), st.integers(0, 500), st.integers(0, 9))
def test_problems_batch_has_no_repetition_and_depends_on_its_arguments_only(data, n, position, seed):
    size = data.draw(st.integers(1, n))
    batch = numbered(n).batch(position, size, seed)
    assert len(set(ids(batch))) == size
    epoch_order.cache_clear()  # as in a new process that starts at the stored position
    assert numbered(n).batch(position, size, seed) == batch


@pytest.mark.parametrize("size", [1, 4, 12, 24])
def test_problems_batch_order_differs_by_seed_and_epoch(size):
    problems = numbered(24)

    def epoch(number, seed):
        return tuple(i for p in range(0, 24, size) for i in ids(problems.batch(24 * number + p, size, seed)))

    assert len({epoch(number, seed) for number in range(5) for seed in range(5)}) == 25
    assert epoch(2, 0) == tuple(problems[i].id for i in shuffled_indices(24, "batch", 0, 2))


def test_problems_batch_refuses_impossible_sizes():
    with pytest.raises(ValueError, match=r"batch of 4 would repeat problems.*prompts_per_step"):
        numbered(3).batch(0, 4)
    for position, size in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="at least"):
            numbered(3).batch(position, size)
