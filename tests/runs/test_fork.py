"""A fork starts from a checkpoint with other settings and keeps its origin on record."""

import json

import pytest
import torch
from trained import CONFIG, problems, without_times

import hacpo_kit as hk


@pytest.fixture
def run(fresh_agent, tmp_path):
    """A run of two steps with a checkpoint after each."""
    agents = [fresh_agent("qwen3-sums"), fresh_agent("llama-differences")]
    return hk.train(agents, problems("train", 20), CONFIG, 2, out=tmp_path / "run", save_every=1, progress="off")


def test_fork_without_changes_continues_as_the_run(run, tmp_path):
    hk.resume(hk.fork(run.folder, 1, tmp_path / "same"), progress="off")
    lines = [[json.loads(line) for line in (f / "metrics.jsonl").open()] for f in (run.folder, tmp_path / "same")]
    assert without_times(lines[0]) == without_times(lines[1])


def test_fork_with_another_method_differs_after_the_step_only(run, tmp_path):
    folder = hk.fork(run.folder, 1, tmp_path / "other", method="graft", floor=0.5)
    forked = hk.resume(folder, steps=3, progress="off")
    assert forked.config.method == "graft" and forked.config.share == "rescue" and forked.config.floor == 0.5
    assert without_times(forked.history[:2]) == without_times(run.history[:2])
    assert forked.state.step == 3 and not torch.equal(*(next(r.agents[0].model.parameters()) for r in (forked, run)))
    origin = json.loads((folder / "run.json").read_text())["origin"]
    assert (
        origin["step"] == 1 and origin["run"] == str(run.folder) and origin["changes"]["method"] == ["hacpo", "graft"]
    )


def test_fork_to_alone_resets_what_defines_the_method(run, tmp_path):
    there = hk.fork(run.folder, 2, tmp_path / "there", method="grpo")
    config = hk.Config.read(there / "config.json")
    assert (config.share, config.ratio) == ("none", "token")
    with pytest.raises(ValueError, match="not empty"):
        hk.fork(run.folder, 2, there)


def test_fork_refuses_a_step_without_checkpoint_and_unknown_settings(run, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint of step 5; it has those of 1, 2"):
        hk.fork(run.folder, 5, tmp_path / "a")
    with pytest.raises(TypeError, match="'detla'"):
        hk.fork(run.folder, 2, tmp_path / "a", detla=0.5)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        hk.fork(tmp_path / "nowhere", 1, tmp_path / "a")
    assert not (tmp_path / "a").exists()
