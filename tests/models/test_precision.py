"""Half precision: float32 masters keep small steps, and own ratios are 1 before any update."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hacpo_kit as hk
from hacpo_kit.models.optimizers import MasterAdamW


@pytest.fixture
def halved(fresh_agent):
    """halved("qwen3-sums"): a built-in agent that computes in bfloat16."""

    def make(name="qwen3-sums"):
        agent = fresh_agent(name)
        agent.model.to(torch.bfloat16)
        return agent

    return make


def batch_of(agents, problems, config, n=4, new=24, off=0.0):
    """The first agent's batch, with rewards that differ within every problem and recorded log-probs that are `off`."""
    pool = hk.rollout(agents, problems, n=n, max_new_tokens=new, progress=False)
    pool = dataclasses.replace(pool, rollouts=tuple(dataclasses.replace(r, logps=r.logps + off) for r in pool))
    pool = pool.with_rewards([float(i % 2) for i in range(len(pool))], ["correct"] * len(pool))
    return hk.advantage(pool, agents[0], hk.Capability().observe(pool), config)


def weights(agent):
    return {k: v.detach().clone() for k, v in agent.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ── masters ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_master_adamw_keeps_small_steps_that_half_precision_rounds_away():
    """Around 0.05, bfloat16 numbers are 2.4e-4 apart: a step of 1e-6 is rounded away, but the sum of 40 steps is not."""
    start = torch.full((64,), 0.05, dtype=torch.bfloat16)
    ours, plain = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizer, other = (
        MasterAdamW([ours], lr=1e-6, weight_decay=0.0),
        torch.optim.AdamW([plain], lr=1e-6, weight_decay=0.0),
    )
    for k in range(1, 201):
        ours.grad, plain.grad = torch.ones_like(ours), torch.ones_like(plain)
        optimizer.collect()
        optimizer.step()
        optimizer.zero_grad()
        other.step()
        assert start[0].item() - optimizer.masters[0][0].item() == pytest.approx(k * 1e-6, rel=0.02)
    assert torch.equal(plain, start)  # 200 steps, and nothing has moved
    assert (ours < start).all() and torch.equal(ours, optimizer.masters[0].to(torch.bfloat16))


def test_update_in_half_precision_changes_weights_at_the_papers_rate(halved, problems):
    agent = halved()
    config = hk.Config.preset("gspo", lr=1e-6, warmup=0, n=4, minibatch=4, max_grad_norm=float("inf"))
    before = weights(agent)
    hk.update(agent, batch_of([agent], problems[:8], config), config)
    count = agent.updates
    assert count == 8
    moved = torch.cat([(m - before_).abs().flatten() for m, before_ in _with_start(agent, before)])
    # AdamW moves a weight by at most about lr an update
    assert 1e-6 < moved.max() < 3 * count * 1e-6 and (moved > 0).float().mean() > 0.9
    masters = [m.to(torch.bfloat16) for m in agent.optimizer.masters]
    assert all(torch.equal(p, m) for p, m in zip(agent.optimizer.parameters, masters, strict=True))


def _with_start(agent, before):
    named = {id(p): n for n, p in agent.model.named_parameters()}
    return [
        (m.detach(), before[named[id(p)]].float())
        for p, m in zip(agent.optimizer.parameters, agent.optimizer.masters, strict=True)
    ]


def test_master_adamw_equals_adamw_in_float32(tiny_agent):
    agent, twin = tiny_agent(), tiny_agent()
    optimizer = agent.prepare_update(hk.Config())
    assert all(m is p for m, p in zip(optimizer.masters, agent.model.parameters(), strict=True))
    group = optimizer.param_groups[0]
    settings = {k: group[k] for k in ("lr", "betas", "eps", "weight_decay")}
    plain = torch.optim.AdamW(twin.model.parameters(), **settings)
    for _ in range(3):
        for p, q in zip(agent.model.parameters(), twin.model.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
            q.grad = p.grad.clone()
        optimizer.collect()
        optimizer.step()
        plain.step()
    assert same(weights(agent), weights(twin))


def test_master_adamw_of_a_copied_agent_has_its_own_masters(halved, problems):
    agent = halved()
    config = hk.Config.preset("gspo", lr=1e-4, warmup=0, n=4, minibatch=8)
    batch = batch_of([agent], problems[:4], config)
    hk.update(agent, batch, config)
    twin = copy.deepcopy(agent)
    left = [m.clone() for m in agent.optimizer.masters]
    assert [id(p) for p in twin.optimizer.parameters] == [id(p) for p in twin.model.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) and a is not b for a, b in zip(left, twin.optimizer.masters, strict=True))
    hk.update(twin, batch, config)
    assert all(torch.equal(a, b) for a, b in zip(left, agent.optimizer.masters, strict=True))
    hk.update(agent, batch, config)  # from one state the same step
    assert same(weights(agent), weights(twin))


def test_resume_in_half_precision_is_bit_identical(halved, problems, tmp_path):
    config = hk.Config(lr=1e-5, warmup=0, n=2, minibatch=8, prompts_per_step=4, max_new_tokens=12)
    ends = []
    for stops in ([2], [1, 2]):
        for stop in stops:
            agents = [halved("qwen3-sums"), halved("llama-differences")]
            hk.train(agents, problems, config, stop, out=tmp_path / str(len(stops)), save_every=1, progress="off")
        ends.append([{**weights(a), **a.optimizer.tensors()} for a in agents])
    assert all(same(a, b) for a, b in zip(*ends, strict=True))
    assert any(".master" in key for key in ends[0][0])


def test_load_tensors_refuses_a_checkpoint_without_masters(halved, problems):
    agent = halved()
    config = hk.Config.preset("gspo", lr=1e-4, warmup=0, n=4, minibatch=8)
    hk.update(agent, batch_of([agent], problems[:2], config), config)
    stored = {k: v for k, v in agent.optimizer.tensors().items() if not k.endswith(".master")}
    with pytest.raises(KeyError, match="master"):
        MasterAdamW(agent.model.parameters()).load_tensors(stored)


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────


def gradient(agent, batch, config, monkeypatch):
    """Return the gradient of one mini-batch that the optimiser receives."""
    gradients = {}
    with monkeypatch.context() as patched:
        patched.setattr(
            torch.optim.AdamW, "step", lambda o: gradients.setdefault("g", [m.grad.clone() for m in o.masters])
        )
        hk.update(agent, batch, config)
    agent.updates = agent.steps = 0
    return torch.cat([g.flatten().double() for g in gradients["g"]])


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-11), ("float32", 1e-4), ("bfloat16", 0.05)])
def test_update_gradient_does_not_depend_on_the_size_of_passes(fresh_agent, problems, monkeypatch, dtype, bound):
    agent, other = fresh_agent("qwen3-sums"), fresh_agent("llama-differences")
    config = hk.Config(minibatch=64, max_grad_norm=float("inf"), eps_low=1.0, eps_high=1.0, delta=1.0)
    batch = batch_of([agent, other], problems[:4], config)
    agent.model.to(getattr(torch, dtype))
    whole = gradient(agent, batch, config, monkeypatch)
    parts = gradient(agent, batch, config.replace(microbatch_tokens=60), monkeypatch)
    assert whole.norm() > 1e-4
    assert (parts - whole).norm() / whole.norm() < bound


def test_master_adamw_adds_gradients_in_float32(halved, monkeypatch):
    """1 + 2⁻⁹ + 2⁻⁹ + … stays 1 in bfloat16."""
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([p], lr=0.0)
    for value in (1.0, *[2.0**-9] * 256):
        (p * value).sum().backward()
        optimizer.collect()
        assert p.grad is None
    assert torch.equal(optimizer.masters[0].grad, torch.full((4,), 1.5))


# ── the ratio ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def rounding(tokenizers):
    """An agent in bfloat16 whose log-probabilities change with the shape of a pass by more than the own clip allows."""
    tokenizer = tokenizers.bytes()
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        about = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.1}
        model = LlamaForCausalLM(LlamaConfig(**size, **about))
    return hk.Agent(model.to(torch.bfloat16), tokenizer, name="rounding")


@pytest.mark.parametrize("tokens", [16384, 100], ids=["large passes", "small passes"])
def test_update_in_half_precision_has_own_ratios_of_exactly_one(rounding, llama, uneven, tokens):
    """With lr = 0 the weights stay, so a ratio other than 1 is the rounding of a pass of another shape.

    How much passes differ depends on the processor; the recorded values are moved a little, so that they do on any.
    """
    config = hk.Config(lr=0.0, minibatch=6, microbatch_tokens=tokens)
    batch = batch_of([rounding, llama], uneven, config, off=0.001)
    stats = hk.update(rounding, batch, config)
    assert len(stats.minibatches) > 3
    own = np.concatenate([mb.ratio[mb.own] for mb in stats.minibatches])
    assert len(own) == 12 and (own == 1).all()
    assert not any(mb.clipped[mb.own].any() for mb in stats.minibatches)
    # the rollouts seem to be older than the weights: now the recorded values count
    stats = hk.update(rounding, batch, config)
    recorded = np.concatenate([mb.ratio[mb.own] for mb in stats.minibatches])
    assert np.abs(recorded - 1).max() > config.eps_high and any(mb.clipped[mb.own].any() for mb in stats.minibatches)


# ── gradient checkpointing ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("absolute", [False, True], ids=["llama", "gpt2 with dropout"])
def test_gradient_checkpointing_gives_the_same_gradient_without_dropout(tiny_agent, problems, monkeypatch, absolute):
    found = {}
    for checkpointing in (False, True):
        agent = tiny_agent(absolute=absolute)
        if absolute:
            assert agent.model.config.resid_pdrop == 0.1  # GPT-2's default, which must not act
        if checkpointing:
            agent.model.gradient_checkpointing_enable({"use_reentrant": False})
        layers = agent.model.transformer.h if absolute else agent.model.model.layers
        calls = []
        for layer in layers:
            layer.mlp.register_forward_pre_hook(
                lambda *_, calls=calls: calls.append(0)
            )  # not behind it: recomputing may end inside
        config = hk.Config.preset("gspo", minibatch=64, max_grad_norm=float("inf"), eps_low=1.0, eps_high=1.0)
        batch = batch_of([agent], problems[:2], config, new=6)
        del calls[:]
        found[checkpointing] = (gradient(agent, batch, config, monkeypatch), len(calls))
        assert not any(module.training for module in agent.model.modules())
    assert found[True][1] == 2 * found[False][1] == 2 * len(layers)
    torch.testing.assert_close(found[True][0], found[False][0], rtol=1e-5, atol=1e-9)
