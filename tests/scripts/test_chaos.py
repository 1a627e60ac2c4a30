"""A few runs killed at random moments (`make chaos` kills fifty, and what helps them), and that the comparison sees faults."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "chaos"))
from chaos_runs import CONFIG, differences, half_written

import hacpo_kit as hk
from hacpo_kit.runs.experience import path_of

CHAOS = Path(__file__).resolve().parents[1] / "chaos"


@pytest.mark.slow
def test_trials_end_as_an_undisturbed_run(tmp_path):
    command = [sys.executable, str(CHAOS), "--kills", "3", "--others", "--out", str(tmp_path / "chaos.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "chaos.json").read_text())["runs"]
    assert report["kills"] == report["same_end"] == sum(report["killed_in"].values()) == 3
    assert [row["aimed_at"] for row in report["trials"]] == ["checkpoint", "update", "rollout"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run folder of two steps."""
    folder = tmp_path_factory.mktemp("chaos") / "whole"
    agents, problems = hk.load_agents("tiny-model-pair", device="cpu"), hk.load_problems("arithmetic", size=8)
    hk.train(agents, problems, CONFIG, 2, out=folder, save_every=1, progress="off")
    return folder


def _shorter(path, by=1):
    path.write_bytes(path.read_bytes()[:-by])


def _other_line(path):
    path.write_text(path.read_text().replace('"updates": 2', '"updates": 3'))


LAST = "checkpoints/step-000002"


@pytest.mark.parametrize(
    ("change", "message", "is_half"),
    [
        (lambda run: _shorter(run / "run.json", 9), "run.json", True),
        (lambda run: _shorter(path_of(run, 1)), "half a table", True),
        (lambda run: _shorter(run / LAST / "optimizers/qwen3-sums.safetensors"), "is damaged", True),
        (lambda run: (run / LAST / "agents/qwen3-sums/model.safetensors").unlink(), "No such file", True),
        (lambda run: _shorter(run / "metrics.jsonl"), "ends with half a line", False),
        (lambda run: _other_line(run / "metrics.jsonl"), "metrics.jsonl differs: 3 lines here, 3 there", False),
        (lambda run: shutil.copyfile(path_of(run, 1), path_of(run, 2)), "the experience of step 2 differs", False),
        (lambda run: shutil.rmtree(run / LAST), "the last checkpoint is", False),
        (lambda run: (run / ".metrics.jsonl.0123abcd.tmp").write_text(""), "was left", False),
    ],
)  # fmt: skip
def test_the_comparison_sees(whole, tmp_path, change, message, is_half):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    assert half_written(run) == differences(run, whole) == []
    change(run)
    assert message in "; ".join(half_written(run) if is_half else differences(run, whole))
    if not is_half:
        assert half_written(run) == []
