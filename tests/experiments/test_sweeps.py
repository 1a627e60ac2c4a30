"""Sweeps: most tests with runs that train nothing, some with kernels."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from click.testing import CliRunner
from made_runs import write_run

import hacpo_kit as hk
from hacpo_kit.cli import main
from hacpo_kit.common.files import locked
from hacpo_kit.experiments import sweeps
from hacpo_kit.experiments.parameters import Experiment
from hacpo_kit.experiments.paths import find_notebook
from hacpo_kit.runs.checkpoints import checkpoints

SMALL = {"steps": 1, "prompts_per_step": 2, "n": 2, "test_size": 2, "minibatch": 4}
HACPO, GSPO = "hacpo-tiny-model-pair-seed0", "gspo-tiny-model-pair-seed0"


class Pretended:
    """Stands for `run_notebook`: writes a run folder at once, or raises the error that `errors` has for the run."""

    def __init__(self, errors=None, last=None):
        self.errors, self.last, self.calls, self.threads = errors or {}, last, {}, set()

    def __call__(self, notebook, parameters, *, name, out, **options):
        self.calls[name] = {"notebook": notebook, "parameters": parameters, "out": out, **options}
        self.threads.add(os.environ["OMP_NUM_THREADS"])
        if name in self.errors:
            raise self.errors[name]
        write_run(Path(out) / name, Experiment.from_parameters(parameters), last=self.last)


@pytest.fixture
def pretend(monkeypatch):
    """pretend(errors, last): the runs of sweeps train nothing from now on; returns their record."""

    def start(*args, **options):
        pretended = Pretended(*args, **options)
        monkeypatch.setattr(sweeps, "run_notebook", pretended)
        return pretended

    return start


def grid_of(**changes):
    return {"name": "study", "common": SMALL, "grids": [{"method": ["hacpo", "gspo"]}], **changes}


def sweep(folder, *, options=None, **changes):
    return hk.sweep(grid_of(**changes), folder, quiet=True, **(options or {}))


def record(folder):
    return json.loads((folder / "sweep.json").read_text())["runs"]


def test_sweep_passes_parameters_and_skips_finished_runs(tmp_path, pretend):
    first = pretend()
    table = sweep(tmp_path, seeds=2, options={"jobs": 2, "retries": 1, "threads": 3})
    assert list(table["status"]) == ["finished"] * 4 and list(table["tries"]) == [1] * 4
    name = "gspo-tiny-model-pair-seed1"
    call = first.calls[name]
    assert (call["notebook"], call["out"]) == (find_notebook("06_experiment"), tmp_path)
    assert call["parameters"].items() >= {**SMALL, "method": "gspo", "seed": 1}.items() and call["tries"] == 2
    assert first.threads == {"3"}
    entry = record(tmp_path)[name]
    assert entry["status"] == "finished" and entry["parameters"]["share"] == "none" and entry["seconds"] > 0
    assert [p.name for p in checkpoints(tmp_path / name)] == ["step-000002"]
    again = pretend()
    sweep(tmp_path, seeds=3)
    assert [*again.calls] == ["hacpo-tiny-model-pair-seed2", "gspo-tiny-model-pair-seed2"]
    sweep(tmp_path, seeds=1, options={"keep_checkpoints": "none"})
    assert not checkpoints(tmp_path / HACPO)
    assert len(record(tmp_path)) == 6  # with the runs of the larger grid


@pytest.mark.parametrize("missing", ["html", "ipynb", "status"])
def test_sweep_runs_again_what_is_not_finished(missing, tmp_path, pretend):
    pretend()
    sweep(tmp_path, grids=[{}])
    if missing == "status":
        content = json.loads((tmp_path / "sweep.json").read_text())
        content["runs"][HACPO]["status"] = "running"  # the sweep was killed
        (tmp_path / "sweep.json").write_text(json.dumps(content))
    else:
        (tmp_path / f"{HACPO}.{missing}").unlink()
    again = pretend()
    sweep(tmp_path, grids=[{}])
    assert [*again.calls] == [HACPO]


def test_sweep_keeps_the_error_of_a_failed_run_and_runs_the_others(tmp_path, pretend):
    pretended = pretend({GSPO: ValueError("a bad value")})
    table = sweep(tmp_path, seeds=2)
    assert len(pretended.calls) == 4 and list(table["status"]).count("finished") == 3
    assert table.loc[GSPO, "status"] == "failed" and table.loc[GSPO, "error"] == "ValueError: a bad value"
    assert "Traceback" in (tmp_path / f"{GSPO}.error.txt").read_text()
    assert record(tmp_path)[GSPO]["status"] == "failed"
    again = pretend()
    sweep(tmp_path, seeds=2)
    assert [*again.calls] == [GSPO] and not (tmp_path / f"{GSPO}.error.txt").exists()


def test_sweep_says_that_a_run_ended_early(tmp_path, pretend):
    pretend(last=0)
    assert "after step 0" in sweep(tmp_path, grids=[{}])["error"].iloc[0]


def test_sweep_refuses_runs_with_other_parameters(tmp_path, pretend):
    pretend()
    sweep(tmp_path)
    refused = pretend()
    for changed, message in (({"lr": 3e-4}, "lr: 0.0001 → 0.0003"), ({"test_size": 3}, "test_size: 2 → 3")):
        with pytest.raises(ValueError, match=message):
            sweep(tmp_path, common={**SMALL, **changed})
    assert not refused.calls
    longer = pretend()
    sweep(tmp_path, common={**SMALL, "steps": 2})
    assert len(longer.calls) == 2  # more steps: the runs resume
    with pytest.raises(ValueError, match="steps: 2 → 1"):
        sweep(tmp_path)


def test_sweep_prints_a_line_for_each_run(tmp_path, pretend, capsys):
    pretend({GSPO: ValueError("a bad value")})
    hk.sweep(grid_of(), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{HACPO}: finished after") and lines[1].endswith("ValueError: a bad value")


def test_sweep_refuses_a_folder_in_use(tmp_path, pretend):
    pretended = pretend()
    with locked(tmp_path / ".sweep.lock", what="it"), pytest.raises(ValueError, match="another process"):
        sweep(tmp_path)
    assert not pretended.calls


@pytest.mark.parametrize(
    "options", [{"jobs": 0}, {"retries": -1}, {"threads": 0}, {"keep_checkpoints": "all"}, {"time_limit": 0}]
)
def test_sweep_checks_its_options(options, tmp_path):
    with pytest.raises(ValueError, match=next(iter(options))):
        sweep(tmp_path, options=options)


# ── with real processes and kernels ──────────────────────────────────────────────────────────────────────────────────

# a run without torch: ten steps per second, saved after each, an end after the step on Ctrl-C, an error for seed 99
CELL = """
import json, pathlib, signal, time
if seed == 99:
    raise ValueError("a bad value")
stop = []
signal.signal(signal.SIGINT, lambda *_: stop.append(1))
folder = pathlib.Path(out)
folder.mkdir(exist_ok=True)
metrics = folder / "metrics.jsonl"
done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
while done <= steps and not stop:
    with metrics.open("a") as file:
        file.write(json.dumps({"step": done}) + "\\n")
    done += 1
    time.sleep(0.1)
"""


@pytest.fixture
def real(tmp_path):
    """real(seeds, steps, jobs, options): a running `hacpo-kit sweep` of a notebook that trains nothing."""
    notebook = nbformat.read(find_notebook("06"), 4)
    cell = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    notebook.cells = [cell, nbformat.v4.new_code_cell(CELL)]
    nbformat.write(notebook, tmp_path / "n.ipynb")
    started = []

    def start(seeds, steps, jobs=1, options=()):
        grid = {"notebook": str(tmp_path / "n.ipynb"), "common": {"steps": steps}, "seeds": seeds}
        (tmp_path / "g.yaml").write_text(json.dumps(grid))
        command = [sys.executable, "-c", "from hacpo_kit.cli import main; main()", "sweep", str(tmp_path / "g.yaml")]
        command += ["--out", str(tmp_path / "out"), "--jobs", str(jobs), *options]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, **output, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def steps_of(out, seed):
    path = out / f"hacpo-tiny-model-pair-seed{seed}" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


@pytest.mark.slow
def test_sweep_that_is_killed_leaves_no_process_and_resumes(tmp_path, real):
    out = tmp_path / "out"
    process = real([99, 0, 1], steps=40)
    wait_for(lambda: steps_of(out, 1) >= 3)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.kill()
    wait_for(lambda: not any(alive(child) for child in children), seconds=15)
    assert "ValueError: a bad value" in (out / "hacpo-tiny-model-pair-seed99.error.txt").read_text()
    *_, last = (out / "hacpo-tiny-model-pair-seed99.error.txt").read_text().splitlines()
    assert last.startswith("hacpo-tiny-model-pair-seed99: ValueError: a bad value")
    done, before = (out / "hacpo-tiny-model-pair-seed0.html").stat().st_mtime_ns, steps_of(out, 1)
    again = real([0, 1], steps=40)
    printed, _ = again.communicate(timeout=180)
    assert again.returncode == 0 and "2 finished" in printed, printed
    assert (out / "hacpo-tiny-model-pair-seed0.html").stat().st_mtime_ns == done
    assert before < 41 and (steps_of(out, 0), steps_of(out, 1)) == (41, 41)


@pytest.mark.slow
def test_sweep_ends_a_run_after_its_time_limit_and_resumes_it(tmp_path, real):
    name = "hacpo-tiny-model-pair-seed0"
    process = real([0], steps=3000, options=["--time-limit", "4"])
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and f"{name} did not end within 4 s" in printed, printed
    assert "TimeoutError" in (tmp_path / "out" / f"{name}.error.txt").read_text()
    before = steps_of(tmp_path / "out", 0)
    assert (tmp_path / "out" / f"{name}.html").exists() and before > 3
    printed, _ = real([0], steps=before + 3).communicate(timeout=180)
    assert steps_of(tmp_path / "out", 0) == before + 4, printed


@pytest.mark.slow
def test_sweep_reports_a_killed_kernel_and_resumes_its_run(tmp_path, real):
    out = tmp_path / "out"
    process = real([0], steps=40)
    wait_for(lambda: steps_of(out, 0) >= 3)
    kernel = psutil.Process(process.pid).children(recursive=True)[-1]
    assert "ipykernel" in " ".join(kernel.cmdline())
    kernel.kill()
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "out of memory?" in printed and "Traceback" not in printed, printed
    before = steps_of(out, 0)
    printed, _ = real([0], steps=40).communicate(timeout=180)
    assert 3 <= before < 41 == steps_of(out, 0), printed
    assert not (out / "hacpo-tiny-model-pair-seed0.error.txt").exists()


@pytest.mark.slow
def test_sweep_saves_on_ctrl_c_and_ends_at_once_on_a_second_one(tmp_path, real):
    out = tmp_path / "out"
    process = real([0, 1, 2], steps=3000, jobs=2)
    wait_for(lambda: min(steps_of(out, 0), steps_of(out, 1)) >= 2)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "3 unfinished runs" in printed, printed
    assert all((out / f"hacpo-tiny-model-pair-seed{s}.html").exists() for s in (0, 1)) and steps_of(out, 2) == 0
    before = steps_of(out, 0)
    process = real([0], steps=3000)
    wait_for(lambda: steps_of(out, 0) > before)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(children[-1].pid, signal.SIGSTOP)  # a kernel that does not end
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "stopping" in process.stdout.readline())
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130 and steps_of(out, 0) < 3000
    wait_for(lambda: not any(alive(child) for child in children), seconds=15)


@pytest.mark.slow
def test_sweep_trains_the_experiment_notebook(tmp_path):
    for _ in range(2):  # the second time the run is skipped
        table = sweep(tmp_path, grids=[{"temperature": 0.8, "eps_high": float("inf")}])
        assert list(table["status"]) == ["finished"] and list(table["tries"]) == [1], table["error"].iloc[0]
    frame = hk.read_runs(tmp_path)
    assert set(frame["temperature"]) == {0.8} and set(frame["eps_high"]) == {float("inf")}
    assert set(frame["agents"]) == {"tiny-model-pair"} and frame["finished"].all()
    assert [p.name for p in checkpoints(tmp_path / frame["run"].iloc[0])] == ["step-000001"]


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sweep_command_names_failed_runs(tmp_path, pretend):
    (tmp_path / "g.yaml").write_text(json.dumps(grid_of()))
    call = ["sweep", str(tmp_path / "g.yaml"), "--out", str(tmp_path / "out")]
    pretend({GSPO: ValueError("a bad value")})
    result = CliRunner().invoke(main, call)
    assert result.exit_code == 1 and f"failed  {GSPO}: ValueError: a bad value" in result.output
    pretend()
    assert CliRunner().invoke(main, call).exit_code == 0


def test_sweep_command_dry_run_writes_nothing(tmp_path, pretend):
    pretend({HACPO: ValueError("a bad value")})
    (tmp_path / "g.yaml").write_text(json.dumps(grid_of()))
    sweep(tmp_path / "out")
    before, pretended = sorted((tmp_path / "out").rglob("*")), pretend()
    call = ["sweep", str(tmp_path / "g.yaml"), "--out", str(tmp_path / "out"), "--dry-run"]
    result = CliRunner().invoke(main, call)
    assert result.exit_code == 0 and f"{HACPO}: new" in result.output and f"{GSPO}: finished" in result.output
    assert not pretended.calls and sorted((tmp_path / "out").rglob("*")) == before


def test_sweep_command_refuses_a_faulty_grid(tmp_path, pretend):
    pretended = pretend()
    (tmp_path / "g.yaml").write_text("grids: [{method: gsop}]")
    result = CliRunner().invoke(main, ["sweep", str(tmp_path / "g.yaml"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and "did you mean 'gspo'?" in result.output and "Traceback" not in result.output
    assert not pretended.calls and not (tmp_path / "out").exists()
