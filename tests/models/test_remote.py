"""Agents in workers, with a stand-in for Ray: a worker in this process, behind the same bytes; tests/ray has the real one."""

import json
import pickle
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import hacpo_kit as hk
from hacpo_kit.experiments.parameters import check_parameters
from hacpo_kit.models import ray_workers
from hacpo_kit.models.agents import run_on_each
from hacpo_kit.models.base import WorkerLost
from hacpo_kit.models.loading import load_agent
from hacpo_kit.models.ray_workers import load_in_workers
from hacpo_kit.models.remote import Disconnected, RemoteAgent, restart_workers
from hacpo_kit.models.worker import Worker, unpack
from hacpo_kit.runs.experience import Experience
from hacpo_kit.runs.gradients import gradient_parts

PAIR = ["qwen3-sums", "llama-differences"]
pytestmark = pytest.mark.filterwarnings("ignore:.*were cut at (8|12) tokens")
CONFIG = hk.Config.preset("hacpo", prompts_per_step=4, n=2, minibatch=8, max_new_tokens=12, warmup=0)


class Link:
    """A worker at the other end of bytes; the next request whose function is in `deadly` ends it."""

    def __init__(self, deadly):
        self.worker, self.deadly, self.requests, self.gone = Worker(), deadly, [], False

    def send(self, method, request):
        function = pickle.loads(request)[0]
        self.requests.append(request)
        if self.deadly and function.__name__ == self.deadly[0]:
            self.deadly.pop(0)
            self.gone = True
        return None if self.gone else getattr(self.worker, method)(request)

    def receive(self, ticket):
        if self.gone:
            raise Disconnected("a test ended it")
        return ticket

    def stop(self):
        self.gone = True


@pytest.fixture
def workers():
    """workers(names, deadly=[…], **options): agents in such workers."""

    def load(names=PAIR, deadly=(), **options):
        deadly = list(deadly)
        sources = [(name, {"name": name, "device": "cpu", **options}) for name in names]
        return load_in_workers(load_agent, sources, "ray", start=lambda: Link(deadly))

    return load


SETTINGS = {"eval_every": 1, "progress": "off"}


@pytest.fixture(scope="module")
def calm(tmp_path_factory, problems):
    """The run folder of two steps in this process, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("calm")
    hk.train(hk.load_agents(PAIR, device="cpu"), problems, CONFIG, 2, out=folder, test=problems[:3], **SETTINGS)
    return folder


def instead_of_ray(monkeypatch):
    """From now on workers="ray" means workers in this process."""
    monkeypatch.setattr(ray_workers, "connect", lambda: None)
    monkeypatch.setattr(ray_workers, "gpus_per_worker", lambda ray, count, gpus: 0)
    monkeypatch.setattr(ray_workers, "RayLink", lambda threads, gpus: Link([]))


def lines(path):
    """The recorded steps without their times."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]


def same_run(a, b):
    """Raises AssertionError unless two run folders hold the same records and the same weights."""
    assert lines(a / "metrics.jsonl") == lines(b / "metrics.jsonl")
    assert lines(a / "samples.jsonl") == lines(b / "samples.jsonl")
    for name in ("agents", "optimizers"):
        here, there = (sorted((run / "checkpoints").iterdir())[-1] / name for run in (a, b))
        files = [p.relative_to(here) for p in here.rglob("*.safetensors")]
        assert files and all((here / p).read_bytes() == (there / p).read_bytes() for p in files)
    for path in (a / "experience").iterdir():
        one, two = Experience.load(path), Experience.load(b / "experience" / path.name)
        assert one.frame.equals(two.frame)


# ── the same as in this process ──────────────────────────────────────────────────────────────────────────────────


def test_train_in_workers_gives_the_run_of_one_process(workers, calm, tmp_path, problems):
    agents = workers()
    run = hk.train(agents, problems, CONFIG, 2, out=tmp_path, test=problems[:3], **SETTINGS)
    same_run(calm, tmp_path)
    assert all(a.updates == sum(line["agents"][a.name].get("updates", 0) for line in run.history) > 0 for a in agents)
    times = run.history[-1]
    assert times["seconds_rollout"] > 0 and times["seconds_advantage"] > 0 and times["seconds_update"] > 0


def test_remote_agent_is_accepted_by_every_verb(workers, tmp_path, problems, fresh_agent):
    there, here = workers([PAIR[0]])[0], fresh_agent(PAIR[0])
    got = []
    for agent in (there, here):
        pool = hk.reward(hk.rollout(agent, problems[:3], n=4, max_new_tokens=12, progress=False))
        capability = hk.Capability().observe(pool)
        batch = hk.advantage(pool, agent, capability, CONFIG)
        stats = hk.update(agent, batch, CONFIG)
        scores = hk.evaluate(agent, problems[:3], k=2, max_new_tokens=12, progress=False)
        folder = agent.save(tmp_path / agent.name / type(agent).__name__)
        got.append((pool, batch, stats, scores, folder))
    (pool, batch, stats, scores, folder), (pool2, batch2, stats2, scores2, folder2) = got
    assert [r.text for r in pool] == [r.text for r in pool2]
    assert all(np.array_equal(a.logps, b.logps) for a, b in zip(pool, pool2, strict=True))
    assert torch.equal(batch.advantages, batch2.advantages) and batch.pool is pool
    assert stats.metrics() == stats2.metrics() and scores.agents == scores2.agents
    assert (folder / "model.safetensors").read_bytes() == (folder2 / "model.safetensors").read_bytes()
    assert there.updates == here.updates and there.steps == here.steps == 1


def test_a_checkpoint_goes_from_a_worker_to_this_process_and_back(workers, tmp_path, problems):
    there = workers()
    run = hk.train(there, problems, CONFIG, 1, progress="off")
    hk.save(tmp_path / "c", there, run.state)
    here = hk.load_agents(PAIR, device="cpu")
    hk.restore(tmp_path / "c", here)
    again = workers()
    assert hk.restore(tmp_path / "c", again).step == 1
    assert [a.updates for a in again] == [a.updates for a in here] == [a.updates for a in there]
    texts = [
        [r.text for r in hk.rollout(agents, problems[:2], n=2, max_new_tokens=8, progress=False)]
        for agents in (there, here, again)
    ]
    assert texts[0] == texts[1] == texts[2]


def test_two_of_one_kind_are_told_apart(workers, monkeypatch):
    instead_of_ray(monkeypatch)
    agents = hk.load_agents([PAIR[0], PAIR[0]], workers="ray")
    assert [a.name for a in agents] == [PAIR[0], f"{PAIR[0]}#2"]
    assert [r.source for r in hk.rollout(agents, hk.load_problems("arithmetic", size=1), n=1, progress=False)] == [
        a.name for a in agents
    ]
    restart_workers(agents, lost_only=False)
    assert agents[1].name == f"{PAIR[0]}#2" and agents[1].workers == {"workers": "ray", "threads": 1, "num_gpus": 0}


def test_an_experiment_has_workers_as_a_parameter(monkeypatch, tmp_path):
    instead_of_ray(monkeypatch)
    small = {"agents": PAIR[0], "steps": 1, "prompts_per_step": 2, "n": 2, "test_size": 2, "max_new_tokens": 12}
    asked = check_parameters({**small, "workers": "ray", "out": str(tmp_path / "r")})
    run = asked.run(progress="off")
    assert [type(a) for a in run.agents] == [RemoteAgent]
    # where it is computed makes no other run of it
    assert replace(asked, out="").folder == replace(asked, out="", workers="").folder
    with pytest.raises(ValueError, match="workers='dask'"):
        check_parameters({"workers": "dask"})


def test_agents_here_and_in_workers_learn_together(workers, fresh_agent, problems):
    mixed = [workers([PAIR[0]])[0], fresh_agent(PAIR[1])]
    apart = [fresh_agent(name) for name in PAIR]
    one, two = (hk.train(agents, problems, CONFIG, 1, progress="off").history[-1] for agents in (mixed, apart))
    assert one["agents"] == two["agents"]


# ── what travels ─────────────────────────────────────────────────────────────────────────────────────────────────


def arrays(thing, found):
    """Every tensor and array inside, through containers and records."""
    if isinstance(thing, torch.Tensor | np.ndarray):
        found.append(int(np.prod(thing.shape)))
    elif isinstance(thing, dict):
        [arrays(x, found) for x in thing.values()]
    elif isinstance(thing, list | tuple | set):
        [arrays(x, found) for x in thing]
    elif hasattr(thing, "__dict__") and type(thing).__module__.startswith("hacpo_kit"):
        arrays(vars(thing), found)
    return found


def test_no_weights_travel(workers, problems, monkeypatch):
    answers, call = [], Worker.call
    monkeypatch.setattr(Worker, "call", lambda self, request: answers.append(call(self, request)) or answers[-1])
    agents = workers()
    before = [(a.sent, a.received) for a in agents]
    links = [agent.link for agent in agents]
    del answers[:]
    for link in links:
        del link.requests[:]
    result = hk.step(agents, problems[:4], hk.Capability(), CONFIG)
    smallest = 32 * 32  # of the matrices of these models
    sizes = arrays([pickle.loads(request) for link in links for request in link.requests], [])
    sizes += arrays([unpack(answer, [result.pool]) for answer in answers], [])
    assert sizes and max(sizes) < smallest
    travelled = sum(a.sent + a.received - s - r for a, (s, r) in zip(agents, before, strict=True))
    assert travelled == sum(len(request) for link in links for request in link.requests) + sum(map(len, answers))
    assert travelled < 60_000  # 16 rollouts; the weights of the smaller model take ten times as much
    assert result.batches[agents[0].name].pool is result.pool  # named in the answer, not sent again


# ── warnings and errors ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_warning_in_a_worker_reaches_the_user(workers, problems):
    agent = workers([PAIR[0]])[0]
    with pytest.warns(UserWarning, match=r"of agent 'qwen3-sums' were cut at 1 tokens"):
        hk.rollout(agent, problems[:2], n=2, max_new_tokens=1, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the user's filters decide
        with pytest.raises(UserWarning, match="were cut"):
            hk.rollout(agent, problems[:2], n=2, max_new_tokens=1, progress=False)


def breaks(agent, kind):
    agent.steps += 1
    raise kind("no luck")


def test_remote_call_raises_the_workers_error_with_its_traceback(workers, problems):
    agents = workers()
    for kind in (ValueError, FloatingPointError, KeyError):
        with pytest.raises(kind, match="no luck") as caught:
            run_on_each(agents, breaks, kind)
        (note,) = caught.value.__notes__
        assert "'qwen3-sums'" in note and "in breaks" in note  # the worker's traceback
    assert [a.steps for a in agents] == [3, 3]  # the other was waited for
    with pytest.raises(ValueError, match=r"exceed the \d+ positions of agent 'qwen3-sums'"):
        hk.rollout(agents, problems[:1], n=1, max_new_tokens=10**6)


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError


def test_remote_call_raises_an_error_that_cannot_be_pickled_as_text(workers):
    with pytest.raises(RuntimeError, match="Unpicklable: no luck"):
        run_on_each(workers(PAIR[:1]), breaks, Unpicklable)


def test_remote_agent_refuses_access_to_its_model(workers, problems):
    agent = workers([PAIR[0]])[0]
    pool = hk.reward(hk.rollout(agent, problems[:2], n=2, max_new_tokens=8, progress=False))
    batch = hk.advantage(pool, agent, hk.Capability().observe(pool), CONFIG)
    with pytest.raises(AttributeError, match=r"agent 'qwen3-sums' has no .model in this process"):
        agent.model  # noqa: B018
    with pytest.raises((AttributeError, RuntimeError), match="its model is in a worker"):
        gradient_parts(agent, batch, CONFIG)
    with pytest.raises(ValueError, match="before= cannot reach"):
        hk.update(agent, batch, CONFIG, before=print)


def test_load_in_workers_refuses_unusable_sources(workers, fresh_agent, monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        workers(["./nowhere"])
    with pytest.raises(ValueError, match="'qwen3-sums' is already loaded"):
        load_in_workers(load_agent, [(fresh_agent(PAIR[0]), {})], "ray")
    with pytest.raises(ValueError, match=r"workers='dask': use 'ray'"):
        hk.load_agents(PAIR, workers="dask")
    with pytest.raises(ValueError, match="are options of workers"):
        hk.load_agents(PAIR, threads=2)
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hacpo_kit\[ray\]'"):
        hk.load_agents(PAIR, workers="ray")


def test_gpus_per_worker_refuses_too_few_gpus():
    class Cluster:
        def cluster_resources():
            return {"GPU": 1.0}

    with pytest.raises(ValueError, match=r"2 agents need 1 GPUs each, but the cluster has 1: use num_gpus=0.5"):
        ray_workers.gpus_per_worker(Cluster, 2, None)
    assert ray_workers.gpus_per_worker(Cluster, 2, 0.5) == 0.5 and ray_workers.gpus_per_worker(Cluster, 1, None) == 1


# ── lost workers ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("deadly", [["_learn"], ["_rollouts_of_agent", "sample", "_save_agent"]])
def test_train_replaces_a_lost_worker_and_ends_the_same(workers, calm, tmp_path, problems, deadly):
    agents = workers()
    hk.train(agents, problems, CONFIG, 1, out=tmp_path, test=problems[:3], **SETTINGS)
    agents[1].link.deadly += deadly  # in the second step
    gone = r"step [23] lost the worker of agent '.*' \(a test ended it\).*resumes after step 1"
    with pytest.warns(UserWarning, match=gone):
        run = hk.train(agents, problems, CONFIG, 2, out=tmp_path, test=problems[:3], **SETTINGS)
    assert not run.stopped and not any(a.lost for a in agents)
    same_run(calm, tmp_path)


def test_train_restarts_all_agents_without_a_checkpoint(workers, calm, tmp_path, problems):
    agents, made = workers(), []

    def after(result):
        made.append(result.metrics["step"])
        if made == [1]:
            agents[0].link.stop()

    with pytest.warns(UserWarning, match="resumes after step 0"):
        hk.train(agents, problems, CONFIG, 2, out=tmp_path, test=problems[:3], callbacks=[after], **SETTINGS)
    assert made == [1, 1, 2]
    same_run(calm, tmp_path)


def test_train_keeps_changes_after_a_lost_worker(workers, tmp_path, problems):
    agents = workers(deadly=["_learn"])
    with pytest.warns(UserWarning, match="lost the worker"):
        run = hk.train(agents, problems, CONFIG, 1, out=tmp_path, changes={"lr": 3e-5}, progress="off")
    assert run.config.lr == 3e-5 and run.history[-1]["agents"][PAIR[0]]["lr"] == 3e-5
    assert len((tmp_path / "changes.jsonl").read_text().splitlines()) == 1


def test_train_without_a_run_folder_raises_worker_lost(workers, problems):
    with pytest.raises(
        WorkerLost, match=r"the worker of agent 'qwen3-sums' has ended \(a test ended it\).*train with out="
    ):
        hk.train(workers(deadly=["_learn"]), problems, CONFIG, 1, progress="off")


def test_train_gives_up_after_several_lost_workers_and_the_run_resumes(workers, calm, tmp_path, problems):
    agents = workers(deadly=["_learn"] * 5)  # both, both, and one
    settings = {"out": tmp_path, "test": problems[:3], **SETTINGS}
    with (
        pytest.warns(UserWarning, match="lost the worker"),
        pytest.raises(WorkerLost, match=r"lost 3 times in step 1"),
    ):
        hk.train(agents, problems, CONFIG, 2, **settings)
    hk.train(workers(), problems, CONFIG, 2, **settings)
    same_run(calm, tmp_path)


def test_resume_uses_the_recorded_workers_or_this_process(workers, calm, tmp_path, monkeypatch, problems):
    agents = workers()
    for agent in agents:
        agent.workers = {"workers": "ray", "threads": 1, "num_gpus": 0}
    settings = {"test": problems[:3], "problems": problems}
    hk.train(agents, config=CONFIG, steps=1, out=tmp_path, **settings, **SETTINGS)
    assert json.loads((tmp_path / "run.json").read_text())["workers"]["threads"] == 1

    def missing():
        raise ModuleNotFoundError("workers='ray' needs Ray")

    monkeypatch.setattr(ray_workers, "connect", missing)
    with pytest.warns(UserWarning, match="needs Ray; the agents are loaded in this process"):
        run = hk.resume(tmp_path, steps=2, **settings, progress="off")
    assert not any(isinstance(a, RemoteAgent) for a in run.agents)
    same_run(calm, tmp_path)
    instead_of_ray(monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(started with other|needs Ray)")
        run = hk.resume(tmp_path, steps=3, **settings, loading={"workers": "ray", "threads": 1}, progress="off")
    assert all(isinstance(a, RemoteAgent) for a in run.agents)
