"""Exports of a run and of parameters, also from the command line."""

import json
import re

import pandas as pd
import pytest
from click.testing import CliRunner
from verl_recipe import ACTOR, OPTIM, ROLLOUT, overrides

import hacpo_kit as hk
from hacpo_kit.cli import main
from hacpo_kit.common.files import append_lines
from hacpo_kit.export.sources import from_parameters, from_run
from hacpo_kit.export.verl import export_verl


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one small step."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = hk.Config(prompts_per_step=8, n=4, minibatch=16, max_new_tokens=4, alpha=2.0)
    test = hk.load_problems("arithmetic", split="test", size=4)
    agents, problems = hk.load_agents("tiny-model-pair"), hk.load_problems("arithmetic")
    hk.train(agents, problems, config, 1, out=folder, test=test, progress="off")
    return folder


def command(*args):
    return CliRunner().invoke(main, ["export", "verl", *map(str, args)], catch_exceptions=False)


def test_from_run_exports_its_settings_unless_overridden(run, tmp_path):
    result = command(tmp_path / "out", "--run", run, "-p", "lr", "1e-6", "-p", "steps", "2", "--gpus", "4")
    assert result.exit_code == 0, result.output
    assert "count_eos=True" in result.output and "launch.sh" in result.output
    written = overrides(tmp_path / "out")
    names = ("hacpo.loss.alpha", f"{OPTIM}.lr", "trainer.total_training_steps", "trainer.n_gpus_per_node")
    assert [written[name] for name in names] == [2.0, 1e-6, 2, 4]
    assert len(pd.read_parquet(tmp_path / "out" / "train.parquet")) == 16
    launch = (tmp_path / "out" / "launch.sh").read_text()
    assert "id:qwen3-sums" in launch and "id:llama-differences" in launch


def test_from_run_refuses_runs_that_cannot_be_repeated(run, tmp_path):
    record, folder = json.loads((run / "run.json").read_text()), tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_bytes((run / "config.json").read_bytes())

    def refuses(message, values=None, **changes):
        (folder / "run.json").write_text(json.dumps({**record, **changes}))
        with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
            from_run(folder, values)

    refuses("reward function mine", reward_function="mine")
    refuses(".jsonl is missing", problems={**record["problems"], "source": None})
    refuses("changed since it ran", problems={**record["problems"], "fingerprint": "0"})
    refuses("'alhpa'; did you mean 'alpha'?", {"alhpa": 1})
    append_lines(folder / "changes.jsonl", [{"step": 1, "from_step": 2, "setting": "lr", "old": 1e-4, "new": 1e-5}])
    refuses("changed lr")
    assert from_run(folder, {"lr": "1e-5"})["config"].lr == 1e-5
    with pytest.raises(FileNotFoundError, match=r"run\.json"):
        from_run(tmp_path)


def test_from_parameters_has_the_values_of_the_recipe_s_launcher_for_the_paper_s_pair(tmp_path):
    values = {"agents": "a/qwen3-1.7b,b/qwen3-4b", "steps": "1", "delta": "0.2", "beta": "0.001"}
    export_verl(out=tmp_path / "out", **from_parameters(values, pair="qwen3-1.7b-base + qwen3-4b-base"))
    written = overrides(tmp_path / "out")
    launcher = {
        "data.train_batch_size": 128, f"{ACTOR}.ppo_mini_batch_size": 64, f"{ROLLOUT}.n": 8, "data.max_prompt_length": 1024,
        "data.max_response_length": 4096, "hacpo.trajectory.target_max_prompt_length": 1536, f"{OPTIM}.lr": 1e-6,
        f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.001, "hacpo.loss.self_clip_low": 0.0003,
        "hacpo.loss.self_clip_high": 0.0004, "hacpo.loss.cross_clip_delta": 0.2, "hacpo.loss.cross_clip_step": 0.025,
        "hacpo.loss.alpha": 1.0, "hacpo.capability.window_size": 5, f"{ROLLOUT}.max_model_len": 5120,
        f"{ROLLOUT}.temperature": 1.0, "trainer.n_gpus_per_node": 8, f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    }  # fmt: skip
    assert {name: written[name] for name in launcher} == launcher


def test_from_parameters_keeps_what_defines_an_ablation():
    pair = "qwen3-4b-base + qwen3-8b-base"
    assert from_parameters({"method": "alpha=0"}, pair)["config"].alpha == 0
    config = from_parameters({"delta": "0.5"}, pair)["config"]
    assert (config.alpha, config.delta, config.lr) == (3.0, 0.5, 1e-6)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-p", "alhpa", "1"), "'alhpa'"),
        (("--pair", "qwen3-1.7b"), "'qwen3-1.7b'"),
        (("--template", "{x"), "template"),
        (("--run", ".", "--pair", "x"), "--run and --pair"),
        (("--gpus", "0"), "gpus=0"),
        (("-p", "method", "naive"), "'naive'"),
    ],
)
def test_export_command_reports_errors_in_one_line(tmp_path, args, message):
    result = command(tmp_path / "out", *args)
    assert result.exit_code == 2 and message in result.output and result.output.count("\n") == 1, result.output
    assert not list(tmp_path.iterdir())
