"""evaluate_sets() and `hacpo-kit eval`: the same result with and without a stop."""

import itertools
import json
import math

import pytest
from click.testing import CliRunner

import hacpo_kit as hk
from hacpo_kit.cli import main
from hacpo_kit.common.files import read_lines
from hacpo_kit.rewards import Verdict, boxed_math
from hacpo_kit.runs.scoreboard import finished_batches, open_sets

SETS = {
    "easy": hk.load_problems([hk.Problem(f"easy/{i}", f"{i}+{i}=", str(2 * i)) for i in range(5)]),
    "hard": hk.load_problems([hk.Problem(f"hard/{i}", f"{i}*{i}=", str(i * i)) for i in range(3)]),
}
HOW = {"batch_size": 4, "max_new_tokens": 6, "progress": False}


@pytest.fixture
def two(tiny_agent):
    return [tiny_agent(name="a"), tiny_agent(name="b", seed=1)]


def answers(folder):
    return {p.relative_to(folder).as_posix(): read_lines(p) for p in folder.rglob("*.jsonl")}


def test_evaluate_sets_returns_the_scores_of_evaluate(two, tmp_path):
    board = hk.evaluate_sets(two, SETS, tmp_path, samples=3, **HOW)
    for (name, problems), agent in itertools.product(SETS.items(), two):
        alone = hk.evaluate(agent, problems, samples=3, **HOW)
        assert board.scores[agent.name][name] == alone[agent.name]
        lines = read_lines(tmp_path / "answers" / agent.name / f"{name}.jsonl")
        assert [(r["problem"], r["text"]) for r in lines] == [(r.problem, r.text) for r in alone.answers]
    assert board.metrics == {"easy": "avg@3", "hard": "avg@3"}
    stored = json.loads((tmp_path / "eval.json").read_text())
    assert stored["scores"] == board.scores and stored["metrics"] == board.metrics
    assert (tmp_path / "eval.md").read_text() == board.to_markdown()
    assert (tmp_path / "eval.csv").read_text().splitlines()[0] == "agent,easy avg@3,hard avg@3,average"


@pytest.mark.parametrize("samples", [1, 3])
def test_evaluate_sets_resumes_after_a_stop_at_any_rollout(two, tmp_path, samples):
    whole = hk.evaluate_sets(two, SETS, tmp_path / "whole", samples=samples, **HOW)
    count = 2 * 8 * samples
    for stop in range(0, count, 11):
        folder, left = tmp_path / f"stop-{stop}", itertools.count()

        def interrupted(response, gold, left=left, stop=stop):
            if next(left) == stop:
                raise KeyboardInterrupt
            return boxed_math(response, gold)

        interrupted.__qualname__ = boxed_math.__qualname__
        with pytest.raises(KeyboardInterrupt):
            hk.evaluate_sets(two, SETS, folder, samples=samples, reward_function=interrupted, **HOW)
        done = sum(map(len, answers(folder).values()))
        assert done <= stop
        scored = []

        def counted(response, gold, scored=scored):
            scored.append(response)
            return boxed_math(response, gold)

        counted.__qualname__ = boxed_math.__qualname__
        again = hk.evaluate_sets(two, SETS, folder, samples=samples, reward_function=counted, **HOW)
        assert again.scores == whole.scores and answers(folder) == answers(tmp_path / "whole")
        assert len(scored) == count - done  # no finished batch is scored again
        for file in ("eval.json", "eval.md", "eval.csv"):
            assert (folder / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_finished_batches_of_a_file_that_was_cut_at_any_byte(two, tmp_path):
    hk.evaluate_sets(two[:1], SETS, tmp_path, samples=2, **HOW)
    path = tmp_path / "answers" / "a" / "easy.jsonl"
    rows, text = read_lines(path), path.read_bytes()
    for cut in range(0, len(text) + 1, 37):
        path.write_bytes(text[:cut])
        kept, whole = finished_batches(path, 10, 4)
        assert kept == rows[: len(kept)] and len(kept) in (0, 4, 8, 10) and whole == -(-len(kept) // 4)
        assert read_lines(path) == kept
    path.write_bytes(text[: len(text) // 2])
    hk.evaluate_sets(two[:1], SETS, tmp_path, samples=2, **HOW)
    assert path.read_bytes() == text


def test_evaluate_sets_refuses_other_settings_and_takes_more_agents_and_sets(two, tiny_agent, tmp_path):
    hk.evaluate_sets(two[:1], {"easy": SETS["easy"]}, tmp_path, **HOW)
    for sets, options, message in (
        (SETS, {"max_new_tokens": 7}, "set easy, max_new_tokens: 6 → 7"),
        (SETS, {"samples": 2}, "set easy, samples: 1 → 2"),
        (SETS, {"batch_size": 5}, "set easy, batch_size: 4 → 5"),
        (SETS, {"seed": 1}, "set easy, seed: 0 → 1"),
        (SETS, {"reward_function": lambda *_: 1.0}, "set easy, reward_function"),
        ({"easy": SETS["easy"][:4]}, {}, "set easy, problems: 5 → 4"),
    ):
        with pytest.raises(ValueError, match=f"other settings.*{message}.*another folder"):
            hk.evaluate_sets(two[:1], sets, tmp_path, **{**HOW, **options})
    with pytest.raises(ValueError, match="agent a, weights: "):
        hk.evaluate_sets([tiny_agent(name="a", seed=5)], SETS, tmp_path, **HOW)
    board = hk.evaluate_sets(two, SETS, tmp_path, **HOW)
    assert list(board.scores) == ["a", "b"] and list(board.metrics) == ["easy", "hard"]


def test_scoreboard_names_cut_and_unscorable_rollouts(two, tmp_path, say):
    say(two[0], [r"\boxed{0}", r"\boxed{2}", "0" * 40])
    with pytest.warns(UserWarning, match="no reference answer"):
        own = hk.load_problems([{"prompt": p, "gold": g} for p, g in (("0", "0"), ("1", ""), ("2", "4"))])
    board = hk.evaluate_sets(two[:1], {"own": own}, tmp_path, batch_size=3, max_new_tokens=12, progress=False)
    assert board.scores["a"]["own"]["avg@1"] == 0.5
    text = board.to_markdown()
    assert "|       0.500 |" in text and "average" not in text
    assert "a on own: 1 of 3 answers were cut at 12 tokens" in text
    assert "a on own: 1 of 3 answers could not be scored" in text
    assert "own: 1 of 3 problems have no reference answer" in text


def test_scoreboard_has_no_score_for_a_set_without_scorable_rollouts(two, tmp_path):
    def nothing(response, gold):
        return Verdict(None, "error")

    board = hk.evaluate_sets(two[:1], SETS, tmp_path, reward_function=nothing, **HOW)
    assert math.isnan(board.to_frame().loc["a", "average"]) and "–" in board.to_markdown()
    assert json.loads((tmp_path / "eval.json").read_text())["scores"]["a"]["easy"]["avg@1"] is None


def test_open_sets_gives_each_set_its_metric(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"problem": "1+1?", "answer": "2"}\n{"problem": "1+2?", "answer": "3"}\n')

    def settings_of(*args, **options):
        return [
            (s.name, len(s.problems), s.metric, s.sampling.n, s.sampling.temperature, s.sampling.max_new_tokens)
            for s in open_sets(*args, **options)
        ]

    assert settings_of([f"aime25={file}", "sums"], limit=1) == [
        ("aime25", 1, "best@30", 30, 1.0, 4096),
        ("sums", 1, "avg@1", 1, 0.0, 32),
    ]
    assert settings_of([f"aime25={file}"], samples=8) == [("aime25", 2, "best@8", 8, 1.0, 4096)]
    assert settings_of(["larger"], samples=8, max_new_tokens=9) == [("larger", 400, "avg@8", 8, 1.0, 9)]
    assert settings_of(["mixed"], k=2, samples=8, temperature=0.5) == [("mixed", 400, "best@2", 8, 0.5, 32)]
    for sets, options, message in (
        (["sums", "sums"], {}, "different names"),
        ([], {}, "different names"),
        (["sums"], {"k": 4, "temperature": 0.0}, "greedy samples"),
        (["sums"], {"limit": 10**6}, r"1 to \d+ problems"),
    ):
        with pytest.raises(ValueError, match=message):
            open_sets(sets, **options)


def test_eval_command_prints_a_table_and_names_faults(tmp_path):
    command = ["eval", "tiny-model-pair", "again=llama-differences", "--on", "sums,differences", "--limit", "3",
               "--out", str(tmp_path / "out")]  # fmt: skip
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert "| agent " in done.output and "| again " in done.output and " average |" in done.output
    scores = json.loads((tmp_path / "out" / "eval.json").read_text())["scores"]
    assert (
        list(scores) == ["qwen3-sums", "llama-differences", "again"] and scores["again"] == scores["llama-differences"]
    )
    for change, message in (
        (["--seed", "1"], "seed: 0 → 1"),
        (["--on", "none.jsonl"], "no file none.jsonl"),
        (["llama-differences"], "two agents have the name 'llama-differences'; rename one with NAME="),
    ):
        failed = CliRunner().invoke(main, [*command, *change])
        assert failed.exit_code == 2 and message in failed.output, failed.output
