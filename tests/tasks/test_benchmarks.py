"""The paper's benchmarks, with rows of our own that have the columns of the real ones."""

import json
import re
from pathlib import Path

import datasets
import pytest

from hacpo_kit.rewards import score
from hacpo_kit.tasks.benchmarks import BENCHMARKS, TEMPLATE
from hacpo_kit.tasks.loading import load_problems

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


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_files(tmp_path, name):
    path = jsonl(tmp_path / f"{name}.jsonl", ROWS[name] * 2)
    problems = load_problems(path, benchmark=name)
    assert [p.gold for p in problems] == [GOLDS[name]] * 2
    assert [p.id for p in problems] == [f"{name}/0", f"{name}/1"] and problems.name == name
    question = ROWS[name][0].get("problem") or ROWS[name][0]["question"]
    assert problems[0].prompt == TEMPLATE.replace("{prompt}", question)
    assert load_problems(**json.loads(json.dumps(problems.source))) == problems
    bare = load_problems(path, benchmark=name, template="{prompt}", limit=1)
    assert bare[0].prompt == question and len(bare) == 1
    assert load_problems(ROWS[name], benchmark=name)[0].gold == GOLDS[name]  # a table in memory


def test_benchmark_golds_equal_other_spellings():
    responses = [(rf"\boxed{{{ANSWERS[name]}}}", GOLDS[name]) for name in BENCHMARKS]
    assert [verdict.status for verdict in score(responses)] == ["correct"] * 7


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_from_the_hub(monkeypatch, name):
    calls = []

    def load_dataset(*args, **options):
        calls.append((*args, options["split"], options["revision"]))
        return datasets.Dataset.from_list(ROWS[name])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    problems = load_problems(name)
    b = BENCHMARKS[name]
    assert calls == [(b.dataset, b.config, b.split, None)] and problems[0].gold == GOLDS[name]
    assert problems.source == {"source": name, "split": b.split} | ({"config": b.config} if b.config else {})
    assert load_problems(**problems.source) == problems
    load_problems(name, split="train", revision="abc")
    assert calls[-1] == (b.dataset, b.config, "train", "abc")


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("gsm8k", {"question": "?", "answer": "It is 5."}, "nothing after ####"),
        ("gsm8k", {"question": "?", "answer": None}, "answer is empty"),
        ("math", {"problem": "?", "solution": r"It is \boxed{5"}, r"\boxed{}"),
        ("amc23", {"problem": "?", "answer": float("nan")}, "answer is empty"),
        ("olympiadbench", {"question": "Prove it.", "final_answer": None, **OLYMPIAD}, "a proof"),
        ("olympiadbench", {"question": "?", "final_answer": [], **OLYMPIAD}, "a proof"),
        (
            "olympiadbench",
            {"question": "?", "final_answer": ["5"], **OLYMPIAD, "answer_type": "Need_human_evaluate"},
            "a person",
        ),
        ("olympiadbench", {"question": "?", "final_answer": ["5,6"], **OLYMPIAD, "error": "1,2"}, "several tolerances"),
    ],
)
def test_benchmark_keeps_and_names_rows_without_a_gold(name, row, reason):
    with pytest.warns(UserWarning, match=rf"1 of 2 problems.*'{name}/1'.*{re.escape(reason)}"):
        problems = load_problems([*ROWS[name], row], benchmark=name)
    assert [p.gold for p in problems] == [GOLDS[name], ""]
    assert reason in problems[1].meta["no_gold"]


def test_benchmark_counts_many_rows_without_a_gold():
    with pytest.warns(UserWarning, match=r"'gsm8k/4' .*, … \(7 in all\)"):
        load_problems([{"question": str(i), "answer": "?"} for i in range(7)], benchmark="gsm8k")


def test_benchmark_olympiad_columns():
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
        ([{"prompt": "?", "answer": "#### 5"}], "gsm8k", r"no column 'question'.*GSM8K"),
        ([{"question": "?", "gold": "5"}], "gsm8k", r"no column 'answer'; it has 'question', 'gold'"),
        ([{"text": "?", "solution": "5"}], "minerva_math", "no column 'problem' or 'question'"),
        ([{"question": " ", "answer": "#### 5"}], "gsm8k", "row 1: the prompt is empty"),
        (["?"], "gsm8k", "row 1: expected an object"),
        ([], "gsm8k", "holds no problems"),
        (ROWS["gsm8k"], "gsm9k", "there is no benchmark 'gsm9k'; there are 'math500'"),
    ],
)
def test_benchmark_refuses_other_tables(rows, benchmark, message):
    with pytest.raises(ValueError, match=message):
        load_problems(rows, benchmark=benchmark)


def test_benchmark_takes_no_columns():
    with pytest.raises(ValueError, match="does not take prompt="):
        load_problems(ROWS["gsm8k"], benchmark="gsm8k", prompt="question")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_is_in_the_table_of_the_documentation(name):
    lines = (Path(__file__).parents[2] / "data" / "README.md").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"| `{name}` |")]
    _, title, dataset, questions, golds, metric = [cell.strip() for cell in line.strip("|").split("|")]
    b = BENCHMARKS[name]
    assert (title, metric) == (b.title, b.metric)
    assert re.findall(r"`([^`]+)`", dataset) == [part for part in (b.dataset, b.config, b.split) if part]
    assert re.findall(r"`([a-z_]+)`", questions) == list(b.questions)
    assert re.findall(r"`([a-z_]+)`", golds) == list(b.golds)
