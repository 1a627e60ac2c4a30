"""The generated problem sets."""

import json
import re
import zlib
from collections import Counter

import pytest

from hacpo_kit.tasks.arithmetic import arithmetic_set
from hacpo_kit.tasks.loading import load_problems


@pytest.mark.parametrize(("split", "size"), [("train", 2000), ("test", 400)])
def test_arithmetic_set_is_correct_balanced_and_without_repetitions(split, size):
    problems = load_problems("arithmetic", split=split)
    assert len(problems) == size == len({p.prompt for p in problems})
    for p in problems:
        text = p.prompt.removesuffix("=")
        a, b = map(int, text.replace("-", "+").split("+"))
        assert 10 <= b <= 99 and 10 <= a <= 99
        assert "+" in text or a >= b
        assert int(p.gold) == (a + b if "+" in text else a - b)
        assert (zlib.crc32(text.encode()) % 5 == 0) == (split == "test")
    assert sum("+" in p.prompt for p in problems) == size // 2


@pytest.mark.parametrize(("name", "whole"), [("sums", 8100), ("differences", 4095)])
def test_arithmetic_set_train_and_test_are_disjoint_and_complete(name, whole):
    parts = []
    for split, seed in (("train", 0), ("test", 1)):
        with pytest.raises(ValueError, match=r"1 to \d+ problems") as error:
            arithmetic_set(name, split, size=10**6)
        available = int(re.search(r"1 to (\d+)", str(error.value))[1])
        parts.append({p.prompt for p in arithmetic_set(name, split, seed, available)})
    assert not parts[0] & parts[1]
    assert len(parts[0]) + len(parts[1]) == whole


@pytest.mark.parametrize(("name", "kind"), [("sums", "add"), ("differences", "sub")])
def test_arithmetic_set_contains_sums_and_differences(name, kind):
    for split in ("train", "test"):
        part = arithmetic_set(name, split, 2, 150)
        both = [p for p in arithmetic_set("arithmetic", split, 2, 300) if p.meta["kind"] == kind]
        assert [(p.prompt, p.gold) for p in part] == [(p.prompt, p.gold) for p in both]


@pytest.mark.parametrize(("name", "kinds"), [("larger", 2), ("mixed", 4)])
def test_arithmetic_set_for_testing_only(name, kinds):
    problems = load_problems(name, size=400, seed=1)
    assert len({p.prompt for p in problems}) == 400 and not problems.notes
    assert Counter(p.meta["kind"] for p in problems) == {p.meta["kind"]: 400 // kinds for p in problems[:kinds]}
    for p in problems:
        numbers = [int(n) for n in re.findall(r"\d+", p.prompt)]
        assert all((100 <= n <= 999) if name == "larger" else (10 <= n <= 99) for n in numbers)
        assert len(numbers) == (2 if name == "larger" else 3)
        text = p.prompt.removesuffix("=")
        assert int(p.gold) == eval(text)
        assert min(eval(text[: m.end()]) for m in re.finditer(r"\d+", text)) >= 0  # no negative partial result
    assert problems[:20] == load_problems(name, size=20, seed=1)[:]  # fewer are the first of more
    assert load_problems(name, size=20) != load_problems(name, size=20, seed=1)
    assert load_problems(name, split="test", size=400, seed=1) == problems


@pytest.mark.parametrize("name", ["arithmetic", "sums", "mixed"])
def test_arithmetic_set_is_reloaded_from_its_source(name):
    problems = load_problems(name, size=10, seed=5, limit=4, template="Compute {prompt}")
    assert len(problems) == 4 and problems.name == name
    assert problems[0].prompt.startswith("Compute ")
    assert load_problems(**json.loads(json.dumps(problems.source))) == problems


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("arithmetic", {"split": "dev"}, "'train', 'test'"),
        ("arithmetic", {"size": 0}, "1 to 6544"),
        ("arithmetic", {"size": 6545}, "1 to 6544"),
        ("arithmetic", {"prompt": "q"}, "does not take prompt="),
        ("arithmetic", {"revision": "main"}, "does not take revision="),
        ("sums", {"benchmark": "gsm8k"}, "does not take benchmark="),
        ("larger", {"split": "train"}, "'larger' has no split 'train'; it has 'test'"),
        ("mixed", {"size": 10_001}, "1 to 10000"),
    ],
)
def test_arithmetic_set_refuses(name, options, message):
    with pytest.raises(ValueError, match=message):
        load_problems(name, **options)
