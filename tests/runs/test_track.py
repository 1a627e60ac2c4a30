"""Trackers get every metric of every step."""

import pytest
from trained import CONFIG, problems

import hacpo_kit as hk


@pytest.fixture
def steps(fresh_agent):
    """Train two steps with these callbacks; return the lines of metrics."""

    def run(callback):
        agents = [fresh_agent("qwen3-sums"), fresh_agent("llama-differences")]
        return hk.train(agents, problems("train", 20), CONFIG, 2, callbacks=[callback], progress="off").history[1:]

    return run


def test_track_tensorboard_writes_every_metric(steps, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    lines = steps(hk.track("tensorboard", "mine", folder=tmp_path))
    events = reader.EventAccumulator(str(tmp_path / "mine"))
    events.Reload()
    for metric in ("reward", "peer_ratio_mean", "rescuable/llama-differences"):
        found = [(event.step, event.value) for event in events.Scalars(f"qwen3-sums/{metric}")]
        assert found == [(line["step"], pytest.approx(line["agents"]["qwen3-sums"][metric])) for line in lines]
    assert {"rollouts", "qwen3-sums/omega/llama-differences"} <= set(events.Tags()["scalars"])
    assert "settings/text_summary" in events.Tags()["tensors"]


def test_track_trackio_logs_every_step_offline(steps, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    lines = steps(hk.track("trackio", "mine", project="tests", embed=False))
    trackio.finish()
    logged = trackio.SQLiteStorage.get_logs("tests", "mine")
    assert [row["rollouts"] for row in logged] == [line["rollouts"] for line in lines]


def test_track_refuses_an_unknown_tracker_and_names_the_package(monkeypatch):
    with pytest.raises(ValueError, match="did you mean 'wandb'"):
        hk.track("wandbb")
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="pip install wandb"):
        hk.track("wandb")
