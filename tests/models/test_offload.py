"""Offload: each phase moves the parts that it needs to the device, and results stay the same."""

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import hacpo_kit as hk
from hacpo_kit.models import offload
from hacpo_kit.models.engines.base import Answer
from hacpo_kit.models.offload import Offload

CONFIG = hk.Config(n=4, minibatch=8, prompts_per_step=2, max_new_tokens=16, lr=1e-3, warmup=0, delta=1, delta_step=0)


class PretendedDevice:
    """A device in host memory: tensors that arrive are copied and recorded, those that leave are filled with NaN."""

    def __init__(self, monkeypatch):
        self.here, self.left = {}, []  # both keep their tensors, so that no address is used twice
        monkeypatch.setattr(offload, "to_device", self.bring)
        monkeypatch.setattr(offload, "to_host", self.send)

    def holds(self, tensor):
        return tensor.data_ptr() in self.here

    def bring(self, tensor, device):
        if self.holds(tensor):
            return tensor
        copy = tensor.detach().clone()
        self.here[copy.data_ptr()] = copy
        return copy

    def send(self, tensor):
        if not self.holds(tensor):
            return tensor
        copy, old = tensor.detach().clone(), self.here.pop(tensor.data_ptr())
        self.left.append(old.fill_(float("nan") if old.is_floating_point() else 0))
        return copy

    def bytes(self):
        return sum(t.nbytes for t in self.here.values())


@pytest.fixture
def device(monkeypatch):
    return PretendedDevice(monkeypatch)


@pytest.fixture
def offloaded(fresh_agent):
    def make(name, dtype="float32"):
        agent = fresh_agent(name)
        agent.model.to(getattr(torch, dtype))
        agent.offload = Offload("cpu")
        return agent

    return make


def steps(agents, problems, config, count=2, moves=False):
    """Return the metrics of some steps, with or without those of transfers."""
    capability, lines = hk.Capability(), []
    for k in range(count):
        result = hk.step(agents, problems[2 * k : 2 * k + 2], capability, config)
        capability = result.capability
        lines += [
            {n: v for n, v in line.items() if moves or "mov" not in n} for line in result.metrics["agents"].values()
        ]
    return lines


def state(agent):
    return {**agent.model.state_dict(), **agent.optimizer.tensors()}


@pytest.mark.parametrize(("dtype", "beta"), [("float32", 0.0), ("bfloat16", 0.01)])
def test_train_with_offload_is_bit_identical(device, offloaded, fresh_agent, problems, dtype, beta):
    config, names = CONFIG.replace(beta=beta), ["qwen3-sums", "llama-differences"]
    plain = [fresh_agent(n) for n in names]
    for agent in plain:
        agent.model.to(getattr(torch, dtype))
    expected = steps(plain, problems, config)
    moved = [offloaded(n, dtype) for n in names]
    got = steps(moved, problems, config)
    assert got == expected
    for a, b in zip(plain, moved, strict=True):
        before, after = state(a), state(b)
        assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
        assert b.updates == 4 and (b.reference is None) == (beta == 0)
    assert device.bytes() == 0 and len(device.left) > 100  # everything went home


def test_on_device_holds_only_the_parts_of_the_phase(device, offloaded, problems, monkeypatch):
    agents = [offloaded(n, "bfloat16") for n in ("qwen3-sums", "llama-differences")]
    most = {}

    def look(module, _):
        for p in module.parameters(recurse=False):
            assert device.holds(p)
        if hasattr(module, "lm_head"):
            most["forward"] = max(most.get("forward", 0), device.bytes())

    step = torch.optim.AdamW.step

    def looking(optimizer, *args):
        late = any(slots["step"] >= 2 for slots in optimizer.state.values())  # in the first step they are made there
        for t in [*optimizer.masters, *(s["exp_avg"] for s in optimizer.state.values())] if late else []:
            assert device.holds(t)
        most["step"] = max(most.get("step", 0), device.bytes())
        return step(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", looking)
    handle = register_module_forward_pre_hook(look)
    try:
        steps(agents, problems, CONFIG)
        biggest = {part: max(offload.size(a, part) for a in agents) for part in ("weights", "optimizer")}
        # one agent at a time, and its optimiser only while it is updated (its gradients are not counted as moved)
        assert most == {"forward": sum(biggest.values()), "step": sum(biggest.values())}
        most.clear()
        hk.evaluate(agents, problems[:4], progress=False)
        assert most == {"forward": biggest["weights"]}
    finally:
        handle.remove()
    assert device.bytes() == 0


def test_resume_with_offload_is_bit_identical(device, offloaded, fresh_agent, problems, tmp_path):
    ends = []
    for make in (fresh_agent, offloaded):
        for stops in ([3], [2, 3]):
            for stop in stops:
                agents = [make("qwen3-sums")]
                hk.train(
                    agents,
                    problems,
                    CONFIG.replace(beta=0.01),
                    stop,
                    out=tmp_path / f"{make}{len(stops)}",
                    progress="off",
                )
            ends.append({**state(agents[0]), **{f"ref.{k}": v for k, v in agents[0].reference.state_dict().items()}})
    assert all(torch.equal(ends[0][k], end[k]) for end in ends[1:] for k in ends[0])
    assert device.bytes() == 0


def test_on_device_blocks_can_be_nested_and_release_after_an_error(device, offloaded):
    agent = offloaded("qwen3-sums")
    agent.prepare_update(CONFIG)
    weights = agent.model.lm_head.weight
    with agent.on_device("weights"):
        assert device.holds(weights) and agent.logprobs([[1]], [[2]])[0].isfinite().all()
        with agent.on_device("weights", "optimizer"):
            assert device.holds(weights)
        assert device.holds(weights)
    assert not device.holds(weights) and weights.isfinite().all()
    with pytest.raises(KeyError), agent.on_device("weights"), agent.on_device("optimizer"):
        raise KeyError
    assert device.bytes() == 0 and not any(agent.offload.users.values())


def test_on_device_releases_everything_after_running_out_of_memory(device, offloaded, monkeypatch):
    agent = offloaded("qwen3-sums")
    count = len(list(agent.model.parameters()))

    def full(tensor, where):
        if len(device.here) == count // 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return device.bring(tensor, where)

    monkeypatch.setattr(offload, "to_device", full)
    with (
        pytest.raises(MemoryError, match="agent 'qwen3-sums' ran out of memory on cpu, moving its weights"),
        agent.on_device("weights"),
    ):
        pass
    assert device.bytes() == 0 and not any(agent.offload.users.values())
    assert all(p.isfinite().all() for p in agent.model.parameters())


def test_logprobs_refuses_weights_in_host_memory(device, offloaded):
    agent = offloaded("qwen3-sums")
    with pytest.raises(
        RuntimeError, match=r"weights of agent 'qwen3-sums' are in host memory: use `with agent\.on_device"
    ):
        agent.logprobs([[1]], [[2]])


def test_on_device_lets_an_engine_with_its_own_weights_sleep(device, offloaded, problems):
    class Engine:
        def __init__(self, agent):
            self.agent, self.asleep, self.slept = agent, True, 0

        def sample(self, agent, prompts, **settings):
            assert device.bytes() == 0  # it has a copy of its own
            self.asleep = False
            return [Answer((5, next(iter(agent.end_ids))), True) for _ in prompts]

        def sleep(self):
            self.asleep, self.slept = True, self.slept + 1

    agents = [offloaded(n) for n in ("qwen3-sums", "llama-differences")]
    for agent in agents:
        agent.engine = Engine(agent)
        score = agent.logprobs
        agent.logprobs = lambda *a, score=score, **k: [None for x in agents if not x.engine.asleep] or score(*a, **k)
    pool = hk.rollout(agents, problems[:2], n=2, progress=False)
    assert len(pool) == 8 and all(a.engine.asleep and a.engine.slept == 1 for a in agents)


def test_transfer_costs_count_bytes_and_seconds(device, offloaded, problems):
    agent = offloaded("qwen3-sums")
    weights = offload.size(agent, "weights")
    hk.rollout(agent, problems[:2], n=1, progress=False)
    moved = agent.transfer_costs()
    assert moved["bytes_moved"] == 4 * weights and moved["seconds_moving"] > 0  # to sampling, to scoring, and back
    assert agent.transfer_costs() == {"bytes_moved": 0, "seconds_moving": 0.0}
    first, second = steps([agent], problems, CONFIG, 2, moves=True)
    # the first step makes the moments (on the pretended device they are then at home already); then they come, too
    assert first["bytes_moved"] == 6 * weights
    assert second["bytes_moved"] == 6 * weights + 2 * offload.size(agent, "optimizer")


def test_load_agent_with_offload_keeps_weights_on_the_host_and_is_recorded(problems, tmp_path):
    agent = hk.load_agent("qwen3-sums", device="cpu", offload=True)
    assert agent.offload is not None and agent.loading["offload"] is True
    hk.train(agent, problems, CONFIG, 1, out=tmp_path / "run", progress="off")
    again = hk.resume(tmp_path / "run", steps=2, progress="off")
    assert again.agents[0].offload is not None
