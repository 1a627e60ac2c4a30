"""The folder of a run: its content, whose it is, what a stop, a damage or a full disk leaves."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
from trained import CONFIG, OPTIONS, agents, full_disk, problems, same, weights, without_times

import hacpo_kit as hk
from hacpo_kit.common.files import read_lines
from hacpo_kit.runs.checkpoints import checkpoints

SCRIPT = """
import sys, torch
import hacpo_kit as hk
torch.set_num_threads(1)
config = hk.Config(prompts_per_step=4, n=4, minibatch=16)
train, test = (hk.load_problems("arithmetic", split=s, size=k) for s, k in (("train", 50), ("test", 6)))
run = hk.train(hk.load_agents("tiny-model-pair", device="cpu"), train, config, 6, test=test, out=sys.argv[1],
               eval_every=2, save_every=2, progress="lines")
"""


def train(folder, steps=6, pair=None, **options):
    given = {"test": problems("test", 6), "out": folder, **OPTIONS, **options}
    return hk.train(agents() if pair is None else pair, problems("train", 50), CONFIG, steps, **given)


@contextlib.contextmanager
def another_process(folder):
    """The same run in another process, once it has recorded a step."""
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + 300
    while len(read_lines(folder / "metrics.jsonl")) < 2:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "the run recorded no step"
        time.sleep(0.02)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_folder_holds_settings_record_metrics_samples_and_checkpoints(whole_run):
    folder = whole_run.folder
    assert hk.Config.read(folder / "config.json") == CONFIG
    record = json.loads((folder / "run.json").read_text())
    assert record["seed"] == 0 and record["versions"]["torch"] == torch.__version__
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(7)) and lines == list(whole_run.history)
    assert [line["step"] for line in lines if "avg@1" in line["agents"]["qwen3-sums"]] == [0, 2, 4, 6]
    assert lines[-1]["rollouts"] == 6 * 4 * 4 * 2
    assert [c.name for c in checkpoints(folder)] == ["step-000004", "step-000006"]
    samples = read_lines(folder / "samples.jsonl")
    assert {s["step"] for s in samples} == set(range(1, 7))
    assert all(set(s["advantage"]) == {"qwen3-sums", "llama-differences"} for s in samples if s["reward"] is not None)
    assert not list(folder.rglob("*.tmp"))


def test_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no run"):
        train(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(FileNotFoundError, match=r"run\.json is missing"):
        hk.resume(tmp_path)


def test_folder_of_a_new_run_needs_agents_without_updates(whole_run, tmp_path):
    with pytest.raises(ValueError, match="load them again"):
        train(tmp_path / "new", pair=whole_run.agents)


@pytest.mark.slow
def test_folder_is_locked_until_its_process_ends(tmp_path):
    folder = tmp_path / "run"
    with another_process(folder) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ValueError, match="another process"):
            train(folder)
    assert hk.resume(folder, steps=2, progress="off").state.step >= 2  # a killed process holds no lock


def test_folder_of_a_finished_run_is_unchanged_and_can_be_extended(whole_run, tmp_path):
    train(tmp_path / "run", 4)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again = train(tmp_path / "run", 4)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before and again.last is None and not again.stopped
    longer = hk.resume(tmp_path / "run", steps=6, progress="off")
    assert same(weights(longer.agents), weights(whole_run.agents))


def test_folder_of_a_finished_run_without_checkpoints_is_refused_and_unchanged(copied_run):
    def content():
        return {p: p.read_bytes() for p in sorted(copied_run.rglob("*")) if p.is_file() and p.name != ".lock"}

    shutil.rmtree(copied_run / "checkpoints")
    before = content()
    with pytest.raises(ValueError, match=r"all its 6 steps .*no checkpoint"):
        hk.resume(copied_run, steps=8, progress="off")
    assert content() == before


def test_folder_of_a_stopped_run_without_checkpoints_restarts_with_a_warning(whole_run, copied_run):
    shutil.rmtree(copied_run / "checkpoints")
    lines = (copied_run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied_run / "metrics.jsonl").write_text("".join(lines[:4]))
    with pytest.warns(UserWarning, match="no checkpoint.* 3 steps"):
        again = hk.resume(copied_run, progress="off")
    assert same(weights(again.agents), weights(whole_run.agents))


@pytest.mark.parametrize("name", ["changes.jsonl", "metrics.jsonl", "samples.jsonl"])
def test_folder_with_a_damaged_line_is_refused(copied_run, name):
    with (copied_run / name).open("a") as file:
        file.write('{"a": 1}\n')
    with pytest.raises(ValueError, match=name):
        hk.resume(copied_run, steps=7, progress="off")


def test_folder_loses_what_a_killed_process_left_and_no_other_file(whole_run, copied_run):
    left = [copied_run / ".metrics.jsonl.0123abcd.tmp", copied_run / "experience" / ".step-000007.parquet.0123abcd.tmp"]
    for path in left:
        path.write_text("half")
    (copied_run / "checkpoints" / ".step-000008.0123abcd.tmp").mkdir()
    (copied_run / ".mine.tmp").write_text("mine")
    with (copied_run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "half a li')
    hk.resume(copied_run, progress="off")
    assert [p.name for p in copied_run.rglob(".*.tmp")] == [".mine.tmp"]
    assert read_lines(copied_run / "metrics.jsonl") == list(whole_run.history)
    assert (copied_run / "metrics.jsonl").read_bytes().endswith(b"\n")


@pytest.mark.slow
@pytest.mark.parametrize(("space", "step"), [(100, 1), (100_000, 2)], ids=["lines", "checkpoint"])
def test_folder_on_a_full_disk_ends_the_run_and_the_same_call_resumes(whole_run, tmp_path, space, step):
    folder, disk = tmp_path / "run", contextlib.ExitStack()

    def fill(result):
        if result.metrics["step"] == step:
            disk.enter_context(full_disk(space))

    with disk, pytest.raises(OSError, match=r"File too large.*resumes from its"):
        train(folder, callbacks=[fill])
    assert not list(folder.rglob(".*.tmp"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no checkpoint.*")
        run = train(folder)
    assert same(weights(run.agents), weights(whole_run.agents))
    assert without_times(read_lines(folder / "metrics.jsonl")) == without_times(whole_run.history)
    assert read_lines(folder / "samples.jsonl") == read_lines(whole_run.folder / "samples.jsonl")


def test_folder_can_have_a_checkpoint_before_the_first_step(tmp_path):
    """An error in the first step then loses nothing: the same agents can resume."""
    pair = agents()

    def fail(result):
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        train(tmp_path / "run", 1, pair, save_first=True, callbacks=[fail])
    assert [c.name for c in checkpoints(tmp_path / "run")] == ["step-000000"] and pair[0].updates
    run = train(tmp_path / "run", 1, pair, save_first=True)
    assert run.state.step == 1 and [line["step"] for line in run.history] == [0, 1]


@pytest.mark.slow
def test_ctrl_c_ends_after_the_step_with_a_checkpoint(whole_run, tmp_path):
    folder = tmp_path / "run"
    with another_process(folder) as process:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "stopping after this step" in out, out
    done = int(out.split("stopped after step ")[1].split()[0])
    assert checkpoints(folder)[-1].name == f"step-{done:06d}" and done < 6
    assert same(weights(hk.resume(folder, progress="off").agents), weights(whole_run.agents))
