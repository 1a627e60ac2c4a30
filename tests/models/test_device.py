"""Agents on a simulated device: operators refuse host tensors, and results equal those of the CPU.

All of it runs in one process of its own, which `simulated` changes for good.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = r"""
import json, sys, tempfile, warnings
from pathlib import Path
from unittest import mock

import torch

torch.set_num_threads(1)
warnings.simplefilter("ignore")
import simulated

import hacpo_kit as hk
from hacpo_kit.models.engines import transformers as engine
from hacpo_kit.runs.experience import planned
from hacpo_kit.runs.gradients import gradient_parts

mock.patch.object(engine.torch, "Generator", simulated.HostGenerator).start()
out = {}
problems = hk.load_problems("arithmetic", split="train", size=8)


def pair(device, names=("qwen3-sums", "llama-differences"), **loading):
    agents = hk.load_agents(names, device="cpu", **loading)
    for agent in agents:
        agent.model.set_attn_implementation("eager")
        if device != "cpu":
            simulated.move(agent)
    return agents


def furthest(these, those):
    return max(float((a.cpu() - b.cpu()).abs().max()) for a, b in zip(these, those, strict=True))


def weights(agents):
    return [p.detach() for a in agents for p in a.model.parameters()]


def moments(agents):
    return [value for a in agents for _, value in sorted(a.optimizer.tensors().items())]


# a step of each kind of work; the same seed, so the same answers
config = hk.Config.preset("hacpo", prompts_per_step=2, n=2, minibatch=4, beta=0.01, max_new_tokens=12, warmup=0)
here, there = pair("cpu"), pair("device")
runs = [hk.train(a, problems, config, 1, test=problems[:2], progress="off") for a in (here, there)]
last = [r.last for r in runs]
out["texts"] = [[r.text for r in step.pool] for step in last]
out["scores"] = [{n: v["avg@1"] for n, v in r.history[-1]["agents"].items()} for r in runs]
out["placed"] = {
    "weights": all(map(simulated.on_device, weights(there))),
    "reference": all(simulated.on_device(p) for a in there for p in a.reference.parameters()),
    "moments": all(simulated.on_device(a.optimizer.state[p]["exp_avg"]) for a in there for p in a.optimizer.masters),
}
out["furthest"] = {"weights": furthest(weights(here), weights(there))}
out["furthest"]["optimiser"] = furthest(moments(here), moments(there))
views = [hk.advantage(last[0].pool, team[0], last[0].capability, config) for team in (here, there)]
parts = [gradient_parts(team[0], view, config) for team, view in zip((here, there), views, strict=True)]
out["furthest"]["gradient parts"] = float((parts[0]["norm"] - parts[1]["norm"]).abs().max())
plans = [planned(last[0].pool, team[0], last[0].capability, config) for team in (here, there)]
pairs = zip(*(plan.minibatches for plan in plans), strict=True)
out["furthest"]["ratios"] = max(float(abs(a.ratio - b.ratio).max()) for a, b in pairs)

# a checkpoint of the host goes on on the device (transformers tells tied weights by their addresses, which simulated
# tensors do not have: it cannot write them)
with tempfile.TemporaryDirectory() as folder:
    hk.save(Path(folder) / "point", here, runs[0].state)
    hk.restore(Path(folder) / "point", there)
out["restored"] = {
    "weights": furthest(weights(here), weights(there)),
    "reference": furthest([*here[0].reference.parameters()], [*there[0].reference.parameters()]),
    "moments": furthest(moments(here), moments(there)),
    "placed": all(simulated.on_device(v["exp_avg"]) for v in there[0].optimizer.state.values()),
    "steps on the host": not any(simulated.on_device(v["step"]) for v in there[0].optimizer.state.values()),
}
for team, view in zip((here, there), views, strict=True):
    hk.update(team[0], view, config)
out["furthest"]["weights after another update"] = furthest(weights(here[:1]), weights(there[:1]))

# token level; then masters and checkpointing, and how often the host waits, with one micro-batch and with eight
hk.step(there[:1], problems[:1], hk.Capability(), hk.Config.preset("grpo", prompts_per_step=1, n=2, max_new_tokens=4))
agent = pair("device", ["qwen3-sums"], dtype="bfloat16", gradient_checkpointing=True)[0]
out["waits"] = []
pool = hk.rollout(agent, problems[:2], 4, max_new_tokens=8, progress=False)
pool = pool.with_rewards([float(r.sample % 2) for r in pool], ["correct"] * len(pool))
for tokens in (100_000, 1):
    one = hk.Config.preset("gspo", minibatch=8, microbatch_tokens=tokens, lr=0.0)
    batch = hk.advantage(pool, agent, hk.Capability().observe(pool), one)
    pool.updates[agent.name] = agent.updates  # with a learning rate of 0 they are still its own
    simulated.waits.clear()
    stats = hk.update(agent, batch, one)
    out["waits"].append(simulated.waits.total())
    out["half"] = [float(stats.minibatches[0].ratio.min()), float(stats.minibatches[0].ratio.max())]
out["masters"] = all(map(simulated.on_device, agent.optimizer.masters))

try:
    agent.model(torch.tensor([[1, 2]]))  # on the host
    out["mixture"] = "let pass"
except RuntimeError as error:
    out["mixture"] = "refused"
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def results():
    here = Path(__file__).resolve().parent
    code = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parents[1])!r}]\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_simulated_device_refuses_host_tensors(results):
    assert results["mixture"] == "refused"


def test_step_on_a_device_equals_the_cpu(results):
    """Compares sampling, scoring, an update with KL, evaluation and gradient parts up to rounding."""
    assert results["texts"][0] == results["texts"][1] and results["scores"][0] == results["scores"][1]
    assert all(results["placed"].values()), results["placed"]
    # operators are put together in another order there; one update moves weights by 1e-4
    assert max(results["furthest"].values()) < 1e-5, results["furthest"]


def test_checkpoint_can_be_restored_on_another_device(results):
    restored = results["restored"]
    assert restored.pop("placed") and restored.pop("steps on the host")
    assert restored == {"weights": 0, "reference": 0, "moments": 0}


def test_update_waits_for_the_device_once_per_pass(results):
    together, one_by_one = results["waits"]  # eight rollouts in one pass, and in eight
    assert together < 16 < one_by_one


def test_update_in_half_precision_works_on_a_device(results):
    assert results["masters"] and results["half"] == [1.0, 1.0]  # the first mini-batch is on policy
