"""Grids, sweeps and the table of many runs; most with processes that only pretend, some with real ones."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
import yaml
from click.testing import CliRunner
from made_runs import write_run

import hacpo_kit as hk
from hacpo_kit.cli import main
from hacpo_kit.experiments import sweeps, worker
from hacpo_kit.experiments.grids import read_grid
from hacpo_kit.experiments.notebooks import Experiment, check_parameters, find_notebook
from hacpo_kit.runs.checkpoints import checkpoints

SMALL = {"steps": 1, "prompts_per_step": 2, "n": 2, "test_size": 2, "minibatch": 4}
METHODS = ["hacpo", "gspo"]


class Pretended:
    """Stands for the processes of a sweep: each ends at once, with the exit statuses that `codes` gives for its run."""

    def __init__(self, codes=None, last=None, told=""):
        self.codes, self.last, self.told = {k: list(v) for k, v in (codes or {}).items()}, last, told
        self.tasks, self.environments = [], []

    def __call__(self, task, log, environment):
        self.tasks.append(task)
        self.environments.append(environment)
        code = self.codes[task["name"]].pop(0) if self.codes.get(task["name"]) else 0
        if code == 0:
            write_run(Path(task["out"]) / task["name"], check_parameters(task["parameters"]), last=self.last)
        else:
            log.write(f"Traceback …\n{self.told or 'ValueError: it went wrong'}\n".encode())
        return subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({code})"], stdin=subprocess.PIPE)

    @property
    def names(self):
        return [task["name"] for task in self.tasks]


@pytest.fixture
def pretend(monkeypatch):
    """pretend(codes, …): from now on sweeps start pretended processes, which it returns the record of."""

    def start(*args, **options):
        pretended = Pretended(*args, **options)
        monkeypatch.setattr(sweeps, "_launch", pretended)
        return pretended

    return start


def grid_of(**changes):
    return {"name": "study", "common": SMALL, "grids": [{"method": METHODS}], **changes}


# ── grids ────────────────────────────────────────────────────────────────────────────────────────────────────────

STUDY = """
name: study
common: {steps: 20, test_size: 200}
seeds: 2
grids:
  - method: [gspo, hacpo]
    agents: [tiny-state-pair, tiny-model-pair]
  - method: [hacpo, alpha=0]     # hacpo stands in the first block too
    agents: tiny-model-pair
  - {method: hacpo, lr: [1e-4, 2e-4], temperature: 0.8, agents: "qwen3-sums, llama-differences", seed: 7}
"""


def test_blocks_are_added_and_equal_runs_count_once(tmp_path):
    (tmp_path / "a.yaml").write_text(STUDY)
    grid = read_grid(tmp_path / "a.yaml")
    assert (grid.name, grid.notebook.stem) == ("study", "06_experiment")
    first = [name for name in grid.runs if name.endswith("seed0")]
    assert first == [
        "gspo-tiny-state-pair-seed0", "gspo-tiny-model-pair-seed0", "hacpo-tiny-state-pair-seed0",
        "hacpo-tiny-model-pair-seed0", "alpha=0-tiny-model-pair-seed0",
    ]  # fmt: skip
    assert len(grid.runs) == 2 * 5 + 2 and list(grid.runs)[:5] == first  # one seed after the other
    last = list(grid.runs.values())[-1]
    assert (last.lr, last.seed, last.settings, last.steps) == (2e-4, 7, {"temperature": 0.8}, 20)
    assert last.config().temperature == 0.8


def test_a_name_has_what_the_block_sets_and_does_not_change_when_the_grid_grows():
    small = set(read_grid(grid_of(grids=[{"lr": ["1e-4", "3e-4"]}])).runs)
    assert small == {"hacpo-tiny-model-pair-seed0", "hacpo-tiny-model-pair-lr=0.0003-seed0"}
    grown = read_grid(grid_of(grids=[{"lr": ["1e-4", "3e-4"], "beta": [0, 0.001]}], seeds=[0, 3]))
    assert small < set(grown.runs) and "hacpo-tiny-model-pair-beta=0.001-lr=0.0003-seed3" in grown.runs


def test_agents_that_look_alike_in_a_file_name_stay_apart():
    agents = ["qwen3-sums, llama-differences", "qwen3-sums,llama-differences"]
    assert len(read_grid(grid_of(grids=[{"agents": agents}])).runs) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: []", "unknown key 'grid'; did you mean 'grids'?"),
        ("grids: [{methods: hacpo}]", "block 1 of grids: unknown parameter 'methods'; did you mean 'method'?"),
        ("grids: [{method: [hacpo, gsop]}]", "unknown method 'gsop'; did you mean 'gspo'?"),
        ("grids: [{agents: tiny-modl-pair}]", "unknown agents 'tiny-modl-pair'; did you mean 'tiny-model-pair'?"),
        ("grids: [{tempreature: 1}]", "did you mean 'temperature'?"),
        ("common: {steps: 2}\nseeds: 2\ncommon: {steps: 3}", "line 3: 'common' is given twice"),
        ("grids: [{lr: 1e-4, lr: 2e-4}]", "line 1: 'lr' is given twice"),
        ("grids: [{lr: []}]", "lr has no values, so nothing would run"),
        ("grids: [{lr: }]", "lr has no value"),
        ("grids: [{lr: fast}]", "lr='fast'"),
        ("grids: [{count_eos: maybe}]", "count_eos='maybe'"),
        ("grids: [{method: gspo, sources: all}]", "method 'gspo' is defined by sources=own"),
        ("grids: [{method: alpha=0, alpha: 2}]", "method 'alpha=0' is defined by alpha=0.0"),
        ("grids: []", "grids takes a list of blocks"),
        ("grids: [hacpo]", "block 1 of grids takes names with values"),
        ("grids: [{lr: [[1, 2]]}]", "lr takes one value or a list of values"),
        ("grids: [{seeds: 3}]", "in here it is seed"),
        ("grids: [{out: x}]", "leave out out, the sweep chooses the folders"),
        ("common: {settings: {beta: 1}}", "leave settings out, give its settings by their own names"),
        ("common: {lr: [1, 2]}", "lists of values stand in grids"),
        ("common: {seed: 1}\nseeds: 2", "seed stands in common and in seeds"),
        ("seeds: 0", "seeds='0': it takes a number of seeds, at least 1"),
        ("name: a/b", "name 'a/b': "),
        ("notebook: 99", "no notebook 99"),
        ("notebook: 00_quickstart", "has no parameters"),
        ("common: {test: nowhere.jsonl}", "test='nowhere.jsonl' is neither a file nor one of arithmetic"),
        ("grids: [{agents: }", "is no YAML"),
        ("- a", "holds no keys"),
    ],
)
def test_a_faulty_grid_is_one_line_and_starts_nothing(text, message, tmp_path, pretend):
    pretended = pretend()
    (tmp_path / "g.yaml").write_text(text)
    result = CliRunner().invoke(main, ["sweep", str(tmp_path / "g.yaml"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output, result.output
    assert not pretended.tasks and not (tmp_path / "out").exists()


def test_yaml_s_own_ideas_about_values_change_nothing(tmp_path):
    """As YAML 1e-4 is text, 010 eight, no false; here each is what the parameter takes."""
    (tmp_path / "g.yaml").write_text(
        "grids: [{lr: 1e-4, n: 010, count_eos: no, eps_high: inf, alpha: none, seed: 007}]"
    )
    (run,) = read_grid(tmp_path / "g.yaml").runs.values()
    assert (run.lr, run.n, run.alpha, run.seed) == (1e-4, 10, None, 7)
    assert run.settings == {"count_eos": False, "eps_high": float("inf")}


# ── settings of Config in an experiment ──────────────────────────────────────────────────────────────────────────


def test_every_setting_of_config_is_a_parameter_by_its_name_or_in_settings():
    for given in ({"beta": "0.001"}, {"settings": {"beta": 0.001}}, {"settings": '{"beta": "0.001"}'}):
        experiment = check_parameters(given)
        assert experiment.settings == {"beta": 0.001} and experiment.config().beta == 0.001
        assert experiment.folder != Experiment().folder
    assert check_parameters({"settings": {}}) == Experiment()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"settings": {"betta": 1}}, "settings: unknown setting 'betta'; did you mean 'beta'?"),
        ({"settings": {"lr": 1}}, "lr is a parameter of its own"),
        ({"settings": {"beta": 1}, "beta": 2}, "beta is given twice"),
        ({"settings": "beta"}, "settings='beta'"),
        ({"settings": "[1]"}, "settings=[1]"),
        ({"beta": -1}, "beta=-1"),
        ({"peer_update": "hapco"}, "peer_update='hapco'"),
    ],
)
def test_wrong_settings_are_named(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_parameters(given)


# ── sweeps, with processes that pretend ──────────────────────────────────────────────────────────────────────────


def test_every_run_gets_its_parameters_and_finished_ones_are_skipped(tmp_path, pretend):
    first = pretend()
    table = hk.sweep(grid_of(seeds=2), tmp_path, jobs=2, progress="off")
    assert list(table["status"]) == ["finished"] * 4 and list(table["tries"]) == [1] * 4
    assert first.tasks[3] == {
        "notebook": str(find_notebook("06_experiment")), "name": "gspo-tiny-model-pair-seed1", "out": str(tmp_path),
        "parameters": {**SMALL, "method": "gspo", "seed": 1},
    }  # fmt: skip
    record = json.loads((tmp_path / "sweep.json").read_text())["runs"]["gspo-tiny-model-pair-seed1"]
    assert record["status"] == "finished" and record["parameters"]["sources"] == "own" and record["seconds"] > 0
    assert [p.name for p in checkpoints(tmp_path / "gspo-tiny-model-pair-seed1")] == ["step-000002"]
    assert not list(tmp_path.glob(".*.log"))
    again = pretend()
    hk.sweep(grid_of(seeds=3), tmp_path, progress="off")
    assert again.names == ["hacpo-tiny-model-pair-seed2", "gspo-tiny-model-pair-seed2"]
    hk.sweep(grid_of(seeds=1), tmp_path, progress="off", keep_checkpoints="none")
    assert not checkpoints(tmp_path / "hacpo-tiny-model-pair-seed0")
    assert len(json.loads((tmp_path / "sweep.json").read_text())["runs"]) == 6  # those of the larger grid stay known


@pytest.mark.parametrize("lacking", ["html", "ipynb", "steps", "end_time", "exception"])
def test_a_run_is_finished_only_with_all_steps_notebook_and_html(lacking, tmp_path, pretend):
    pretend()
    hk.sweep(grid_of(grids=[{}]), tmp_path, progress="off")
    run = tmp_path / "hacpo-tiny-model-pair-seed0"
    if lacking in ("html", "ipynb"):
        run.with_name(f"{run.name}.{lacking}").unlink()
    elif lacking == "steps":
        write_run(run, Experiment(**SMALL), last=0)
    else:
        about = {
            "end_time": "now",
            "exception": None,
            **{"end_time": {"end_time": None}}.get(lacking, {"exception": True}),
        }
        nbformat.write(nbformat.v4.new_notebook(metadata={"papermill": about}), run.with_name(f"{run.name}.ipynb"))
        run.with_name(f"{run.name}.html").write_text("<html>")
    again = pretend()
    hk.sweep(grid_of(grids=[{}]), tmp_path, progress="off")
    assert again.names == [run.name]


def test_a_failed_run_is_kept_and_named_and_the_others_go_on(tmp_path, pretend):
    (tmp_path / "g.yaml").write_text(json.dumps(grid_of(seeds=2)))
    name = "gspo-tiny-model-pair-seed0"
    pretended = pretend({name: [worker.FAILED]})
    call = ["sweep", str(tmp_path / "g.yaml"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, call)
    assert result.exit_code == 1 and len(pretended.tasks) == 4  # not tried again
    assert f"failed  {name}: ValueError: it went wrong" in result.output and "3 finished, 1 failed" in result.output
    assert "Traceback …" in (tmp_path / "out" / f"{name}.error.txt").read_text()
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["runs"][name]["status"] == "failed"
    again = pretend()
    assert CliRunner().invoke(main, call).exit_code == 0 and again.names == [name]
    assert not (tmp_path / "out" / f"{name}.error.txt").exists()


def test_a_kernel_that_could_not_start_is_tried_again_and_not_for_ever(tmp_path, pretend):
    clash = {"told": "RuntimeError: Kernel died before replying to kernel_info"}
    names = ["hacpo-tiny-model-pair-seed0", "gspo-tiny-model-pair-seed0"]
    pretended = pretend({names[0]: [worker.TRY_AGAIN], names[1]: [worker.TRY_AGAIN] * 5}, **clash)
    table = hk.sweep(grid_of(), tmp_path, retries=1, progress="off")
    assert dict(table["status"]) == {names[0]: "finished", names[1]: "failed"} and list(table["tries"]) == [2, 2]
    assert len(pretended.tasks) == 4 and "Kernel died before replying" in table["error"][names[1]]


@pytest.mark.parametrize(
    ("code", "reason"), [(0, "ended after step 0, before the last"), (-9, "signal 9 (out of memory?)")]
)
def test_a_run_that_ends_early_or_is_killed_has_failed(code, reason, tmp_path, pretend, monkeypatch):
    pretended = pretend(last=0)
    if code:
        killed = [sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"]
        monkeypatch.setattr(sweeps, "_launch", lambda *_: subprocess.Popen(killed, stdin=subprocess.PIPE))
    table = hk.sweep(grid_of(grids=[{}]), tmp_path, progress="off")
    assert reason in table["error"].iloc[0] and len(pretended.tasks) == (code == 0)


def test_runs_with_other_parameters_are_never_mixed(tmp_path, pretend):
    pretend()
    hk.sweep(grid_of(), tmp_path, progress="off")
    refused = pretend()
    for changed, told in (({"lr": 3e-4}, "lr: 0.0001 → 0.0003"), ({"test_size": 3}, "test_size: 2 → 3")):
        with pytest.raises(ValueError, match=told):
            hk.sweep(grid_of(common={**SMALL, **changed}), tmp_path, progress="off")
    (tmp_path / "sweep.json").unlink()  # the runs speak for themselves
    with pytest.raises(ValueError, match=re.escape("lr: 0.0001 → 0.0003")):
        hk.sweep(grid_of(common={**SMALL, "lr": 3e-4}), tmp_path, progress="off")
    assert not refused.tasks
    longer = pretend()
    hk.sweep(grid_of(common={**SMALL, "steps": 2}), tmp_path, progress="off")
    assert len(longer.tasks) == 2  # more steps: they go on
    with pytest.raises(ValueError, match="steps: it has 2, the grid 1"):
        hk.sweep(grid_of(), tmp_path, progress="off")


def test_threads_are_one_unless_somebody_says_more(tmp_path, pretend, monkeypatch):
    for name in sweeps.THREADS:
        monkeypatch.delenv(name, raising=False)
    for options, wanted in (({}, "1"), ({"threads": 3}, "3")):
        pretended = pretend()
        hk.sweep(grid_of(grids=[{}]), tmp_path / wanted, progress="off", **options)
        assert {pretended.environments[0][name] for name in sweeps.THREADS} == {wanted}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert sweeps._environment(None)["MKL_NUM_THREADS"] == "2"


def test_lines_say_which_how_long_and_how_much_is_left(tmp_path, pretend, capsys):
    pretend({"gspo-tiny-model-pair-seed0": [worker.FAILED]})
    hk.sweep(grid_of(), tmp_path, progress="lines")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "study: 2 runs, 0 finished before; 1 at a time"
    assert lines[1].startswith("1/2 hacpo-tiny-model-pair-seed0: finished after ") and "left" in lines[1]
    assert lines[2].endswith("(ValueError: it went wrong)")


def test_dry_run_lists_and_writes_nothing(tmp_path, pretend):
    pretended = pretend()
    (tmp_path / "g.yaml").write_text(json.dumps(grid_of()))
    write_run(tmp_path / "out" / "gspo-tiny-model-pair-seed0", Experiment(**SMALL, method="gspo"))
    before = sorted((tmp_path / "out").rglob("*"))
    result = CliRunner().invoke(main, ["sweep", str(tmp_path / "g.yaml"), "--out", str(tmp_path / "out"), "--dry-run"])
    assert result.exit_code == 0 and "hacpo-tiny-model-pair-seed0: new" in result.output
    assert "gspo-tiny-model-pair-seed0: finished" in result.output and "2 runs, 1 finished" in result.output
    assert not pretended.tasks and sorted((tmp_path / "out").rglob("*")) == before


def test_two_sweeps_in_one_folder_are_refused(tmp_path, pretend):
    from hacpo_kit.common.files import locked

    pretended = pretend()
    with locked(tmp_path / ".sweep.lock", what="it"), pytest.raises(ValueError, match="another process is working on"):
        hk.sweep(grid_of(), tmp_path, progress="off")
    assert not pretended.tasks


@pytest.mark.parametrize("options", [{"jobs": 0}, {"retries": -1}, {"threads": 0}, {"keep_checkpoints": "all"}])
def test_options_are_checked(options, tmp_path):
    with pytest.raises(ValueError, match=next(iter(options))):
        hk.sweep(grid_of(), tmp_path, **options)


# ── sweeps, with real processes and kernels ──────────────────────────────────────────────────────────────────────

# a run without torch: a step every tenth of a second, saved after each, an end after the step on Ctrl-C, faults on demand
CELL = """
import json, pathlib, signal, time
if seed == 99:
    raise ValueError("it went wrong")
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
    """real(seeds, steps, jobs): a running `hacpo-kit sweep` of a notebook that trains nothing."""
    notebook = nbformat.read(find_notebook("06"), 4)
    cell = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    notebook.cells = [cell, nbformat.v4.new_code_cell(CELL)]
    nbformat.write(notebook, tmp_path / "n.ipynb")
    started = []

    def start(seeds, steps, jobs=1):
        grid = {"notebook": str(tmp_path / "n.ipynb"), "common": {"steps": steps}, "seeds": seeds}
        (tmp_path / "g.yaml").write_text(json.dumps(grid))
        command = [sys.executable, "-c", "from hacpo_kit.cli import main; main()", "sweep", str(tmp_path / "g.yaml")]
        options = ["--out", str(tmp_path / "out"), "--jobs", str(jobs)]
        started.append(
            subprocess.Popen(
                command + options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
        )
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


def wait_for(what, seconds=120):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def test_killed_in_the_middle_it_leaves_no_process_and_goes_on_without_repeating(tmp_path, real):
    out = tmp_path / "out"
    process = real([99, 0, 1], steps=40)
    wait_for(lambda: steps_of(out, 1) >= 3)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 2  # the worker and its kernel
    process.kill()
    wait_for(lambda: not any(alive(child) for child in children), seconds=15)
    assert "ValueError: it went wrong" in (out / "hacpo-tiny-model-pair-seed99.error.txt").read_text()
    done, before = (out / "hacpo-tiny-model-pair-seed0.html").stat().st_mtime_ns, steps_of(out, 1)
    again = real([0, 1], steps=40)
    printed, _ = again.communicate(timeout=180)
    assert again.returncode == 0 and "2 runs, 1 finished before" in printed, printed
    assert (out / "hacpo-tiny-model-pair-seed0.html").stat().st_mtime_ns == done
    assert before < 41 and (steps_of(out, 0), steps_of(out, 1)) == (41, 41)


def test_a_killed_kernel_is_told_in_a_line_and_the_same_command_goes_on(tmp_path, real):
    out = tmp_path / "out"
    process = real([0], steps=40)
    wait_for(lambda: steps_of(out, 0) >= 3)
    kernel = psutil.Process(process.pid).children(recursive=True)[-1]
    assert "ipykernel" in " ".join(kernel.cmdline())
    kernel.kill()
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 1, printed
    assert "has died (was it killed, or out of memory?)" in printed and "the same command goes on" in printed
    assert "Traceback" not in printed
    before = steps_of(out, 0)
    printed, _ = real([0], steps=40).communicate(timeout=180)
    assert 3 <= before < 41 == steps_of(out, 0), printed
    assert not (out / "hacpo-tiny-model-pair-seed0.error.txt").exists()


def test_ctrl_c_lets_the_runs_save_and_a_second_one_ends_them_at_once(tmp_path, real):
    out = tmp_path / "out"
    process = real([0, 1, 2], steps=3000, jobs=2)
    wait_for(lambda: min(steps_of(out, 0), steps_of(out, 1)) >= 2)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "stopped with 3 runs to do; the same command goes on" in printed, printed
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
def test_the_experiment_notebook_with_a_setting_of_config(tmp_path):
    """The real thing, once: trained, executed, as HTML, read back, and skipped the second time."""
    grid = grid_of(grids=[{"temperature": 0.8, "eps_high": float("inf")}])
    for _ in range(2):
        table = hk.sweep(grid, tmp_path, progress="off")
        assert list(table["status"]) == ["finished"] and list(table["tries"]) == [1], table["error"].iloc[0]
    frame = hk.read_runs(tmp_path)
    assert set(frame["temperature"]) == {0.8} and set(frame["eps_high"]) == {float("inf")}
    assert set(frame["agents"]) == {"tiny-model-pair"} and frame["finished"].all()
    assert [p.name for p in checkpoints(tmp_path / frame["run"].iloc[0])] == ["step-000001"]


def test_a_process_that_only_hands_over_a_notebook_needs_no_torch():
    code = "import sys, hacpo_kit.experiments.worker, hacpo_kit.experiments.notebooks; "
    code += "assert 'torch' not in sys.modules; import hacpo_kit as hk; "
    code += "assert 'train' in dir(hk) and hk.train.__module__ == 'hacpo_kit.training'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_grids_of_the_project_are_read():
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "how-to" / "sweeps.md").read_text(encoding="utf-8")
    assert len(read_grid(yaml.safe_load(text.split("```yaml")[1].split("```")[0])).runs) == 5 * (4 * 4 + 2)
    for path in (root / "reports").rglob("*.yaml"):
        if "runs" not in path.parts:
            assert read_grid(path).runs


def test_named_sets_are_known_and_others_refused_before_anything_starts():
    assert read_grid({"common": {"test": "larger", "problems": "sums", "tests": "sums, mixed"}}).runs
    with pytest.raises(FileNotFoundError, match="tests='nonsense' is neither a file nor one of arithmetic"):
        read_grid({"common": {"tests": "sums,nonsense"}})


def test_a_setting_at_its_default_is_the_same_run():
    assert len(read_grid({"grids": [{"method": "hacpo"}, {"method": "hacpo", "beta": [0, 0.001]}]}).runs) == 2
