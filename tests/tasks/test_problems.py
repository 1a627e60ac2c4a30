import doctest
import json
import re
import subprocess
import sys
import tracemalloc
import warnings
import zlib
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hacpo_kit.tasks.problems as module
from hacpo_kit.tasks.problems import Problem, Problems, arithmetic_problem, load_problems

ROWS = [{"prompt": "1+1=", "gold": "2"}, {"prompt": "2+2=", "gold": "4"}, {"prompt": "3+3=", "gold": "6"}]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def made(n):
    return Problems([Problem(str(i), f"{i}+0=", str(i)) for i in range(n)])


def ids(problems):
    return [p.id for p in problems]


def write(path, text, **options):
    path.write_bytes(text.encode(**options) if isinstance(text, str) else text)
    return path


def jsonl(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def test_docstring_examples_hold():
    assert doctest.testmod(module).failed == 0


def test_import_is_light():
    heavy = ["torch", "transformers", "datasets", "pyarrow", "pandas"]
    # Without the package's own __init__, so that what that imports does not count.
    code = (
        "import sys, types\n"
        "package = sys.modules['hacpo_kit'] = types.ModuleType('hacpo_kit')\n"
        f"package.__path__ = [{str(Path(module.__file__).parents[1])!r}]\n"
        "import hacpo_kit.tasks.problems as p\n"
        f"p.load_problems('arithmetic'); print([m for m in {heavy} if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# ── Problem and Problems ─────────────────────────────────────────────────────────────────────────────────────────────


def test_problem_is_frozen_hashable_and_checked():
    chat = Problem("a", CHAT, "2", {"level": 1})
    assert chat.prompt == tuple(CHAT)
    assert {chat: 1}[Problem("a", CHAT, "2")] == 1
    with pytest.raises(FrozenInstanceError):
        chat.gold = "3"
    for bad in (
        {"id": ""},
        {"prompt": "  "},
        {"prompt": []},
        {"prompt": None},
        {"prompt": 3},
        {"prompt": {"role": "user"}},
        {"prompt": [{"role": "user"}]},
        {"prompt": ["hello"]},
        {"gold": 2},
        {"gold": None},
    ):
        with pytest.raises(ValueError, match=next(iter(bad)) + "|chat message"):
            Problem(**{"id": "a", "prompt": "1+1=", "gold": "2", **bad})


def test_problems_is_an_immutable_sequence():
    problems = made(10)
    assert len(problems) == 10
    assert problems[3].id == "3"
    assert problems[-1].id == "9"
    assert isinstance(problems[2:4], Problems)
    assert ids(problems[2:4]) == ["2", "3"]
    assert problems[2:4].source is None
    assert problems[1] in problems
    assert ids(reversed(problems))[0] == "9"
    assert not made(0)
    assert problems == made(10) != made(9)
    assert hash(problems) == hash(made(10))
    assert "10 problems" in repr(problems)
    with pytest.raises(FrozenInstanceError):
        problems.name = "other"
    with pytest.raises(TypeError):
        problems[0] = problems[1]
    with pytest.raises(IndexError):
        problems[10]


def test_to_frame_keeps_meta_and_renames_what_would_collide():
    frame = load_problems([{"q": "1+1", "a": "2", "gold": "old", "level": 3}], prompt="q", gold="a").to_frame()
    assert frame.to_dict("records") == [{"id": "list/0", "prompt": "1+1", "gold": "2", "meta.gold": "old", "level": 3}]
    assert list(made(0).to_frame().columns) == ["id", "prompt", "gold"]


def test_fingerprint_sees_every_change_of_content():
    a, b = made(2)
    variants = [
        (a, b), (b, a), (a,), (), (replace(a, gold="7"), b), (replace(a, id="x"), b), (replace(a, prompt="?"), b),
        (replace(a, prompt=[{"role": "user", "content": a.prompt}]), b),
    ]  # fmt: skip
    prints = [Problems(v).fingerprint() for v in variants]
    assert len(set(prints)) == len(prints)
    assert all(len(p) == 16 for p in prints)
    assert Problems((a, b), "another name").fingerprint() == prints[0]


# ── order ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sample_has_no_repetition_and_follows_its_seed():
    problems = made(50)
    assert sorted(ids(problems.sample(50)), key=int) == ids(problems)
    assert ids(problems.sample(20, seed=3)) == ids(problems.sample(20, seed=3)) != ids(problems.sample(20, seed=4))
    assert len(problems.sample(0)) == 0
    for k in (51, -1):
        with pytest.raises(ValueError, match="50"):
            problems.sample(k)


def test_order_is_the_same_on_every_machine_and_release():
    assert ids(made(8).sample(8, seed=0)) == ["4", "0", "7", "5", "1", "2", "6", "3"]
    assert ids(made(8).batch(5, 6, seed=1)) == ["0", "1", "4", "5", "6", "7"]


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 25), st.integers(-3, 2**40))
def test_batches_end_to_end_use_every_problem_once_an_epoch(data, n, seed):
    size = data.draw(st.integers(1, n))
    problems = made(n)
    stream = [i for position in range(0, 4 * n + size, size) for i in ids(problems.batch(position, size, seed))]
    for epoch in range(4):
        assert sorted(stream[epoch * n : (epoch + 1) * n], key=int) == ids(problems)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 25), st.integers(0, 500), st.integers(0, 9))
def test_no_batch_holds_a_problem_twice_and_a_resumed_one_is_the_same(data, n, position, seed):
    size = data.draw(st.integers(1, n))
    seen = made(n).batch(position, size, seed)
    assert len(set(ids(seen))) == size
    module._epoch_order.cache_clear()  # a new process, straight at the stored position
    assert made(n).batch(position, size, seed) == seen


@pytest.mark.parametrize("size", [1, 4, 12, 24])
def test_epochs_are_reshuffled_by_seed_and_epoch(size):
    problems = made(24)

    def epoch(number, seed):
        return tuple(i for p in range(0, 24, size) for i in ids(problems.batch(24 * number + p, size, seed)))

    assert len({epoch(number, seed) for number in range(5) for seed in range(5)}) == 25
    assert epoch(2, 0) == tuple(ids(problems[i] for i in module._shuffle(24, "batch", 0, 2)))


def test_problems_across_a_border_are_put_off_not_lost():
    problems = made(10)
    assert {i for step in range(5) for i in ids(problems.batch(4 * step, 4))} == set(ids(problems))
    counts = [i for step in range(50) for i in ids(problems.batch(4 * step, 4))]
    assert {counts.count(i) for i in ids(problems)} == {20}


def test_batch_refuses_what_it_cannot_give():
    with pytest.raises(ValueError, match=r"ask for at most 3 a step .*or load more problems"):
        made(3).batch(0, 4)
    for position, size in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="at least"):
            made(3).batch(position, size)


# ── the arithmetic family ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("split", "size"), [("train", 2000), ("test", 400)])
def test_arithmetic_is_right_balanced_and_without_duplicates(split, size):
    problems = load_problems("arithmetic", split=split)
    assert len(problems) == size == len({p.prompt for p in problems})
    assert problems.notes == ()
    for p in problems:
        text = p.prompt.removesuffix("=")
        a, b = map(int, text.replace("-", "+").split("+"))
        assert 10 <= b <= 99
        assert 10 <= a <= 99
        assert "+" in text or a >= b
        assert int(p.gold) == (a + b if "+" in text else a - b)
        assert (zlib.crc32(text.encode()) % 5 == 0) == (split == "test")
    assert sum("+" in p.prompt for p in problems) == size // 2


@pytest.mark.parametrize(("kinds", "whole"), [(["add"], 8100), (["sub"], 4095)])
def test_train_and_test_are_disjoint_and_together_the_universe(kinds, whole):
    parts = []
    for split, seed in (("train", 0), ("test", 1)):
        with pytest.raises(ValueError, match=r"1 to \d+ problems") as error:
            load_problems("arithmetic", split=split, kinds=kinds, size=10**6)
        available = int(str(error.value).split(" to ")[1].split()[0])
        parts.append(
            {p.prompt for p in load_problems("arithmetic", split=split, seed=seed, kinds=kinds, size=available)}
        )
    assert not parts[0] & parts[1]
    assert len(parts[0]) + len(parts[1]) == whole


@given(st.integers(0, 399), st.sampled_from(["train", "test"]), st.integers(0, 3))
def test_arithmetic_problem_is_found_again_from_its_id(index, split, seed):
    p = arithmetic_problem(index, split, seed)
    assert p.id == f"arithmetic/{split}/{seed}/{index}"
    assert p == load_problems("arithmetic", split=split, seed=seed, size=400)[index]


def test_arithmetic_options():
    one = load_problems("arithmetic", kinds=["sub"], size=10, seed=5, limit=4, template="Compute {prompt}")
    assert len(one) == 4
    assert one[0].id == "differences/train/5/0"
    assert one[0].prompt.startswith("Compute ")
    assert load_problems(**json.loads(json.dumps(one.source))) == one
    assert load_problems("arithmetic", kinds=("sub", "add")) == load_problems("arithmetic")
    assert load_problems("arithmetic", seed=1) != load_problems("arithmetic")
    for options, message in (
        ({"split": "dev"}, "'train', 'test'"),
        ({"kinds": ["mul"]}, "'add', 'sub'"),
        ({"kinds": []}, "'add', 'sub'"),
        ({"size": 0}, "1 to 6544"),
        ({"size": 6545}, "1 to 6544"),
        ({"prompt": "q"}, "does not take prompt="),
        ({"revision": "main"}, "does not take revision="),
    ):
        with pytest.raises(ValueError, match=message):
            load_problems("arithmetic", **options)
    with pytest.raises(IndexError):
        arithmetic_problem(10**6)
    with pytest.raises(IndexError):
        arithmetic_problem(-1)


def test_sums_and_differences_are_parts_of_arithmetic():
    for name, kind in (("sums", "add"), ("differences", "sub")):
        for split in ("train", "test"):
            part = load_problems(name, split=split, size=300, seed=2)
            assert part == load_problems("arithmetic", split=split, size=300, seed=2, kinds=[kind])
            assert load_problems(**json.loads(json.dumps(part.source))) == part
            assert {p.meta["kind"] for p in part} == {kind} and part.name == name
            assert all((zlib.crc32(p.prompt[:-1].encode()) % 5 == 0) == (split == "test") for p in part)


@pytest.mark.parametrize(("name", "kinds"), [("larger", 2), ("mixed", 4)])
def test_sets_outside_the_training_family(name, kinds):
    problems = load_problems(name, size=400, seed=1)
    assert len({p.prompt for p in problems}) == 400 and not problems.notes
    assert Counter(p.meta["kind"] for p in problems) == {p.meta["kind"]: 400 // kinds for p in problems[:kinds]}
    for p in problems:
        numbers = [int(n) for n in re.findall(r"\d+", p.prompt)]
        assert all((100 <= n <= 999) if name == "larger" else (10 <= n <= 99) for n in numbers)
        assert len(numbers) == (2 if name == "larger" else 3)
        text = p.prompt.removesuffix("=")
        assert int(p.gold) == eval(text)
        assert min(eval(text[: m.end()]) for m in re.finditer(r"\d+", text)) >= 0  # at no point below zero
    assert problems[:20].problems == load_problems(name, size=20, seed=1).problems  # fewer are the first of more
    assert load_problems(name, size=20) != load_problems(name, size=20, seed=1)
    assert load_problems(**json.loads(json.dumps(problems.source))) == problems
    assert load_problems(name, split="test", size=400, seed=1) == problems


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("larger", {"split": "train"}, "'larger' has no split 'train': it is made for testing only"),
        ("mixed", {"size": 10_001}, "mixed has 1 to 10000 problems, not 10001"),
        ("mixed", {"kinds": ["add"]}, "'mixed' does not take kinds="),
        ("sums", {"kinds": ["sub"]}, "'sums' does not take kinds="),
        ("sums", {"size": 10**5}, r"sums has 1 to \d+ problems in split 'train'"),
        ("differences", {"split": "dev"}, "'train', 'test'"),
        ("differences", {"gold": "x"}, "does not take gold="),
    ],
)
def test_options_of_the_arithmetic_sets(name, options, message):
    with pytest.raises(ValueError, match=message):
        load_problems(name, **options)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["jsonl", "json", "parquet", "csv"])
def anyfile(request, tmp_path):
    """A function that writes rows as one of the file types."""

    def save(rows):
        pd = pytest.importorskip("pandas")
        path = tmp_path / f"set.{request.param}"
        if request.param == "jsonl":
            return jsonl(path, rows)
        if request.param == "json":
            return write(path, json.dumps(rows))
        frame = pd.DataFrame(rows)
        frame.to_parquet(path) if request.param == "parquet" else frame.to_csv(path, index=False)
        return path

    return save


def test_every_file_type_with_mapped_columns(anyfile):
    path = anyfile([{"question": 'π "2",\nthen?', "answer": "2", "key": "a", "level": "x"},
                    {"question": "4?", "answer": "4", "key": "b", "level": "y"}])  # fmt: skip
    problems = load_problems(path, prompt="question", gold="answer", id="key")
    assert list(problems) == [Problem("a", 'π "2",\nthen?', "2"), Problem("b", "4?", "4")]
    assert problems.name == "set"
    assert problems[1].meta == {"level": "y"}
    assert load_problems(**json.loads(json.dumps(problems.source))) == problems
    assert ids(load_problems(str(path), prompt="question", gold="answer", limit=1)) == ["set/0"]


def test_every_file_type_names_missing_columns(anyfile):
    path = anyfile([{"question": "1+1", "answer": "2"}])
    with pytest.raises(ValueError, match=r"set.* no column 'prompt'; it has 'question', 'answer'.*prompt="):
        load_problems(path)
    with pytest.raises(ValueError, match=r"no column 'gold'.*gold="):
        load_problems(path, prompt="question")
    with pytest.raises(ValueError, match=r"no column 'key'.*id="):
        load_problems(path, prompt="question", gold="answer", id="key")


def test_every_file_type_refuses_an_empty_prompt_with_its_row(anyfile):
    path = anyfile([{"prompt": "1+1", "gold": "2"}, {"prompt": "", "gold": "4"}])
    with pytest.raises(ValueError, match=r"set\.\w+, (row 2|line [23]): the prompt is missing or empty"):
        load_problems(path)


def test_every_file_type_counts_missing_golds(anyfile):
    path = anyfile([{"prompt": "1+1", "gold": "2"}, {"prompt": "2+2", "gold": None}, {"prompt": "3+3", "gold": " "}])
    with pytest.warns(UserWarning, match="set: 2 of 3 rows have no gold; they pay nobody"):
        problems = load_problems(path)
    assert [p.gold for p in problems] == ["2", "", ""]
    assert problems.notes == ("2 of 3 rows have no gold; they pay nobody",)
    assert problems[:1].notes == ()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "frame", "frame from parquet", "dataset"])
def test_chat_prompts_from_everywhere(kind, tmp_path):
    pd = pytest.importorskip("pandas")
    rows = [{"prompt": CHAT, "gold": "2"}, {"prompt": [{"role": "user", "content": "2?", "name": "Ada"}], "gold": "4"}]
    source = jsonl(tmp_path / "chat.jsonl", rows)
    if kind != "jsonl":
        source = pd.DataFrame(rows)
    if "parquet" in kind:
        source.to_parquet(tmp_path / "chat.parquet")
        source = tmp_path / "chat.parquet" if kind == "parquet" else pd.read_parquet(tmp_path / "chat.parquet")
    if kind == "dataset":
        source = pytest.importorskip("datasets").Dataset.from_list(rows)
    problems = load_problems(source, template="Q: {prompt} \\boxed{}")
    assert problems[0].prompt == (CHAT[0], {"role": "user", "content": "Q: 1+1? \\boxed{}"})
    assert problems[1].prompt == ({"role": "user", "content": "Q: 2? \\boxed{}", "name": "Ada"},)
    json.dumps(problems[0].prompt)


def test_template_changes_the_last_user_message_only():
    turns = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user", "assistant")]
    (problem,) = load_problems([{"prompt": turns, "gold": "1"}], template="<{prompt}>")
    assert [m["content"] for m in problem.prompt] == ["u", "a", "<u>", "a"]
    assert turns[2]["content"] == "u"
    with pytest.raises(ValueError, match="no user message"):
        load_problems([{"prompt": turns[1:2], "gold": "1"}], template="<{prompt}>")
    with pytest.raises(ValueError, match=r"has no \{prompt\}"):
        load_problems(ROWS, template="{question}")


def test_template_leaves_latex_alone():
    (problem,) = load_problems(
        [{"prompt": r"$\frac{1}{2}$ {x}", "gold": "1"}], template="{prompt}\nPut the final answer in \\boxed{}."
    )
    assert problem.prompt == "$\\frac{1}{2}$ {x}\nPut the final answer in \\boxed{}."


def test_line_ends_marks_and_blank_lines(tmp_path):
    lines = [json.dumps(row, ensure_ascii=False) for row in [{"prompt": "a\u2028b", "gold": "2"}, *ROWS[1:]]]
    path = write(tmp_path / "set.jsonl", b"\xef\xbb\xbf" + "\r\n".join([lines[0], "", *lines[1:]]).encode())
    assert [p.prompt for p in load_problems(path)] == ["a\u2028b", "2+2=", "3+3="]
    path = write(tmp_path / "set.csv", b'\xef\xbb\xbfprompt,gold\r\n"1,\r\n2",007\r\n\r\n2+2=,4\r\n')
    assert [(p.prompt, p.gold) for p in load_problems(path)] == [("1,\r\n2", "007"), ("2+2=", "4")]
    path = write(tmp_path / "set.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode())
    assert len(load_problems(path)) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"prompt": "1", "gold": "1"}\r\n{"prompt": "\xff"}',
            r"a\.jsonl, line 2: byte 13 \(0xff\) is not UTF-8",
        ),
        ("a.csv", b"\xef\xbb\xbf\xe9", r"a\.csv, line 1: byte 1 \(0xe9\) is not UTF-8"),
        ("a.jsonl", b'{"prompt": "1", "gold": "1"}\n\n{"prompt": ', r"a\.jsonl, line 3: not valid JSON"),
        ("a.jsonl", b'{"prompt": "1", "gold": "1"}\n[1]', r"a\.jsonl, line 2: expected an object .* list"),
        ("a.json", b'{"prompt": "1"}\n{"prompt": "2"}', r"a\.json: not valid JSON .*\.jsonl"),
        ("a.json", b'{"prompt": "1"}', r"a\.json: expected a list of objects, found dict"),
        ("a.json", b"[3]", r"a\.json, row 1: expected an object"),
        ("a.csv", b'prompt,gold\n"1\n2",3\n4\n', r"a\.csv, line 4: 1 cells for 2 columns"),
        ("a.csv", b"prompt,gold\n1,2,3\n", r"a\.csv, line 2: 3 cells for 2 columns"),
        ("a.csv", b'prompt,gold\n1,2\n"3,4\n', r"a\.csv, line 3: not valid CSV"),
        ("a.csv", b"prompt,gold,gold\n1,2,3\n", r"a\.csv, line 1: columns of the same name"),
        ("a.csv", b"prompt,gold\n", r"a\.csv holds no problems"),
        ("a.jsonl", b"", r"a\.jsonl holds no problems"),
        ("a.parquet", b"PAR1 no", r"a\.parquet: not readable as Parquet"),
    ],
)
def test_broken_files_say_where(name, content, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_problems(write(tmp_path / name, content))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"[" * 200_000, r"a\.jsonl, line 1: not valid JSON \(it is nested too deeply\)"),
        ("a.json", b"[" * 200_000, r"a\.json: not valid JSON \(it is nested too deeply\)"),
        ("a.jsonl", b'{"prompt": "1", "gold": "1", "prompt": "2"}', r"line 1: .*'prompt' is given twice in one object"),
        ("a.jsonl", b'{"prompt": "1", "gold": ' + b"9" * 5_000 + b"}", r"a\.jsonl, line 1: not valid JSON"),
        ("a.jsonl", b'{"prompt": "1", "gold": Infinity}', r"a\.jsonl, line 1: gold must be text or a number, not inf"),
        ("a.jsonl", b'{"prompt": "\\ud83d", "gold": "1"}', r"line 1: prompt holds half a character \(U\+D83D\)"),
        ("a.jsonl", b'{"prompt": "1", "gold": "\\udfff"}', r"line 1: gold holds half a character"),
        (
            "a.jsonl",
            b'{"prompt": [{"role": "user", "content": "\\ud800"}], "gold": "1"}',
            "line 1: prompt holds half a",
        ),
        ("a.jsonl", '{"prompt": "1", "gold": "1"}'.encode("utf-16"), r"a\.jsonl, line 1: byte 1 \(0xff\) is not UTF-8"),
        ("a.csv", b"\xff\xfep\x00", r"a\.csv, line 1: byte 1 \(0xff\) is not UTF-8"),
        ("a.csv", b"prompt;gold\n1;2\n", r"a\.csv has no column 'prompt'; it has 'prompt;gold'"),
        ("a.csv", b"prompt,gold\n,2\n", r"a\.csv, line 2: the prompt is missing or empty"),
        ("a.csv", b'prompt,gold\n"' + b"1" * 200_000 + b'",2\n', r"a\.csv, line 2: not valid CSV \(field larger"),
        (
            "a.jsonl",
            b'{"prompt": [{"role": "user", "content": "1", "weight": NaN}], "gold": "1"}',
            "line 1: a chat message must be JSON",
        ),
        ("a.jsonl", b'{"prompt": 5, "gold": "1"}', "line 1: prompt must be text or a list of chat messages, not 5"),
        (
            "a.jsonl",
            b'{"prompt": "1", "gold": "1", "id": "a"}\n{"prompt": "2", "gold": 2, "id": "a"}',
            "1 ids occur more",
        ),
    ],
)
def test_hostile_files_say_where(name, content, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_problems(write(tmp_path / name, content))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "json"])
def test_a_gigantic_line_is_refused_before_it_fills_the_memory(kind, tmp_path, monkeypatch):
    path = jsonl(tmp_path / f"a.{kind}", ROWS) if kind == "jsonl" else write(tmp_path / f"a.{kind}", "prompt,gold\n")
    with path.open("r+b") as file:
        file.truncate(2**28)  # zeros without a line end, which take no room on the disk
    monkeypatch.setattr(module, "LONGEST_LINE", 2**20)
    monkeypatch.setattr(module, "LARGEST_JSON", 2**20)
    what = r"a\.json: 268,435,456 bytes are too many" if kind == "json" else r"line [24]: longer than 1,048,576 bytes"
    tracemalloc.start()
    with pytest.raises(ValueError, match=what):
        load_problems(path)
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()
    if kind == "jsonl":
        assert len(load_problems(path, limit=3)) == 3  # later lines are not looked at


def test_old_line_ends_and_mixed_types(tmp_path):
    path = write(tmp_path / "mac.csv", b'prompt,gold\r1+1=,2\r"2\r+2=",4\r')
    assert [(p.prompt, p.gold) for p in load_problems(path)] == [("1+1=", "2"), ("2\r+2=", "4")]
    rows = [{"prompt": "1", "gold": 1}, {"prompt": CHAT, "gold": "2"}, {"prompt": "3", "gold": 3.0, "extra": [1]}]
    problems = load_problems(jsonl(tmp_path / "mixed.jsonl", rows))
    assert [p.gold for p in problems] == ["1", "2", "3"] and problems[2].meta == {"extra": [1]}


def test_a_row_without_the_key_is_a_row_with_nothing_in_it(tmp_path):
    path = jsonl(tmp_path / "set.jsonl", [ROWS[0], {"gold": "4"}])
    with pytest.raises(ValueError, match=r"set\.jsonl, line 2: the prompt is missing"):
        load_problems(path)
    assert len(load_problems(path, limit=1)) == 1


def test_missing_files_and_unknown_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*none.jsonl"):
        load_problems(tmp_path / "none.jsonl")
    write(tmp_path / "notes.txt", "hello")
    for source in ("arithmatic", tmp_path / "notes.txt", tmp_path / "nothing"):
        with pytest.raises(ValueError, match=r"cannot load .*'arithmetic'.*owner/name"):
            load_problems(source)
    for source in (3, None, {"prompt": ["1"]}, (row for row in ROWS)):
        with pytest.raises(TypeError, match="cannot load problems from"):
            load_problems(source)
    with pytest.raises(ValueError, match="not written by save_to_disk"):
        load_problems(tmp_path)


def test_options_that_a_source_has_no_use_for_are_refused(tmp_path):
    path = jsonl(tmp_path / "set.jsonl", ROWS)
    for options in ({"split": "train"}, {"config": "main"}, {"revision": "1"}, {"size": 3}, {"seed": 1}):
        for source in (path, ROWS):
            with pytest.raises(ValueError, match=f"does not take {next(iter(options))}="):
                load_problems(source, **options)
    with pytest.raises(ValueError, match="limit must be at least 1"):
        load_problems(path, limit=0)


# ── golds, ids, duplicates ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("27.0", "27.0"), (27, "27"), (27.0, "27"), (-0.0, "0"), (0.5, "0.5"), (-3.25, "-3.25"), (1e-7, "0.0000001"),
        (10**40 + 1, str(10**40 + 1)), (1e20, "1" + "0" * 20), (np.int64(7), "7"), (np.float32(0.1), "0.1"),
        (["12"], "12"), (np.array(["12"]), "12"), (r"\frac{1}{2}", r"\frac{1}{2}"),
    ],
)  # fmt: skip
def test_golds_become_text(gold, text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_problems([{"prompt": "?", "gold": gold}])[0].gold == text


@given(st.integers())
def test_whole_golds_are_unchanged_through_json(number):
    assert load_problems([json.loads(json.dumps({"prompt": "?", "gold": number}))])[0].gold == str(number)


@pytest.mark.parametrize("gold", [True, np.bool_(False), float("inf"), [1, 2], [], {"a": 1}, b"2", ["a", "b"], [True]])
def test_golds_that_are_no_answer_are_refused_with_their_row(gold):
    with pytest.raises(ValueError, match="row 2: gold must be text or a number"):
        load_problems([ROWS[0], {"prompt": "?", "gold": gold}])


def test_missing_golds_of_every_make():
    pd = pytest.importorskip("pandas")
    golds = (None, float("nan"), pd.NA, pd.NaT, "", "1")
    with pytest.warns(UserWarning, match="5 of 6 rows have no gold"):
        problems = load_problems([{"prompt": str(i), "gold": gold} for i, gold in enumerate(golds)])
    assert [p.gold for p in problems] == ["", "", "", "", "", "1"]


def test_ids(tmp_path):
    assert ids(load_problems([{**row, "id": i} for i, row in enumerate(ROWS)])) == ["0", "1", "2"]
    assert ids(load_problems(ROWS)) == ["list/0", "list/1", "list/2"]
    with pytest.raises(ValueError, match="1 ids occur more than once: 'a'; name a unique column"):
        load_problems([{**row, "key": key} for row, key in zip(ROWS, "aba", strict=True)], id="key")
    with pytest.raises(ValueError, match="row 2: id must be text or a number, not None"):
        load_problems([{**ROWS[0], "id": 1}, ROWS[1]])


def test_repeated_prompts_are_kept_and_noted():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problems = load_problems([*ROWS, ROWS[0], ROWS[0]])
    assert len(problems) == 5
    assert problems.notes == ("2 of 5 rows repeat an earlier prompt",)


# ── tables in memory, folders, the hub ───────────────────────────────────────────────────────────────────────────────


def test_tables_in_memory():
    pd, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    wanted = [(row["prompt"], row["gold"]) for row in ROWS]
    dataset = datasets.Dataset.from_list(ROWS)
    alone = datasets.DatasetDict(test=dataset)
    for source in (ROWS, tuple(ROWS), pd.DataFrame(ROWS), dataset, dataset.with_format("numpy"), alone):
        problems = load_problems(source)
        assert [(p.prompt, p.gold) for p in problems] == wanted
        assert problems.source is None
    both = datasets.DatasetDict(train=dataset, test=dataset.select([2]))
    assert len(load_problems(both, split="test")) == 1
    for split in (None, "dev"):
        with pytest.raises(ValueError, match="choose split= from 'train', 'test'"):
            load_problems(both, split=split)
    with pytest.raises(ValueError, match="same name"):
        load_problems(pd.DataFrame([["a", "b"]], columns=["prompt", "prompt"]))


def test_frame_numbers_with_gaps():
    pd = pytest.importorskip("pandas")
    with pytest.warns(UserWarning, match="1 of 2 rows"):
        problems = load_problems(pd.DataFrame({"prompt": ["a", "b"], "gold": [27, None]}))
    assert [p.gold for p in problems] == ["27", ""]


def test_problems_from_problems():
    problems = load_problems("arithmetic", size=6)
    assert load_problems(list(problems)) == problems == load_problems(problems)
    again = load_problems(problems, template="{prompt} ", limit=2)
    assert again.name == "arithmetic"
    assert again[1].prompt == problems[1].prompt + " "
    assert again.source is None
    with pytest.raises(ValueError, match="does not take gold="):
        load_problems(problems, gold="answer")
    with pytest.raises(ValueError, match="row 2: expected an object with named columns, found Problem"):
        load_problems([ROWS[0], problems[0]])


def test_folder_written_by_save_to_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(tmp_path / "two")
    assert len(load_problems(tmp_path / "one")) == 3
    problems = load_problems(str(tmp_path / "two"), split="test", limit=2)
    assert ids(problems) == ["two/0", "two/1"]
    assert load_problems(**problems.source) == problems


def test_hub_dataset(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    problems = load_problems("owner/sums", config="main", split="train[:3]", revision="abc", limit=2)
    (args, kwargs) = asked[0]
    assert args == ("owner/sums", "main")
    assert kwargs.get("trust_remote_code", False) is False
    assert kwargs["split"] == "train[:3]"
    assert kwargs["revision"] == "abc"
    assert ids(problems) == ["owner/sums/0", "owner/sums/1"]
    assert load_problems(**problems.source) == problems
    assert asked[0] == asked[1]


def test_hub_without_network_says_so_and_what_to_do(monkeypatch):
    datasets = pytest.importorskip("datasets")
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=r"could not load .*'owner/no-such-sums'.*no such local path.*give that path"):
        load_problems("owner/no-such-sums", split="train")
