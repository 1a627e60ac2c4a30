"""Agents in real Ray workers, on a local cluster: `make test-ray`; test_remote.py has the tests without Ray."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

import torch  # noqa: E402
from test_remote import CONFIG, PAIR, SETTINGS, calm, same_run  # noqa: E402, F401

import hacpo_kit as hk  # noqa: E402
from hacpo_kit.experiments.notebooks import run_notebook  # noqa: E402
from hacpo_kit.models.agents import run_on_each  # noqa: E402
from hacpo_kit.models.base import WorkerLost  # noqa: E402
from hacpo_kit.models.remote import restart_workers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*were cut at (8|12) tokens")


@pytest.fixture(scope="module")
def cluster():
    """The pair on a local cluster, which ends with these tests."""
    yield hk.load_agents(PAIR, workers="ray", threads=1)
    ray.shutdown()


@pytest.fixture
def agents(cluster):
    """The pair, each agent in a Ray actor with one thread, as it was loaded."""
    restart_workers(cluster, lost_only=False)
    return cluster


def where(agents):
    """Return process and threads of each worker; a function without a module can be sent, too."""
    return run_on_each(agents, lambda agent: (os.getpid(), torch.get_num_threads()))


def test_train_on_ray_is_bit_identical_and_sends_no_weights(agents, calm, tmp_path, problems):  # noqa: F811
    places = where(agents)
    assert len({pid for pid, _ in places} | {os.getpid()}) == 3 and [threads for _, threads in places] == [1, 1]
    before = sum(a.sent + a.received for a in agents)
    run = hk.train(agents, problems, CONFIG, 2, out=tmp_path, test=problems[:3], **SETTINGS)
    same_run(calm, tmp_path)
    assert sum(a.sent + a.received for a in agents) - before < 200_000  # two steps, three tests, a checkpoint
    assert run.agents[0].save(tmp_path / "saved") == tmp_path / "saved"
    assert hk.load_agent(tmp_path / "saved").name == "saved"


def test_train_replaces_a_worker_that_exits(agents, calm, tmp_path, problems):  # noqa: F811
    def after(result):
        if not made:
            agents[1].submit(lambda agent: os._exit(7))
        made.append(result.metrics["step"])

    settings = {"out": tmp_path, "test": problems[:3], "save_every": 1, **SETTINGS}
    made, first = [], hk.train(agents, problems, CONFIG, 1, **settings)
    assert first.folder == tmp_path
    with pytest.warns(UserWarning, match=r"step 3 lost the worker of agent 'llama-differences' \(.*after step 1"):
        hk.train(agents, problems, CONFIG, 2, callbacks=[after], **settings)
    assert made == [2, 2]
    same_run(calm, tmp_path)


def test_train_without_a_folder_names_a_killed_worker(agents, problems):
    ray.kill(agents[0].link.actor)
    with pytest.raises(WorkerLost, match=r"worker of agent 'qwen3-sums' has ended \(ActorDied.*train with out="):
        hk.train(agents, problems, CONFIG, 1, progress="off")
    restart_workers(agents, lost_only=True)
    assert agents[0].lost == "" and where(agents)[0] != where(agents)[1]


def test_remote_call_raises_errors_and_warnings_of_ray_workers(agents, problems):
    def breaks(agent):
        raise FloatingPointError("no luck")

    with pytest.raises(FloatingPointError, match="no luck"):
        run_on_each(agents, breaks)
    with pytest.warns(UserWarning, match="agent 'llama-differences' were cut at 1 tokens"):
        hk.rollout(agents, problems[:2], n=2, max_new_tokens=1, progress=False)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        hk.load_agents(["./nowhere"], workers="ray")


def test_experiment_notebook_runs_on_ray_workers(cluster, tmp_path):
    pytest.importorskip("papermill")
    small = {"steps": 1, "prompts_per_step": 4, "n": 2, "test_size": 4, "workers": "ray", "out": str(tmp_path / "run")}
    run_notebook("06_experiment", small, name="small", out=tmp_path, progress=False)
    assert '"workers": "ray"' in (tmp_path / "run" / "run.json").read_text()


SCRIPT = """
import sys, hacpo_kit as hk
agents = hk.load_agents(["qwen3-sums", "llama-differences"], workers="ray")
config = hk.Config.preset("hacpo", prompts_per_step=4, n=2, max_new_tokens=12)
run = hk.train(agents, hk.load_problems("arithmetic", size=40), config, 1000, out=sys.argv[1], progress="lines",
               callbacks=[lambda result: print("made", result.metrics["step"], flush=True)])
"""


def test_train_on_ray_ends_after_ctrl_c_without_leaving_processes(tmp_path):
    mark = f"hacpo-test-{os.getpid()}"
    driver = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, "HACPO_TEST_MARK": mark},
    )  # fmt: skip
    while "made 1" not in (line := driver.stdout.readline()):
        assert line, "the script ended before its first step"
    assert len(marked(mark)) > 2
    os.killpg(driver.pid, signal.SIGINT)  # as a terminal does: to the whole group
    out, _ = driver.communicate(timeout=120)
    assert driver.returncode == 0 and "stopped after step" in out
    assert (tmp_path / "run" / "checkpoints").exists()
    deadline = time.monotonic() + 20
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not marked(mark)


def marked(mark):
    """Return the processes that inherited the mark of the script."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [path.parent.name] if f"HACPO_TEST_MARK={mark}".encode() in path.read_bytes() else []
        except OSError:
            continue
    return found
