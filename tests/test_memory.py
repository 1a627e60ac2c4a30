"""Running out of memory: what is said, what is left, how to go on."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import hacpo_kit as hk
from hacpo_kit.cli import main
from hacpo_kit.saving import State

CONFIG = hk.Config.preset("gspo", n=4, minibatch=8, prompts_per_step=4, max_new_tokens=16, lr=1e-3, warmup=0)


@pytest.fixture
def scored(qwen, problems):
    """An agent, its batch of 16 rollouts, and a config with two mini-batches of several passes each."""
    pool = hk.reward(hk.rollout(qwen, problems[:4], n=4, max_new_tokens=16, progress=False))
    pool = pool.with_rewards([float(i % 2) for i in range(len(pool))], ["correct"] * len(pool))
    config = CONFIG.replace(microbatch_tokens=64)
    return qwen, hk.advantage(pool, qwen, hk.Capability().observe(pool), config), config


@pytest.fixture
def fail(monkeypatch):
    """fail(agent, k): the k-th pass of the model finds no memory; with `learning` only passes with gradients count."""

    def at(agent, k, error=None, learning=False):
        passes, run = [], agent.model.forward
        reason = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")

        def forward(*args, **kwargs):
            if learning and not torch.is_grad_enabled():
                return run(*args, **kwargs)
            passes.append(torch.zeros(1000))
            kept = passes[-1]
            if len(passes) == k:
                passes[-1] = weakref.ref(kept)
                raise reason
            return run(*args, **kwargs)

        monkeypatch.setattr(agent.model, "forward", forward)
        return passes

    return at


def weights(agent):
    return {k: v.clone() for k, v in agent.model.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


def test_an_update_without_memory_names_all_and_leaves_the_mini_batch_undone(scored, fail):
    agent, batch, config = scored
    before, seen = [], []

    def look(m, part):
        before.append(weights(agent))
        if m == 1:
            seen.append(fail(agent, 2))

    said = (
        r"agent 'qwen3-sums' ran out of memory on cpu, mini-batch 1: the gradient of \d rollouts, \d+ padded tokens; the "
        r"weights are as before this mini-batch \(CUDA out of memory. Tried to allocate 2.00 GiB.\); set microbatch_tokens=32 "
        r"\(now 64\), load the agent with gradient_checkpointing=True, or with offload=True.*hk\.resume\(folder, changes="
    )
    with pytest.raises(MemoryError, match=said) as caught:
        hk.update(agent, batch, config, before=look)
    assert agent.updates == 1 and not same(before[0], before[1]) and same(before[1], weights(agent))
    assert all(p.grad is None for p in agent.model.parameters())
    gc.collect()
    assert seen[0][1]() is None and caught.value is not None  # the error, while it lives, holds nothing of the pass


def test_a_pass_of_one_rollout_gets_another_advice(scored, fail):
    agent, batch, config = scored
    fail(agent, 1)
    with pytest.raises(MemoryError, match=r"of 1 rollout, .*a single rollout, so that only a smaller max_new_tokens"):
        hk.update(agent, batch, config.replace(microbatch_tokens=1))


def test_the_optimisers_step_without_memory_says_that_weights_may_have_moved(scored, monkeypatch):
    agent, batch, config = scored

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.optim.AdamW, "step", full)
    with pytest.raises(MemoryError, match=r"mini-batch 0: the optimiser's step, which may have moved.*lora=True"):
        hk.update(agent, batch, config)


def test_other_errors_stay_what_they_are(scored, fail):
    agent, batch, config = scored
    fail(agent, 1, RuntimeError("CUDA error: device-side assert triggered"))
    with pytest.raises(RuntimeError, match="device-side assert"):
        hk.update(agent, batch, config)


def test_a_cpu_without_memory_is_told_alike(qwen, problems, fail):
    fail(
        qwen, 1, RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 9 bytes")
    )
    with pytest.raises(MemoryError, match=r"sampling 8 answers at once \(.*9 bytes\); sample fewer: rollout_batch=4"):
        hk.rollout(qwen, problems[:2], n=4, progress=False)


def test_sampling_and_scoring_name_their_own_remedies(qwen, problems, fail, monkeypatch):
    fail(qwen, 3)
    with pytest.raises(MemoryError, match=r"sampling 8 answers at once .*rollout_batch=4 \(batch_size where no Config"):
        hk.rollout(qwen, problems[:2], n=4, progress=False)
    monkeypatch.undo()
    fail(qwen, 1)
    with pytest.raises(MemoryError, match=r"sampling 1 answers? at once .*give a smaller max_new_tokens"):
        hk.evaluate(qwen, problems[:2], batch_size=1, progress=False)
    monkeypatch.undo()
    pool = hk.rollout(qwen, problems[:2], n=4, progress=False)
    fail(qwen, 1)
    with pytest.raises(
        MemoryError, match=r"scoring 8 rollouts, \d+ padded tokens .*set microbatch_tokens=500 \(now 1000\)"
    ):
        hk.rollouts.score(qwen, list(pool), temperature=1.0, tokens=1000)


@pytest.mark.parametrize("setting", ["microbatch_tokens", "rollout_batch"])
def test_a_run_goes_on_with_the_advised_setting_and_ends_right(
    fresh_agent, problems, tmp_path, fail, monkeypatch, setting
):
    whole = [fresh_agent("qwen3-sums")]
    hk.train(whole, problems, CONFIG, 3, save_every=1, out=tmp_path / "whole", progress="off")
    agents, calls, step = [fresh_agent("qwen3-sums")], [], hk.training.step

    def third(*args, **kwargs):
        calls.append(0)
        if len(calls) == 3:
            fail(agents[0], 2, learning=setting == "microbatch_tokens")  # in the second mini-batch, or while sampling
        return step(*args, **kwargs)

    monkeypatch.setattr(hk.training, "step", third)
    with pytest.raises(MemoryError, match=f"{setting}="):
        hk.train(agents, problems, CONFIG, 3, save_every=1, out=tmp_path / "run", progress="off")
    monkeypatch.undo()
    value = {"microbatch_tokens": 64, "rollout_batch": 8}[setting]
    run = hk.resume(
        tmp_path / "run",
        problems=problems,
        agents=[fresh_agent("qwen3-sums")],
        changes={setting: value},
        progress="off",
    )
    assert run.state.step == 3 and run.config.differences(CONFIG) == {setting: (value, getattr(CONFIG, setting))}
    for (name, mine), theirs in zip(
        whole[0].model.state_dict().items(), run.agents[0].model.state_dict().values(), strict=True
    ):
        if setting == "microbatch_tokens":  # other sums, same result; the other one draws other answers
            torch.testing.assert_close(theirs, mine, rtol=0, atol=2e-3, msg=name)


def test_resume_on_the_command_line_takes_the_advised_setting(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "hacpo_kit.training.resume", lambda folder, **how: asked.update(how) or SimpleNamespace(state=State(3))
    )
    call = lambda *more: CliRunner().invoke(main, ["resume", str(tmp_path), *more])  # noqa: E731
    assert "3 steps done" in call("-p", "microbatch_tokens", "4096", "-p", "lr", "1e-6").output
    assert asked == {"steps": None, "changes": {"microbatch_tokens": 4096, "lr": 1e-6}}
    wrong = call("-p", "microbatch_token", "4096")
    assert wrong.exit_code == 2 and "did you mean 'microbatch_tokens'" in wrong.output

    def full(*_, **__):
        raise MemoryError("agent 'a' ran out of memory on cuda:0")

    monkeypatch.setattr("hacpo_kit.training.resume", full)
    assert (told := call()).exit_code == 2 and told.output == "hacpo-kit: agent 'a' ran out of memory on cuda:0\n"
