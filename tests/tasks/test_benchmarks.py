"""The paper's benchmarks: rows of our own, in the form of the real ones."""

import json
import re
from pathlib import Path

import datasets
import pytest

import hacpo_kit.tasks.problems as module
from hacpo_kit.rewards import score
from hacpo_kit.tasks.benchmarks import BENCHMARKS, TEMPLATE, table
from hacpo_kit.tasks.problems import load_problems

OLYMPIAD = {"context": None, "is_multiple_answer": False, "unit": None, "answer_type": "Numerical", "error": None}
ROWS = {
    "math500": [{"problem": "Add $2$ and $3$.", "solution": "?", "answer": "5", "level": 1, "unique_id": "t/1.json"}],
    "math": [{"problem": "Halve $1$.", "level": "Level 1", "solution": r"Not \boxed{1}, but \boxed{\frac{1}{2}}."}],
    "gsm8k": [{"question": "Ann has 1000 and 234 pens.", "answer": "1000+234=<<1000+234=1234>>1234\n#### 1,234"}],
    "aime25": [{"id": 1, "problem": "How many?", "solution": "7", "answer": "007", "url": "", "question": "How many?"}],
    "amc23": [{"id": 0, "problem": "Nine times three?", "answer": 27.0, "url": ""}],
    "minerva_math": [{"problem": "A speed.", "solution": r"So \boxed{4.5e3} cm.", "type": "Motion", "idx": 0}],
    "olympiadbench": [{"id": 5, "question": "Find all.", "final_answer": [r"$1$,$\sqrt{2}$"], **OLYMPIAD}],
}
GOLDS = {
    "math500": "5", "math": r"\frac{1}{2}", "gsm8k": "1,234", "aime25": "007", "amc23": "27", "minerva_math": "4.5e3",
    "olympiadbench": r"$1$,$\sqrt{2}$",
}  # fmt: skip
ANSWERS = {
    "math500": "5.0", "math": "0.5", "gsm8k": "1234", "aime25": "7", "amc23": "27", "minerva_math": "4500",
    "olympiadbench": r"\sqrt{2}, 1",
}  # fmt: skip


def write(folder, name, rows):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", BENCHMARKS)
def test_files_in_the_form_of_each_benchmark(tmp_path, name):
    problems = load_problems(write(tmp_path, name, ROWS[name] * 2), benchmark=name)
    assert [p.gold for p in problems] == [GOLDS[name]] * 2
    assert [p.id for p in problems] == [f"{name}/0", f"{name}/1"] and problems.name == name
    question = ROWS[name][0].get("problem") or ROWS[name][0]["question"]
    assert problems[0].prompt == TEMPLATE.replace("{prompt}", question) and r"\boxed{}" in TEMPLATE
    assert load_problems(**json.loads(json.dumps(problems.source))) == problems
    bare = load_problems(tmp_path / f"{name}.jsonl", benchmark=name, template="{prompt}", limit=1)
    assert bare[0].prompt == question and len(bare) == 1
    assert load_problems(ROWS[name], benchmark=name)[0].gold == GOLDS[name]  # a table in memory


def test_another_spelling_of_each_gold_is_paid():
    said = [(rf"\boxed{{{ANSWERS[name]}}}", GOLDS[name]) for name in BENCHMARKS]
    assert [v.status for v in score(said)] == ["correct"] * 7


@pytest.mark.parametrize("name", BENCHMARKS)
def test_from_the_hub(monkeypatch, name):
    asked = []

    def load_dataset(*args, **options):
        asked.append((*args, options["split"], options["revision"]))
        return datasets.Dataset.from_list(ROWS[name])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    problems = load_problems(name)
    b = BENCHMARKS[name]
    assert asked == [(b.dataset, b.config, b.split, None)] and problems[0].gold == GOLDS[name]
    assert problems.source == {"source": name, "split": b.split} | ({"config": b.config} if b.config else {})
    assert load_problems(**problems.source) == problems
    load_problems(name, split="train", revision="abc")
    assert asked[-1] == (b.dataset, b.config, "train", "abc")


@pytest.mark.parametrize(
    ("name", "row", "why"),
    [
        ("gsm8k", {"question": "?", "answer": "It is 5."}, "answer has nothing after ####"),
        ("gsm8k", {"question": "?", "answer": None}, "answer is empty"),
        ("math", {"problem": "?", "solution": r"It is \boxed{5"}, r"solution has no \boxed{} that is closed"),
        ("amc23", {"problem": "?", "answer": float("nan")}, "answer is empty"),
        ("olympiadbench", {"question": "Prove it.", "final_answer": None, **OLYMPIAD}, "an open question or a proof"),
        ("olympiadbench", {"question": "?", "final_answer": [], **OLYMPIAD}, "an open question or a proof"),
        (
            "olympiadbench",
            {"question": "?", "final_answer": ["5"], **OLYMPIAD, "answer_type": "Need_human_evaluate"},
            "a person has to judge",
        ),
        ("olympiadbench", {"question": "?", "final_answer": ["5,6"], **OLYMPIAD, "error": "1,2"}, "several tolerances"),
    ],
)
def test_a_row_without_a_usable_gold_stays_and_is_named(name, row, why):
    with pytest.warns(UserWarning, match=rf"1 of 2 rows have no gold.*{re.escape(why)}.*'{name}/1'"):
        problems = load_problems([*ROWS[name], row], benchmark=name)
    assert [p.gold for p in problems] == [GOLDS[name], ""]
    assert any(why in note and f"{name}/1" in note for note in problems.notes)
    assert why in problems[1].meta["no_gold"]


def test_many_rows_without_gold_are_counted_not_listed():
    with pytest.warns(UserWarning, match=r"'gsm8k/4', … \(7 in all\)"):
        load_problems([{"question": str(i), "answer": "?"} for i in range(7)], benchmark="gsm8k")


def test_olympiad_columns():
    row = {
        "question": "Which angles?", "context": "A triangle.", "final_answer": ["$90$,$60$"], "is_multiple_answer": True,
        "unit": r"^{\circ}", "answer_type": "Numerical", "error": "1e-1",
    }  # fmt: skip
    problem = load_problems([row], benchmark="olympiadbench", template="{prompt}")[0]
    assert problem.prompt.startswith("A triangle.\n\nWhich angles?")
    assert "separated by commas" in problem.prompt and r"^{\circ}" in problem.prompt
    assert problem.gold == "$90$,$60$ (tolerance 1e-1)"
    several = load_problems([{**row, "final_answer": ["1", "2"], "error": None}], benchmark="olympiadbench")
    assert several[0].gold == "1, 2"


@pytest.mark.parametrize(
    ("rows", "benchmark", "message"),
    [
        ([{"prompt": "?", "answer": "#### 5"}], "gsm8k", r"no column 'question', which holds the question of GSM8K"),
        (
            [{"question": "?", "gold": "5"}],
            "gsm8k",
            r"no column 'answer', which holds the gold answer of GSM8K; it has",
        ),
        ([{"text": "?", "solution": "5"}], "minerva_math", "no column 'problem' or 'question'"),
        ([{"question": " ", "answer": "#### 5"}], "gsm8k", "row 1: the prompt is missing or empty"),
        (["?"], "gsm8k", "row 1: expected an object"),
        ([], "gsm8k", "holds no problems"),
        (ROWS["gsm8k"], "gsm9k", "there is no benchmark 'gsm9k'; there are 'math500'"),
    ],
)
def test_what_is_no_benchmark_is_refused(rows, benchmark, message):
    with pytest.raises(ValueError, match=message):
        load_problems(rows, benchmark=benchmark)


def test_benchmarks_take_no_columns():
    with pytest.raises(ValueError, match="its own columns, does not take prompt="):
        load_problems(ROWS["gsm8k"], benchmark="gsm8k", prompt="question")
    with pytest.raises(ValueError, match="does not take benchmark="):
        load_problems("sums", benchmark="gsm8k")


def test_the_table_of_benchmarks_is_the_one_in_the_docs():
    assert table() in (Path(module.__file__).parents[2] / "data" / "README.md").read_text(encoding="utf-8")
    assert {name for name, b in BENCHMARKS.items() if b.metric != "avg@1"} == {"aime25"}


@pytest.mark.parametrize(
    ("answer", "gold", "reward"),
    [
        ("9.80", "9.81 (tolerance 0.02)", 1.0),
        ("9.78", "9.81 (tolerance 0.02)", 0.0),
        (r"g = 9.82 \text{ m/s}^2", "9.81 (tolerance 0.02)", 1.0),
        (r"\pi", "3.1 (tolerance 1e-1)", 1.0),
        ("60.05, 90", "$90$,$60$ (tolerance 1e-1)", 1.0),
        ("60.05", "$90$,$60$ (tolerance 1e-1)", 0.0),
        ("x", "3.1 (tolerance 1e-1)", 0.0),
        ("3", r"\text{even} (tolerance 1)", None),
        ("3", "1/0 (tolerance 1)", None),
    ],
)
def test_a_gold_with_a_tolerance(answer, gold, reward):
    assert score([(rf"\boxed{{{answer}}}", gold)])[0].reward == reward
