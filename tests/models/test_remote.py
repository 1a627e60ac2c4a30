"""Agents in workers, with a stand-in for Ray: a worker in this process that takes the same messages; test_ray.py has Ray."""

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
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*were cut at (8|12) tokens")]
CONFIG = hk.Config.preset("hacpo", prompts_per_step=4, n=2, minibatch=8, max_new_tokens=12, warmup=0)


class Fate:
    """Counts the calls of all workers of a test; a call whose number is in `deadly` ends its worker."""

    def __init__(self):
        self.calls, self.deadly = 0, set()


class Link:
    """A worker in this process, to which requests go as bytes."""

    def __init__(self, fate):
        self.worker, self.fate, self.requests, self.replies, self.gone = Worker(), fate, [], [], False

    def send(self, method, request):
        self.requests.append(request)
        if method == "call":
            self.fate.calls += 1
            self.gone |= self.fate.calls in self.fate.deadly
        return None if self.gone else getattr(self.worker, method)(request)

    def receive(self, ticket):
        if self.gone:
            raise Disconnected("a test ended it")
        self.replies.append(ticket)
        return ticket

    def stop(self):
        self.gone = True


@pytest.fixture
def fate():
    """The calls that end a worker."""
    return Fate()


@pytest.fixture
def workers(fate):
    """workers(names, **options): agents in such workers."""

    def load(names=PAIR, **options):
        sources = [(name, {"name": name, "device": "cpu", **options}) for name in names]
        return load_in_workers(load_agent, sources, "ray", start=lambda: Link(fate))

    return load


SETTINGS = {"eval_every": 1, "progress": "off"}


@pytest.fixture(scope="module")
def calm(tmp_path_factory, problems):
    """The run folder of two steps in this process."""
    folder = tmp_path_factory.mktemp("calm")
    hk.train(hk.load_agents(PAIR, device="cpu"), problems, CONFIG, 2, out=folder, test=problems[:3], **SETTINGS)
    return folder


def instead_of_ray(monkeypatch):
    """From now on workers="ray" means workers in this process."""
    monkeypatch.setattr(ray_workers, "connect", lambda: None)
    monkeypatch.setattr(ray_workers, "gpus_per_worker", lambda ray, count, gpus: 0)
    monkeypatch.setattr(ray_workers, "RayLink", lambda threads, gpus: Link(Fate()))


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


def test_train_in_workers_is_bit_identical_to_this_process(workers, calm, tmp_path, problems):
    agents = workers()
    run = hk.train(agents, problems, CONFIG, 2, out=tmp_path, test=problems[:3], **SETTINGS)
    same_run(calm, tmp_path)
    assert all(a.updates == sum(line["agents"][a.name].get("updates", 0) for line in run.history) > 0 for a in agents)
    times = run.history[-1]
    assert times["seconds_rollout"] > 0 and times["seconds_advantage"] > 0 and times["seconds_update"] > 0


def test_verbs_take_an_agent_in_a_worker(workers, tmp_path, problems, fresh_agent):
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


def test_checkpoints_of_workers_and_of_this_process_are_the_same(workers, tmp_path, problems):
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


def test_load_agents_in_workers_numbers_equal_names(workers, monkeypatch):
    instead_of_ray(monkeypatch)
    agents = hk.load_agents([PAIR[0], PAIR[0]], workers="ray")
    assert [a.name for a in agents] == [PAIR[0], f"{PAIR[0]}#2"]
    assert [r.source for r in hk.rollout(agents, hk.load_problems("arithmetic", size=1), n=1, progress=False)] == [
        a.name for a in agents
    ]
    restart_workers(agents, lost_only=False)
    assert agents[1].name == f"{PAIR[0]}#2" and agents[1].workers == {"workers": "ray", "threads": 1, "num_gpus": 0}


def test_check_parameters_takes_workers(monkeypatch, tmp_path):
    instead_of_ray(monkeypatch)
    small = {"agents": PAIR[0], "steps": 1, "prompts_per_step": 2, "n": 2, "test_size": 2, "max_new_tokens": 12}
    parameters = check_parameters({**small, "workers": "ray", "out": str(tmp_path / "r")})
    run = parameters.run(progress="off")
    assert [type(a) for a in run.agents] == [RemoteAgent]
    # where it is computed makes no other run of it
    assert replace(parameters, out="").folder == replace(parameters, out="", workers="").folder
    with pytest.raises(ValueError, match="workers='dask'"):
        check_parameters({"workers": "dask"})


def test_train_mixes_agents_in_workers_and_in_this_process(workers, fresh_agent, problems):
    mixed = [workers([PAIR[0]])[0], fresh_agent(PAIR[1])]
    apart = [fresh_agent(name) for name in PAIR]
    one, two = (hk.train(agents, problems, CONFIG, 1, progress="off").history[-1] for agents in (mixed, apart))
    assert one["agents"] == two["agents"]


# ── what travels ─────────────────────────────────────────────────────────────────────────────────────────────────


def arrays(thing, found):
    """Collect the sizes of all tensors and arrays in containers and records."""
    if isinstance(thing, torch.Tensor | np.ndarray):
        found.append(int(np.prod(thing.shape)))
    elif isinstance(thing, dict):
        [arrays(x, found) for x in thing.values()]
    elif isinstance(thing, list | tuple | set):
        [arrays(x, found) for x in thing]
    elif hasattr(thing, "__dict__") and type(thing).__module__.startswith("hacpo_kit"):
        arrays(vars(thing), found)
    return found


def test_messages_hold_no_weights(workers, problems):
    agents = workers()
    before, links = [(a.sent, a.received) for a in agents], [agent.link for agent in agents]
    for link in links:
        link.requests, link.replies = [], []
    result = hk.step(agents, problems[:4], hk.Capability(), CONFIG)
    requests, replies = (
        [message for link in links for message in getattr(link, kind)] for kind in ("requests", "replies")
    )
    smallest = 32 * 32  # of the matrices of these models
    sizes = arrays([pickle.loads(request) for request in requests], [])
    sizes += arrays([unpack(reply, [result.pool]) for reply in replies], [])
    assert sizes and max(sizes) < smallest
    travelled = sum(a.sent + a.received - s - r for a, (s, r) in zip(agents, before, strict=True))
    assert travelled == sum(map(len, [*requests, *replies]))
    assert travelled < 60_000  # 16 rollouts; the weights of the smaller model take ten times as much
    assert result.batches[agents[0].name].pool is result.pool  # the reply refers to the pool instead of containing it


# ── warnings and errors ──────────────────────────────────────────────────────────────────────────────────────────


def test_warnings_of_a_worker_are_raised_here(workers, problems):
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


def test_errors_of_a_worker_keep_their_type_and_name_the_agent(workers, problems):
    agents = workers()
    for kind in (ValueError, FloatingPointError, KeyError):
        with pytest.raises(kind, match="no luck") as caught:
            run_on_each(agents, breaks, kind)
        assert "worker of agent 'qwen3-sums'" in caught.value.__notes__[0] and "in breaks" in caught.value.__notes__[0]
    assert [a.steps for a in agents] == [3, 3]  # the other was waited for
    with pytest.raises(ValueError, match=r"exceed the \d+ positions of agent 'qwen3-sums'"):
        hk.rollout(agents, problems[:1], n=1, max_new_tokens=10**6)


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError


def test_errors_that_cannot_be_pickled_become_text(workers):
    with pytest.raises(RuntimeError, match="Unpicklable: no luck"):
        run_on_each(workers(PAIR[:1]), breaks, Unpicklable)


def test_remote_agent_names_the_worker_when_the_model_is_needed(workers, problems):
    agent = workers([PAIR[0]])[0]
    pool = hk.reward(hk.rollout(agent, problems[:2], n=2, max_new_tokens=8, progress=False))
    batch = hk.advantage(pool, agent, hk.Capability().observe(pool), CONFIG)
    with pytest.raises(AttributeError, match=r"agent 'qwen3-sums' has no .model in this process"):
        agent.model  # noqa: B018
    with pytest.raises((AttributeError, RuntimeError), match="its model is in a worker"):
        gradient_parts(agent, batch, CONFIG)
    with pytest.raises(ValueError, match="before= cannot reach"):
        hk.update(agent, batch, CONFIG, before=print)


def test_load_agents_in_workers_raises_the_errors_of_loading(workers, fresh_agent, monkeypatch, tmp_path):
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


def test_gpus_per_worker_refuses_more_than_the_cluster_has():
    class Cluster:
        def cluster_resources():
            return {"GPU": 1.0}

    with pytest.raises(ValueError, match=r"2 agents need 1 GPUs each, but the cluster has 1: use num_gpus=0.5"):
        ray_workers.gpus_per_worker(Cluster, 2, None)
    assert ray_workers.gpus_per_worker(Cluster, 2, 0.5) == 0.5 and ray_workers.gpus_per_worker(Cluster, 1, None) == 1


# ── lost workers ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("call", range(1, 11))
def test_train_replaces_a_lost_worker_and_ends_the_same(workers, fate, calm, tmp_path, problems, call):
    agents = workers()
    hk.train(agents, problems, CONFIG, 1, out=tmp_path, test=problems[:3], **SETTINGS)
    fate.deadly = {fate.calls + call}
    with pytest.warns(UserWarning, match=r"lost the worker of agent '.*' \(a test ended it\).*resumes after step 1"):
        run = hk.train(agents, problems, CONFIG, 2, out=tmp_path, test=problems[:3], **SETTINGS)
    assert not run.stopped and not any(a.lost for a in agents)
    same_run(calm, tmp_path)


def test_train_without_a_checkpoint_restarts_all_agents(workers, calm, tmp_path, problems):
    agents, made = workers(), []

    def after(result):
        made.append(result.metrics["step"])
        if made == [1]:
            agents[0].link.stop()

    with pytest.warns(UserWarning, match="resumes after step 0"):
        hk.train(agents, problems, CONFIG, 2, out=tmp_path, test=problems[:3], callbacks=[after], **SETTINGS)
    assert made == [1, 1, 2]
    same_run(calm, tmp_path)


def test_train_keeps_changes_when_a_worker_is_lost(workers, fate, tmp_path, problems):
    agents, fate.deadly = workers(), {3}
    with pytest.warns(UserWarning, match="lost the worker"):
        run = hk.train(agents, problems, CONFIG, 1, out=tmp_path, changes={"lr": 3e-5}, progress="off")
    assert run.config.lr == 3e-5 and run.history[-1]["agents"][PAIR[0]]["lr"] == 3e-5
    assert len((tmp_path / "changes.jsonl").read_text().splitlines()) == 1


def test_train_without_a_folder_names_the_lost_worker_and_the_remedy(workers, fate, problems):
    agents, fate.deadly = workers(), {3}
    with pytest.raises(
        WorkerLost, match=r"the worker of agent 'qwen3-sums' has ended \(a test ended it\).*train with out="
    ):
        hk.train(agents, problems, CONFIG, 1, progress="off")


def test_train_ends_after_three_lost_workers_in_a_step_and_can_resume(workers, fate, calm, tmp_path, problems):
    agents, fate.deadly = workers(), set(range(3, 100))
    settings = {"out": tmp_path, "test": problems[:3], **SETTINGS}
    with (
        pytest.warns(UserWarning, match="lost the worker"),
        pytest.raises(WorkerLost, match=r"lost 3 times in step 1"),
    ):
        hk.train(agents, problems, CONFIG, 2, **settings)
    fate.deadly = set()
    hk.train(workers(), problems, CONFIG, 2, **settings)
    same_run(calm, tmp_path)


def test_resume_moves_agents_between_workers_and_this_process(workers, calm, tmp_path, monkeypatch, problems):
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
