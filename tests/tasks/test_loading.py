"""load_problems: files, tables in memory, folders and the hub."""

import json
import warnings
from decimal import Decimal

import datasets
import huggingface_hub
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacpo_kit.tasks.loading import load_problems
from hacpo_kit.tasks.problems import Problem

ROWS = [{"prompt": "1+1=", "gold": "2"}, {"prompt": "2+2=", "gold": "4"}, {"prompt": "3+3=", "gold": "6"}]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def ids(problems):
    return [p.id for p in problems]


def write(path, content):
    path.write_bytes(content)
    return path


def jsonl(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


@pytest.fixture(params=["jsonl", "json", "parquet", "csv"])
def save(request, tmp_path):
    """A function that writes rows as one of the file types."""

    def write_rows(rows):
        path = tmp_path / f"set.{request.param}"
        if request.param == "jsonl":
            return jsonl(path, rows)
        if request.param == "json":
            return write(path, json.dumps(rows).encode())
        frame = pd.DataFrame(rows)
        frame.to_parquet(path) if request.param == "parquet" else frame.to_csv(path, index=False)
        return path

    return write_rows


def test_load_problems_maps_columns_of_every_file_type(save):
    path = save([{"question": 'π "2",\nthen?', "answer": "2", "key": "a", "level": "x"},
                 {"question": "4?", "answer": "4", "key": "b", "level": "y"}])  # fmt: skip
    problems = load_problems(path, prompt="question", gold="answer", id="key")
    assert list(problems) == [Problem("a", 'π "2",\nthen?', "2"), Problem("b", "4?", "4")]
    assert problems.name == "set"
    assert problems[1].meta == {"level": "y"}
    assert load_problems(**json.loads(json.dumps(problems.source))) == problems
    assert ids(load_problems(str(path), prompt="question", gold="answer", limit=1)) == ["set/0"]


@pytest.mark.parametrize("kind", ["list", "parquet", "jsonl"])
def test_load_problems_reads_a_field_inside_a_column(tmp_path, kind):
    rows = [{"data": {"prompt": f"{i}+1="}, "reward_model": {"ground_truth": i + 1, "style": "rule"}} for i in range(3)]
    source = rows
    if kind == "parquet":
        source = tmp_path / "set.parquet"
        pd.DataFrame(rows).to_parquet(source)
    if kind == "jsonl":
        source = jsonl(tmp_path / "set.jsonl", rows)
    problems = load_problems(source, prompt="data.prompt", gold="reward_model.ground_truth")
    assert [(p.prompt, p.gold) for p in problems] == [("0+1=", "1"), ("1+1=", "2"), ("2+1=", "3")]
    assert problems[0].meta["reward_model"]["style"] == "rule"
    with pytest.raises(ValueError, match=r"no column 'reward_model\.truth'"):
        load_problems(source, prompt="data.prompt", gold="reward_model.truth")
    plain = [{"a.b": "1+1=", "gold": "2"}]
    assert load_problems(plain, prompt="a.b")[0].prompt == "1+1="


def test_load_problems_names_missing_columns_of_every_file_type(save):
    path = save([{"question": "1+1", "answer": "2"}])
    with pytest.raises(ValueError, match=r"set.* no column 'prompt'; it has 'question', 'answer'.*prompt="):
        load_problems(path)
    with pytest.raises(ValueError, match=r"no column 'gold'"):
        load_problems(path, prompt="question")
    with pytest.raises(ValueError, match=r"no column 'key'"):
        load_problems(path, prompt="question", gold="answer", id="key")


def test_load_problems_refuses_an_empty_prompt_with_its_row(save):
    path = save([{"prompt": "1+1", "gold": "2"}, {"prompt": "", "gold": "4"}])
    with pytest.raises(ValueError, match=r"set\.\w+, (row 2|line [23]): the prompt is empty"):
        load_problems(path)


def test_load_problems_counts_missing_golds(save):
    path = save([{"prompt": "1+1", "gold": "2"}, {"prompt": "2+2", "gold": None}, {"prompt": "3+3", "gold": " "}])
    with pytest.warns(UserWarning, match="set: 2 of 3 problems have no reference answer"):
        problems = load_problems(path)
    assert [p.gold for p in problems] == ["2", "", ""]
    assert len(problems.notes) == 1 and problems[:1].notes == ()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "frame", "frame from parquet", "dataset"])
def test_load_problems_takes_chat_prompts(kind, tmp_path):
    rows = [{"prompt": CHAT, "gold": "2"}, {"prompt": [{"role": "user", "content": "2?", "name": "Ada"}], "gold": "4"}]
    source = jsonl(tmp_path / "chat.jsonl", rows) if kind == "jsonl" else pd.DataFrame(rows)
    if "parquet" in kind:
        source.to_parquet(tmp_path / "chat.parquet")
        source = tmp_path / "chat.parquet" if kind == "parquet" else pd.read_parquet(tmp_path / "chat.parquet")
    if kind == "dataset":
        source = datasets.Dataset.from_list(rows)
    problems = load_problems(source, template="Q: {prompt} \\boxed{}")
    assert problems[0].prompt == (CHAT[0], {"role": "user", "content": "Q: 1+1? \\boxed{}"})
    assert problems[1].prompt == ({"role": "user", "content": "Q: 2? \\boxed{}", "name": "Ada"},)


def test_load_problems_template_changes_the_last_user_message_only():
    turns = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user", "assistant")]
    (problem,) = load_problems([{"prompt": turns, "gold": "1"}], template="<{prompt}>")
    assert [m["content"] for m in problem.prompt] == ["u", "a", "<u>", "a"]
    assert turns[2]["content"] == "u"
    with pytest.raises(ValueError, match="no user message"):
        load_problems([{"prompt": turns[1:2], "gold": "1"}], template="<{prompt}>")
    with pytest.raises(ValueError, match=r"'\{question\}' does not contain \{prompt\}"):
        load_problems(ROWS, template="{question}")


def test_load_problems_template_leaves_latex_unchanged():
    template = "{prompt}\nPut the final answer in \\boxed{}."
    (problem,) = load_problems([{"prompt": r"$\frac{1}{2}$ {x}", "gold": "1"}], template=template)
    assert problem.prompt == "$\\frac{1}{2}$ {x}\nPut the final answer in \\boxed{}."


def test_load_problems_keeps_the_text_of_files_exactly(tmp_path):
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
        ("a.jsonl", b'{"prompt": "1", "gold": "1"}\r\n{"prompt": "\xff"}', r"a\.jsonl, line 2: .*UTF-8.*0xff"),
        ("a.csv", b"\xef\xbb\xbf\xe9", r"a\.csv, line 1: .*UTF-8.*0xe9"),
        ("a.csv", b"prompt,gold\n1,2\n\xe9,3\n", r"a\.csv, line 3: .*UTF-8.*0xe9"),
        ("a.jsonl", b'{"prompt": "1", "gold": "1"}\n\n{"prompt": ', r"a\.jsonl, line 3: not valid JSON"),
        ("a.jsonl", b'{"prompt": "1", "gold": "1"}\n[1]', r"a\.jsonl, line 2: expected an object .* list"),
        ("a.jsonl", b"[" * 200_000, r"a\.jsonl, line 1: not valid JSON"),
        ("a.jsonl", b'{"prompt": "1", "gold": ' + b"9" * 5_000 + b"}", r"a\.jsonl, line 1: not valid JSON"),
        ("a.jsonl", b'{"prompt": "1", "gold": Infinity}', r"a\.jsonl, line 1: gold must be text or a number, not inf"),
        ("a.jsonl", b'{"prompt": "\\ud83d", "gold": "1"}', r"a\.jsonl, line 1: .*surrogates"),
        ("a.jsonl", b'{"prompt": 5, "gold": "1"}', r"line 1: prompt must be text or a list of chat messages, not 5"),
        ("a.jsonl", b'{"prompt": "1", "gold": "1"}\n{"gold": "2"}', "line 2: prompt must be text.*None"),
        ("a.jsonl", b"", r"a\.jsonl holds no problems"),
        ("a.json", b'{"prompt": "1"}\n{"prompt": "2"}', r"a\.json .*not valid JSON"),
        ("a.json", b'{"prompt": "1"}', r"a\.json: expected a list of objects, found dict"),
        ("a.json", b"[3]", r"a\.json, row 1: expected an object"),
        ("a.csv", b'prompt,gold\n"1\n2",3\n4\n', r"a\.csv, line 4: .*1 cells for 2 columns"),
        ("a.csv", b"prompt,gold\n1,2,3\n", r"a\.csv, line 2: .*3 cells for 2 columns"),
        ("a.csv", b'prompt,gold\n1,2\n"3,4\n', r"a\.csv, line 3: not valid CSV"),
        ("a.csv", b"prompt,gold,gold\n1,2,3\n", r"a\.csv, line 1: .*columns of the same name"),
        ("a.csv", b"prompt,gold\n", r"a\.csv holds no problems"),
        ("a.csv", b"prompt;gold\n1;2\n", r"a\.csv has no column 'prompt'; it has 'prompt;gold'"),
        ("a.csv", b"prompt,gold\n,2\n", r"a\.csv, line 2: the prompt is empty"),
        ("a.csv", b'prompt,gold\n"' + b"1" * 200_000 + b'",2\n', r"a\.csv, line 2: not valid CSV"),
        ("a.parquet", b"PAR1 no", r"a\.parquet: not readable as Parquet"),
    ],
)
def test_load_problems_refuses_broken_files_with_their_line(name, content, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_problems(write(tmp_path / name, content))


def test_load_problems_limit_ignores_later_rows(tmp_path):
    path = jsonl(tmp_path / "set.jsonl", [ROWS[0], {"gold": "4"}])
    assert len(load_problems(path, limit=1)) == 1
    with pytest.raises(ValueError, match="limit must be at least 1"):
        load_problems(path, limit=0)


def test_load_problems_takes_mixed_types(tmp_path):
    rows = [{"prompt": "1", "gold": 1}, {"prompt": CHAT, "gold": "2"}, {"prompt": "3", "gold": 3.0, "extra": [1]}]
    problems = load_problems(jsonl(tmp_path / "mixed.jsonl", rows))
    assert [p.gold for p in problems] == ["1", "2", "3"] and problems[2].meta == {"extra": [1]}


def test_load_problems_refuses_unknown_sources(tmp_path):
    for name in ("none.jsonl", "none.parquet"):
        with pytest.raises(FileNotFoundError, match=name):
            load_problems(tmp_path / name)
    write(tmp_path / "notes.txt", b"hello")
    for source in ("arithmatic", tmp_path / "notes.txt", tmp_path / "nothing", tmp_path):
        with pytest.raises(ValueError, match=r"cannot load .*owner/name"):
            load_problems(source)
    for source in (3, None, {"prompt": ["1"]}, (row for row in ROWS)):
        with pytest.raises(TypeError, match="cannot load problems from"):
            load_problems(source)


@pytest.mark.parametrize(
    "option", [{"split": "train"}, {"config": "main"}, {"revision": "1"}, {"size": 3}, {"seed": 1}]
)
def test_load_problems_refuses_options_of_other_sources(option, tmp_path):
    for source in (jsonl(tmp_path / "set.jsonl", ROWS), ROWS):
        with pytest.raises(ValueError, match=f"does not take {next(iter(option))}="):
            load_problems(source, **option)


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("27.0", "27.0"), (27, "27"), (27.0, "27"), (-0.0, "0"), (0.5, "0.5"), (-3.25, "-3.25"), (1e-7, "0.0000001"),
        (Decimal("27.0"), "27"), (Decimal("1E+2"), "100"), (Decimal("-0.50"), "-0.5"), (Decimal("-0.0"), "0"),
        (Decimal("0.1234567890123456789012345678901"), "0.1234567890123456789012345678901"),
        (10**40 + 1, str(10**40 + 1)), (1e20, "1" + "0" * 20), (np.int64(7), "7"), (np.float32(0.1), "0.1"),
        (["12"], "12"), (np.array(["12"]), "12"), (r"\frac{1}{2}", r"\frac{1}{2}"),
    ],
)  # fmt: skip
def test_load_problems_converts_golds_to_text(gold, text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_problems([{"prompt": "?", "gold": gold}])[0].gold == text


@given(st.integers())
def test_load_problems_keeps_integers_unchanged(number):
    assert load_problems([json.loads(json.dumps({"prompt": "?", "gold": number}))])[0].gold == str(number)


@pytest.mark.parametrize("gold", [True, np.bool_(False), float("inf"), [1, 2], [], {"a": 1}, b"2", ["a", "b"], [True]])
def test_load_problems_refuses_golds_of_other_types_with_their_row(gold):
    with pytest.raises(ValueError, match="row 2: gold must be text or a number"):
        load_problems([ROWS[0], {"prompt": "?", "gold": gold}])


def test_load_problems_recognises_missing_golds():
    golds = (None, float("nan"), pd.NA, pd.NaT, "", "1")
    with pytest.warns(UserWarning, match="5 of 6 problems have no reference answer"):
        problems = load_problems([{"prompt": str(i), "gold": gold} for i, gold in enumerate(golds)])
    assert [p.gold for p in problems] == ["", "", "", "", "", "1"]


def test_load_problems_ids():
    assert ids(load_problems([{**row, "id": i} for i, row in enumerate(ROWS)])) == ["0", "1", "2"]
    assert ids(load_problems(ROWS)) == ["list/0", "list/1", "list/2"]
    with pytest.raises(ValueError, match="1 ids occur more than once: 'a'"):
        load_problems([{**row, "key": key} for row, key in zip(ROWS, "aba", strict=True)], id="key")
    with pytest.raises(ValueError, match="row 2: id must be text or a number, not None"):
        load_problems([{**ROWS[0], "id": 1}, ROWS[1]])


def test_load_problems_takes_tables_in_memory():
    dataset = datasets.Dataset.from_list(ROWS)
    for source in (ROWS, tuple(ROWS), pd.DataFrame(ROWS), dataset, dataset.with_format("numpy")):
        problems = load_problems(source)
        assert [(p.prompt, p.gold) for p in problems] == [(row["prompt"], row["gold"]) for row in ROWS]
        assert problems.source is None
    with pytest.raises(TypeError, match="one split of a dataset"):
        load_problems(datasets.DatasetDict(train=dataset))
    with pytest.raises(ValueError, match="same name"):
        load_problems(pd.DataFrame([["a", "b"]], columns=["prompt", "prompt"]))
    with pytest.warns(UserWarning, match="1 of 2"):
        problems = load_problems(pd.DataFrame({"prompt": ["a", "b"], "gold": [27, None]}))
    assert [p.gold for p in problems] == ["27", ""]  # pandas stores 27.0


def test_load_problems_takes_a_list_of_problems():
    problems = load_problems("arithmetic", size=6)
    assert load_problems(list(problems)) == problems
    assert load_problems(list(problems), template="{prompt} ", limit=2)[1].prompt == problems[1].prompt + " "
    with pytest.raises(ValueError, match="does not take gold="):
        load_problems(list(problems), gold="answer")
    with pytest.raises(ValueError, match="row 2: expected an object with named columns, found Problem"):
        load_problems([ROWS[0], problems[0]])


def test_load_problems_reads_the_hub(monkeypatch):
    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    problems = load_problems("owner/sums", config="main", split="train[:3]", revision="abc", limit=2)
    assert calls == [(("owner/sums", "main"), {"split": "train[:3]", "revision": "abc"})]
    assert ids(problems) == ["owner/sums/0", "owner/sums/1"]
    assert load_problems(**problems.source) == problems
    assert calls[0] == calls[1]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: datasets.DatasetDict(train=ROWS, test=ROWS))
    with pytest.raises(ValueError, match="needs split=; it has 'train', 'test'"):
        load_problems("owner/sums")


def test_load_problems_without_network_names_the_dataset(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=r"'owner/no-such-sums'.*Without network"):
        load_problems("owner/no-such-sums", split="train")


@pytest.mark.parametrize("name", ["twice.jsonl", "twice.json"])
def test_load_problems_refuses_a_name_that_occurs_twice_in_an_object(tmp_path, name):
    row = b'{"prompt": "1+1=", "gold": "2", "gold": "3"}'
    file = write(tmp_path / name, row if name.endswith("jsonl") else b"[" + row + b"]")
    with pytest.raises(ValueError, match="'gold'"):
        load_problems(file)
