"""run.json, and the check that a call resumes the same run."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from trained import CONFIG, OPTIONS, agents, generous, problems, without_times

import hacpo_kit as hk
from hacpo_kit.cli import main
from hacpo_kit.common.files import read_lines
from hacpo_kit.runs.experience import Experience
from hacpo_kit.runs.record import Plan, differences, reload_problems, store_problems


def edit(path, **changes):
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(content))


def test_differences_compares_the_common_entries():
    assert differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 4, "d": 5}) == {"b": "2 → 4"}


@pytest.mark.parametrize("name", ["eval_every", "eval_k", "save_every", "steps"])
@pytest.mark.parametrize("value", [0, 2.5, True, "3"])
def test_plan_refuses_an_interval_that_is_not_a_whole_number(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}: "):
        Plan(problems("train", 5), **{"steps": 1, name: value})


def test_plan_takes_numpy_numbers():
    assert json.dumps(Plan(problems("train", 5), np.int64(3), save_every=np.int64(2)).steps) == "3"


@pytest.mark.parametrize(
    ("tests", "error", "message"),
    [([], TypeError, "tests"), ({"": []}, ValueError, "''"), ({"none": []}, ValueError, "'none'")],
)
def test_plan_refuses_invalid_test_sets(fresh_agent, tmp_path, tests, error, message):
    with pytest.raises(error, match=message):
        hk.train(fresh_agent("llama-differences"), problems("train", 20), CONFIG, 1, tests=tests, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_check_same_run_refuses_another_run(whole_run):
    def refused(match, *, pair=None, size=50, config=CONFIG, **options):
        given = {"test": problems("test", 6), "out": whole_run.folder, **OPTIONS, **options}
        with pytest.raises(ValueError, match=match):
            hk.train(agents() if pair is None else pair, problems("train", size), config, 6, **given)

    refused(r"\(alpha: 1\.0 → 2\.0\).*pass changes=", config=CONFIG.replace(alpha=2))
    refused(r"seed: 0 → 9\); choose another folder$", config=CONFIG.replace(seed=9))
    refused("problems: ", size=51)
    refused("test: ", test=None)
    refused("agents: ", pair=agents()[:1])
    refused("reward_function: .*'generous'", reward_function=generous)
    other = agents()
    other[0].template["enable_thinking"] = False
    refused("template of qwen3-sums: .*enable_thinking", pair=other)
    other = agents()
    other[0].tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}!"
    refused("chat_template of qwen3-sums: ", pair=other)


def test_check_same_run_warns_of_other_versions_and_memory_settings(copied_run):
    record = json.loads((copied_run / "run.json").read_text())
    edit(copied_run / "run.json", versions={**record["versions"], "torch": "1.0"})
    smaller, test = CONFIG.replace(microbatch_tokens=512), problems("test", 6)
    with pytest.warns(UserWarning, match=r"torch: '1\.0' → .*microbatch_tokens: 16384 → 512.*not be bit-identical"):
        run = hk.train(agents(), problems("train", 50), smaller, 7, test=test, out=copied_run, **OPTIONS)
    assert run.state.step == 7


def test_reload_problems_returns_what_store_problems_wrote(tmp_path):
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    made = hk.load_problems(
        [{"id": "a/b", "prompt": chat, "gold": r"\frac{1}{2}"}, {"id": "c", "prompt": "2", "gold": "2"}]
    )
    store_problems(tmp_path, Plan(made, 1))
    about = {"source": None, "fingerprint": made.fingerprint()}
    assert reload_problems(tmp_path, about) == made and reload_problems(tmp_path, None) is None


def test_problems_from_memory_are_stored_with_the_run_and_a_resumed_run_loads_them(fresh_agent, tmp_path):
    rows = [{"prompt": p.prompt, "gold": p.gold} for p in problems("train", 20)]
    sets = [hk.load_problems([{"prompt": "1+1=\u2028", "gold": str(n)}, *rows]) for n in range(4)]
    tests, options = {"a/b": sets[2], "ä": sets[3]}, {"out": tmp_path, "progress": "off"}
    agent = fresh_agent("qwen3-sums")
    run = hk.train([agent], sets[0], CONFIG.replace(n=2), 1, test=sets[1], tests=tests, **options)
    result = CliRunner().invoke(main, ["resume", str(tmp_path), "--steps", "2"])
    assert result.exit_code == 0 and "2 steps done" in result.output, result.output
    whole = hk.train([fresh_agent("qwen3-sums")], sets[0], CONFIG.replace(n=2), 2, test=sets[1], tests=tests)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert without_times(lines)[-1] == without_times(whole.history)[-1] and run.state.step == 1
    shutil.rmtree(tmp_path / "problems")
    with pytest.raises(ValueError, match=r"problems.* is missing.*problems="):
        hk.resume(tmp_path)


def test_infinite_settings_are_stored_as_text_and_read_back_exactly(fresh_agent, tmp_path):
    config = CONFIG.replace(max_grad_norm=float("inf"), eps_high=float("inf"), n=2)
    options = {"out": tmp_path, "progress": "off"}
    hk.train(
        [fresh_agent("qwen3-sums")], problems("train", 20), config, 1, changes={"eps_low": float("inf")}, **options
    )
    assert json.loads((tmp_path / "config.json").read_text())["max_grad_norm"] == "inf"
    assert read_lines(tmp_path / "changes.jsonl")[0]["new"] == "inf"
    run = hk.resume(tmp_path, steps=2, progress="off")
    assert run.config == config.replace(eps_low=float("inf")) and Experience.of_run(tmp_path).config == run.config
    assert set(hk.read_runs(tmp_path)["max_grad_norm"]) == {float("inf")}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", "{", r"run\.json is not JSON"),
        ("run.json", '{"steps": 6}', r"run\.json has no reward_function"),
        ("config.json", '{"version": 3, "epsilon": 0.2}', r"config\.json: .*'epsilon'"),
    ],
)
def test_read_record_names_a_damaged_file(copied_run, file, content, message):
    (copied_run / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        hk.resume(copied_run)


def test_a_run_of_version_1_is_refused_everywhere_with_reason_and_remedy(copied_run):
    """train, resume, read_runs and the explorer read a run folder, each by its own way."""
    import pyarrow.parquet as pq

    edit(copied_run / "config.json", version=1)
    for path in (copied_run / "experience").iterdir():
        table = pq.read_table(path)
        about = json.loads(table.schema.metadata[b"hacpo_kit"])
        about["config"]["version"] = 1
        pq.write_table(table.replace_schema_metadata({"hacpo_kit": json.dumps(about)}), path)
    message = "version 1.*start a new run"
    for refused in (
        lambda: hk.train(
            agents(), problems("train", 50), CONFIG, 7, test=problems("test", 6), out=copied_run, **OPTIONS
        ),
        lambda: hk.resume(copied_run),
        lambda: hk.widgets.explorer(copied_run),
        lambda: Experience.of_run(copied_run, 2),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    with pytest.raises(FileNotFoundError, match=message):
        hk.read_runs(copied_run)
