"""export_verl: the files that it writes, and launch.sh with a stand-in for the recipe."""

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from verl_recipe import AGENT_KEYS, KIND_OF, OPTIM, ROLLOUT, export, overrides, read

import hacpo_kit as hk
from hacpo_kit.export.overrides import SETTINGS
from hacpo_kit.export.verl import export_verl


@pytest.fixture
def checkout(tmp_path):
    """A folder in place of the recipe, whose main prints its arguments."""
    recipe = tmp_path / "it's a checkout" / "recipe" / "hacpo"
    recipe.mkdir(parents=True)
    (recipe / "main_hacpo.py").write_text(
        "import os, sys\nprint(repr((sys.argv[1:], os.environ['TENSORBOARD_DIR'])))\n"
    )
    return recipe.parent.parent


def launch(out, checkout, *more, **variables):
    package = str(Path(hk.__file__).parents[1])
    environment = {**os.environ, "VERL": str(checkout), "PYTHON": sys.executable, "PYTHONPATH": package, **variables}
    command = ["bash", str(out / "launch.sh"), *more]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def jobs_of(result):
    """The parsed arguments of each job."""
    assert result.returncode == 0, result.stderr
    lines = [ast.literal_eval(line) for line in result.stdout.splitlines()]
    return [{name: read(value) for name, value in (a.split("=", 1) for a in args)} for args, _ in lines]


def test_export_verl_uses_documented_names_and_types(tmp_path, checkout):
    test = hk.load_problems("arithmetic", split="test", size=4)
    values = {**export(tmp_path / "out", test=test), **jobs_of(launch(tmp_path / "out", checkout))[0]}
    assert set(values) == set(KIND_OF)
    for name, value in values.items():
        assert value is None or type(value) is KIND_OF[name], (name, value)
    assert {name for entry in SETTINGS.values() for name in entry["names"]} <= set(values)
    assert all(set(agent) <= AGENT_KEYS for agent in values["hacpo.agents"])


def test_export_verl_returns_the_differences(tmp_path):
    problems, how = hk.load_problems("arithmetic", size=80), {"agents": "tiny-model-pair", "steps": 3}
    notes = export_verl(hk.Config(), problems, tmp_path / "a", **how)
    for start in ("count_eos=True", "minibatch_order='mixed'", "warmup=4"):
        assert any(note.startswith(start) for note in notes)
    same = hk.Config(count_eos=False, minibatch_order="own_first", warmup=1)
    fewer = export_verl(same, problems, tmp_path / "b", **how)
    assert set(fewer) < set(notes) and len(fewer) == len(notes) - 3
    assert all(f"- {note}" in (tmp_path / "b" / "mapping.md").read_text() for note in fewer)
    assert overrides(tmp_path / "b")[f"{OPTIM}.lr_warmup_steps"] == 0


def test_export_verl_writes_problems_in_the_order_of_a_run(tmp_path):
    problems = hk.load_problems("arithmetic", size=50)  # 3 steps of 32 cross the border of an epoch
    test = hk.load_problems("arithmetic", split="test", size=6)
    written = export(tmp_path / "out", hk.Config(seed=3), problems, test=test, eval_every=2, eval_k=4)
    table = pd.read_parquet(tmp_path / "out" / "train.parquet")
    assert list(table.columns) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    order = [p for step in range(3) for p in problems.batch(32 * step, 32, seed=3)]
    assert [row["id"] for row in table["extra_info"]] == [p.id for p in order]
    assert [row["index"] for row in table["extra_info"]] == list(range(96))
    assert [list(row) for row in table["prompt"]] == [[{"role": "user", "content": p.prompt}] for p in order]
    assert list(table["reward_model"]) == [{"style": "rule", "ground_truth": p.gold} for p in order]
    assert not written["data.shuffle"] and written["trainer.total_training_steps"] == 3
    table = pd.read_parquet(tmp_path / "out" / "test.parquet")
    assert [row["ground_truth"] for row in table["reward_model"]] == [p.gold for p in test]
    assert written["trainer.test_freq"] == 2 and written["trainer.val_before_train"]
    assert written[f"{ROLLOUT}.val_kwargs.n"] == 4 and written[f"{ROLLOUT}.val_kwargs.do_sample"]


def test_launch_script_passes_everything_with_any_folder_name(tmp_path, checkout):
    out = tmp_path / 'it\'s $HOME "here"'
    written = export(out, test=hk.load_problems("arithmetic", split="test", size=4))
    moved = tmp_path / "o'ther"
    moved.mkdir()
    (moved / "config.json").write_text("{}")
    (job,) = jobs_of(launch(out, checkout, "trainer.nnodes=2", "data.seed=9", MODEL_2=str(moved)))
    assert {**written, **job} == {**job, **written, "data.seed": 9, "trainer.nnodes": 2}  # the last value counts
    assert job["data.train_files"] == [str(out / "train.parquet")]
    assert job["data.val_files"] == [str(out / "test.parquet")]
    assert job["reward.custom_reward_function.path"] == str(out / "reward.py")
    assert job["trainer.default_local_dir"] == str(out / "out" / "hacpo" / "checkpoints")
    first, second = job["hacpo.agents"]
    assert first["id"] == "qwen3-sums" and (Path(first["model_path"]) / "model.safetensors").exists()
    assert second["id"] == "llama-differences" and second["model_path"] == str(moved)
    assert second["actor_rollout_ref"]["model"]["custom_chat_template"].startswith("{{ bos_token }}{% for")


def test_launch_script_runs_one_job_per_agent_without_sharing(tmp_path, checkout):
    written = export(tmp_path / "out", hk.Config.preset("gspo_x2", minibatch=64))
    assert written[f"{ROLLOUT}.n"] == 16 and written["actor_rollout_ref.actor.ppo_mini_batch_size"] == 4
    jobs = jobs_of(launch(tmp_path / "out", checkout))
    assert [[agent["id"] for agent in job["hacpo.agents"]] for job in jobs] == [["qwen3-sums"], ["llama-differences"]]
    assert len({job["trainer.default_local_dir"] for job in jobs}) == 2
    # verl requires a file for evaluation even if there is none
    assert jobs[0]["data.val_files"] == jobs[0]["data.train_files"] and jobs[0]["trainer.test_freq"] == -1


def test_launch_script_refuses_what_cannot_start(tmp_path, checkout):
    export(tmp_path / "out")
    for variables, message in (
        ({"VERL": str(tmp_path)}, "set VERL"),
        ({"MODEL_1": "/no/such/model"}, "/no/such/model"),
        ({"REWARD": str(tmp_path / "none.py")}, "none.py cannot be loaded"),
        ({"PYTHON": "no-such-python"}, "no-such-python"),
    ):
        result = launch(tmp_path / "out", checkout, **variables)
        assert result.returncode == 2 and message in result.stderr and not result.stdout, (variables, result)


def test_reward_file_gives_the_rewards_of_boxed_math(tmp_path):
    export(tmp_path / "out")
    compute_score = runpy.run_path(str(tmp_path / "out" / "reward.py"))["compute_score"]
    assert compute_score("arithmetic", r"so \boxed{95}", "95", {"index": 0}) == 1.0
    assert compute_score(data_source="x", solution_str=r"\boxed{94}", ground_truth="95", extra_info=None, more=1) == 0.0
    assert compute_score("x", "95", "95") == 0.0 and compute_score("x", r"\boxed{1}", " ") == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": hk.Config(prompts_per_step=128)}, "batch of 128"),
        ({"steps": 0}, "steps=0"),
        ({"gpus": 0}, "gpus=0"),
        ({"test": [hk.Problem("x", "?", "")]}, "test: 1 of 1 .*'x'"),
        ({"problems": [hk.Problem("y", "?", "")]}, "problems: 1 of 1 .*'y'"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*no reference answer")
def test_export_verl_refuses_bad_arguments_and_writes_nothing(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


def test_export_verl_keeps_the_content_of_a_folder(tmp_path):
    (tmp_path / "out").mkdir()
    export(tmp_path / "out")  # an empty folder is allowed
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    with pytest.raises(ValueError, match="not an empty folder"):
        export(tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_export_verl_leaves_nothing_after_a_failure(tmp_path, monkeypatch):
    import pyarrow.parquet

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    with pytest.raises(OSError, match="no space left"):
        export(tmp_path / "out")
    assert not list(tmp_path.iterdir())
