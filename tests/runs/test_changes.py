"""Settings that change during a run."""

import numpy as np
import pytest
from trained import CONFIG, agents, change_settings, problems, same, stop_after, weights, without_times

import hacpo_kit as hk
from hacpo_kit.common.files import read_lines
from hacpo_kit.runs.changes import summary
from hacpo_kit.runs.checkpoints import checkpoints

pytestmark = pytest.mark.slow

CHANGES = [
    {"step": 2, "from_step": 3, "setting": "delta", "old": 0.2, "new": 0.5},
    {"step": 2, "from_step": 3, "setting": "lr", "old": 1e-4, "new": 3e-5},
    {"step": 3, "from_step": 4, "setting": "prompts_per_step", "old": 4, "new": 3},
    {"step": 3, "from_step": 4, "setting": "temperature", "old": 1.0, "new": 0.9},
    {"step": 3, "from_step": 4, "setting": "window", "old": 5, "new": 3},
]
INTERVALS = {"eval_every": 2, "save_every": 4, "progress": "off"}


def train(folder, steps=6, **options):
    return hk.train(agents(), problems("train", 50), CONFIG, steps, out=folder, **{**INTERVALS, **options})


def recorded(folder):
    return sorted(read_lines(folder / "changes.jsonl"), key=lambda line: (line["step"], line["setting"]))


def test_changes_take_effect_at_the_next_step_and_are_recorded(changed_run, whole_run):
    assert recorded(changed_run.folder) == CHANGES
    assert changed_run.config == CONFIG.replace(lr=3e-5, delta=0.5, window=3, prompts_per_step=3, temperature=0.9)
    assert hk.Config.read(changed_run.folder / "config.json") == CONFIG
    warm = [min(1.0, (t + 1) / CONFIG.warmup) for t in range(6)]
    rates = [line["agents"]["qwen3-sums"]["lr"] for line in changed_run.history[1:]]
    assert rates == pytest.approx([1e-4 * warm[0], 1e-4 * warm[1], *(3e-5 * w for w in warm[2:])])
    sampled = np.diff([line["rollouts"] for line in changed_run.history])
    assert sampled.tolist() == [4 * 4 * 2] * 3 + [3 * 4 * 2] * 3
    rewards = [line["agents"]["qwen3-sums"]["reward"] for line in changed_run.history[1:]]
    assert changed_run.capability["qwen3-sums"] == pytest.approx(np.mean(rewards[-3:]))
    assert changed_run.last.pool.temperature == 0.9 and changed_run.last.config == changed_run.config
    for line, other in zip(changed_run.history[1:3], whole_run.history[1:3], strict=True):  # before the first change
        for name, values in line["agents"].items():
            assert values == {k: v for k, v in other["agents"][name].items() if not k.startswith(("avg@", "best@"))}


@pytest.mark.parametrize("step", [2, 3, 5])
def test_changes_are_applied_again_by_a_resumed_run(changed_run, tmp_path, step):
    first = train(tmp_path, callbacks=[change_settings, stop_after(step)])
    assert first.stopped and first.state.step == step
    again = hk.resume(tmp_path, callbacks=[change_settings], progress="off")
    assert same(weights(again.agents), weights(changed_run.agents)) and again.config == changed_run.config
    assert without_times(read_lines(tmp_path / "metrics.jsonl")) == without_times(changed_run.history)
    assert recorded(tmp_path) == CHANGES


def test_changes_after_the_restored_step_are_dropped(tmp_path):
    train(tmp_path, callbacks=[change_settings, stop_after(3)])
    (checkpoints(tmp_path)[-1] / "state.json").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="cannot be read"):
        run = hk.resume(tmp_path, steps=3, progress="off")
    assert run.config == CONFIG.replace(lr=3e-5, delta=0.5) and recorded(tmp_path) == CHANGES[:2]


def test_changes_of_a_call_equal_those_of_a_callback(changed_run, tmp_path):
    train(tmp_path, callbacks=[stop_after(2)])
    train(tmp_path, callbacks=[stop_after(3)], changes={"lr": 3e-5, "delta": 0.5, "alpha": 1.0})  # alpha is 1 already
    run = hk.resume(tmp_path, changes={"window": 3, "prompts_per_step": 3, "temperature": 0.9}, progress="off")
    assert same(weights(run.agents), weights(changed_run.agents)) and recorded(tmp_path) == CHANGES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed: 0 → 1"),
        ({"method": "gspo"}, "method: 'hacpo' → 'gspo'"),
        ({"beta": 0.1}, "beta: 0 → 0.1"),
        ({"prompts_per_step": 51}, "at most 50"),
    ],
)
def test_changes_that_are_not_possible_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "call", 2, changes=change)
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "callback", 2, callbacks=[lambda result: result.config.replace(**change)])
    assert not read_lines(tmp_path / "call" / "changes.jsonl")
    assert not read_lines(tmp_path / "callback" / "changes.jsonl")


def test_changes_of_callbacks_that_disagree_are_refused(tmp_path):
    wanted = [lambda result, lr=lr: result.config.replace(lr=lr) for lr in (1e-5, 2e-5)]
    with pytest.raises(ValueError, match="two callbacks"):
        train(tmp_path, 2, callbacks=wanted)


def test_changes_of_a_call_must_be_recorded_before_the_first_step(tmp_path):
    """After a stop no callback would request them again."""
    train(tmp_path, 1)
    (tmp_path / "changes.jsonl").mkdir()
    with pytest.raises(OSError, match=r"changes\.jsonl"):
        train(tmp_path, 2, changes={"lr": 3e-5})
    (tmp_path / "changes.jsonl").rmdir()
    assert train(tmp_path, 2, changes={"lr": 3e-5}).config.lr == 3e-5
    assert [line["setting"] for line in read_lines(tmp_path / "changes.jsonl")] == ["lr"]


def test_summary_names_the_first_changes_and_counts_the_others():
    assert (
        summary(CHANGES)
        == "delta=0.5 from step 3, lr=3e-05 from step 3, prompts_per_step=3 from step 4, 2 more changes"
    )
    assert summary([]) == ""


def test_read_runs_has_a_column_of_changes(changed_run):
    (changed,) = hk.read_runs(changed_run.folder)["changed"].unique()
    assert "delta=0.5 from step 3" in changed
