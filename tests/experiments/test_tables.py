"""The table of many runs, from run folders and Parquet files."""

import math

import pandas as pd
import pytest
from made_runs import write_run

import hacpo_kit as hk
from hacpo_kit.experiments.parameters import Experiment
from hacpo_kit.experiments.selection import usable


def test_read_runs_has_one_row_for_each_run_step_agent_and_metric(tmp_path):
    write_run(
        tmp_path / "s" / "a", Experiment(steps=2, method="gspo", settings={"seed": 3}), scores={"avg@1/sums": 0.5}
    )
    write_run(tmp_path / "b", Experiment(steps=3, settings={"lr": 2e-4}), last=1, agents=["x", "qwen3-sums", "y"])
    frame = hk.read_runs(tmp_path)
    keys = ["run", "step", "agent", "metric"]
    assert not frame.duplicated(keys).any()
    assert list(frame.columns[:8]) == [*keys, "value", "rollouts", "tokens", "seconds"]
    assert set(frame.columns[8:]) == {*hk.Config().to_dict(), "agents", "changed", "steps", "finished"} - {"version"}
    row = frame.query("run == 's/a' and step == 2 and agent == 'llama-differences'").set_index("metric")
    assert dict(row["value"]) == {"avg@1": 0.5, "avg@1/sums": 0.5, "omega/qwen3-sums": 2.0}
    assert set(row["rollouts"]) == {16} and set(row["tokens"]) == {120} and set(row["seconds"]) == {1.0}
    assert list(frame.query("agent == '' and run == 'b'")["metric"]) == ["seconds_update"]
    about = frame.groupby("run", observed=True)[["method", "seed", "lr", "agents", "steps", "finished"]].first()
    assert list(about.loc["s/a"]) == ["gspo", 3, 1e-4, "tiny-model-pair", 2, True]
    assert list(about.loc["b"]) == ["hacpo", 0, 2e-4, "x+qwen3-sums+y", 3, False]
    assert len(hk.read_runs(tmp_path / "s" / "a")) == len(frame.query("run == 's/a'"))  # the folder of one run


def test_read_runs_reads_its_own_parquet(tmp_path):
    write_run(tmp_path / "a", Experiment(settings={"eps_high": math.inf}))
    write_run(tmp_path / "b", Experiment(method="gspo", steps=2))
    frame = hk.read_runs(tmp_path)
    text = ["run", "agent", "metric", "method", "agents", "share", "ratio", "peer_update"]
    assert all(isinstance(frame[c].dtype, pd.CategoricalDtype) for c in text)
    frame.to_parquet(tmp_path / "t.parquet")
    pd.testing.assert_frame_equal(hk.read_runs(tmp_path / "t.parquet"), frame)


@pytest.fixture
def damaged(tmp_path):
    """A folder with one complete run and four that are damaged in different ways."""
    for name in ("good", "torn", "empty", "broken", "misspelt"):
        write_run(tmp_path / name, Experiment(steps=2))
    with (tmp_path / "torn" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rol')
    (tmp_path / "empty" / "metrics.jsonl").unlink()
    (tmp_path / "broken" / "run.json").write_text("{")
    (tmp_path / "misspelt" / "config.json").write_text('{"alhpa": 1}')
    return tmp_path


def test_read_runs_warns_of_unreadable_runs_and_reads_the_others(damaged):
    with pytest.warns(UserWarning, match=r"4 of 5 runs") as caught:
        frame = hk.read_runs(damaged)
    message = str(caught[0].message)
    assert "torn (" in message and all(f"{name} (not read: " in message for name in ("empty", "broken", "misspelt"))
    assert list(frame["run"].cat.categories) == ["good", "torn"] and frame["step"].max() == 2
    frame.to_parquet(damaged / "t.parquet", index=False)  # keeps the warning as a note
    assert "broken (not read" in usable(hk.read_runs(damaged / "t.parquet"))[1][0]


def test_read_runs_refuses_places_without_runs(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        hk.read_runs(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"run\.json"):
        hk.read_runs(tmp_path)
