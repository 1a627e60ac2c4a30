"""gradient_parts(): parts that add up to the update's own gradient, finite differences, and that it only looks."""

import math

import pytest
import torch

import hacpo_kit as hk
from hacpo_kit.runs.gradients import cosine, gradient_parts, part_gradients
from hacpo_kit.updates import objective_of

METHODS = ["hacpo", "naive", "gspo", "grpo", "no_clip"]


@pytest.fixture
def scored(pair, problems):
    """Two agents, a scored pool of theirs, and the capability after it."""
    pool = hk.reward(hk.rollout(pair, problems[:8], n=4, progress=False))
    return pair, pool, hk.Capability().observe(pool)


def gradient_of_update(agent, batch, config, monkeypatch):
    """The gradient of the loss, where the optimiser would use it; the weights stay."""
    seen = {}

    def look(optimizer):
        seen["g"] = torch.cat([p.grad.flatten() for g in optimizer.param_groups for p in g["params"]])

    monkeypatch.setattr(torch.optim.AdamW, "step", look)
    hk.update(agent, batch, config.replace(minibatch=4096, max_grad_norm=float("inf")))
    return seen["g"]


@pytest.mark.parametrize("method", METHODS)
def test_gradient_parts_add_up_to_the_gradient_of_the_update(scored, monkeypatch, method):
    agents, pool, capability = scored
    config = hk.Config.preset(method, microbatch_tokens=400)
    batch = hk.advantage(pool, agents[0], capability, config)
    tables = [gradient_parts(agents[0], batch, config, by=by) for by in ("source", "sign")]
    parts = part_gradients(agents[0], batch, config, batch.own.tolist())
    whole = -gradient_of_update(agents[0], batch, config, monkeypatch)
    torch.testing.assert_close(sum(p.gradient for p in parts.values()), whole, rtol=1e-3, atol=1e-6)
    for table in tables:
        assert table.attrs["norm"] == pytest.approx(float(whole.norm()), rel=1e-4) and whole.norm() > 1e-3
        assert table["share"].sum() == pytest.approx(1, abs=1e-5)
        assert table["rollouts"].sum() == len(batch)
    source = tables[0]
    assert list(source.index) == ["own"] + [agents[1].name] * (config.share != "none")
    assert source.loc["own", "cosine_own"] == pytest.approx(1, abs=1e-5)
    assert tables[1]["clipped"].groupby("part").sum().to_dict() == source["clipped"].to_dict()
    for (part, sign), row in tables[1].iterrows():
        mine = batch.own if part == "own" else ~batch.own
        signs = {"+": batch.advantages > 0, "-": batch.advantages < 0, "0": batch.advantages == 0}
        assert row["rollouts"] == int((mine & signs[sign]).sum())


def test_gradient_parts_of_own_rollouts_are_one_row_with_the_whole_gradient(scored):
    agents, pool, capability = scored
    alone = pool.restricted_to(agents[0].name)
    batch = hk.advantage(alone, agents[0], capability, hk.Config())
    table = gradient_parts(agents[0], batch, hk.Config())
    assert list(table.index) == ["own"] and table.loc["own", "clipped"] == 0  # on policy nothing is clipped
    row = table.loc["own"]
    assert row["norm"] == pytest.approx(table.attrs["norm"], rel=1e-6)
    assert [row[c] for c in ("cosine_own", "cosine_total", "share")] == pytest.approx([1, 1, 1], abs=1e-5)


def test_part_gradients_equal_finite_differences(tiny_agent, say, problems):
    """Float64, along the part's own direction and a random one; m > 0, so that the band has moved."""
    agents = [tiny_agent(name="A", absolute=True), tiny_agent(name="B", seed=1, absolute=True)]  # float64 throughout
    for agent in agents:
        agent.model.double()
        say(agent, ["7", "12 = 12", "?", "a sum", "no", "0.5"])
    config = hk.Config(alpha=2.0, delta=0.9, delta_step=0.02)
    pool = hk.rollout(agents, problems[:2], n=3, max_new_tokens=16, progress=False)
    pool = pool.with_rewards([float(i % 3 == 0) for i in range(len(pool))], ["correct"] * len(pool))
    batch = hk.advantage(pool, agents[0], hk.Capability().observe(pool), config)
    parts = part_gradients(agents[0], batch, config, batch.own.tolist(), updates_made=2)
    weights = list(agents[0].model.parameters())
    start = torch.nn.utils.parameters_to_vector(weights).detach().clone()
    g = torch.Generator().manual_seed(0)

    def objective(mine, at):
        torch.nn.utils.vector_to_parameters(at, weights)
        rows = [i for i, own in enumerate(batch.own.tolist()) if own == mine]
        with torch.no_grad():
            value = c = objective_of(agents[0], batch, rows, 2, config)[0]
        if not mine:  # c·sg[c]^α has the value c^(1+α); its gradient is that of the value over 1 + α
            s = objective_of(agents[0], batch, rows, 2, config)[1].detach().clamp(0.1 + 0.04, 1.0)
            value = c / s**config.alpha * frozen
        torch.nn.utils.vector_to_parameters(start, weights)
        return float(value.sum()) / len(batch)

    peer = [i for i, own in enumerate(batch.own.tolist()) if not own]
    s0 = objective_of(agents[0], batch, peer, 2, config)[1].detach().clamp(0.14, 1.0)
    frozen = s0**config.alpha  # the stopped factor keeps its value while the weights move
    assert 0 < parts[False].clipped < len(peer)  # rollouts on both sides of the clip
    for mine, part in parts.items():
        for direction in (part.gradient, torch.randn(len(start), generator=g, dtype=torch.float64)):
            unit = direction / direction.norm()
            # own rollouts are on policy, where min() has a kink in neither direction for |s − 1| < ε
            numeric = (objective(mine, start + 1e-6 * unit) - objective(mine, start - 1e-6 * unit)) / 2e-6
            assert numeric == pytest.approx(float(part.gradient @ unit), rel=1e-5, abs=1e-9)
            assert part.gradient.norm() > 1e-4


def test_gradient_parts_changes_neither_agent_nor_random_state(scored):
    agents, pool, capability = scored
    agent, config = agents[0], hk.Config(minibatch=16)
    batch = hk.advantage(pool, agent, capability, config)
    hk.update(agent, batch, config)  # so that the optimiser has moments
    for p in agent.model.parameters():
        p.grad = torch.ones_like(p)
    before = {k: v.clone() for k, v in agent.model.state_dict().items()}
    moments = {
        (i, k): torch.as_tensor(v).clone() for i, s in enumerate(agent.optimizer.state.values()) for k, v in s.items()
    }
    state, counts = torch.get_rng_state(), (agent.updates, agent.steps)
    with torch.no_grad():  # wherever it is called from
        gradient_parts(agent, batch, config, by="sign", updates_made=3)
    assert torch.equal(state, torch.get_rng_state()) and counts == (agent.updates, agent.steps)
    assert all(torch.equal(v, before[k]) for k, v in agent.model.state_dict().items())
    after = {(i, k): torch.as_tensor(v) for i, s in enumerate(agent.optimizer.state.values()) for k, v in s.items()}
    assert all(torch.equal(v, after[k]) for k, v in moments.items()) and moments
    assert all(bool((p.grad == 1).all()) for p in agent.model.parameters())


def test_gradient_parts_of_a_later_update_clip_more_peer_rollouts(scored):
    agents, pool, capability = scored
    config = hk.Config(delta=0.4, delta_step=0.1)
    batch = hk.advantage(pool, agents[0], capability, config)
    early, late, shut = (
        gradient_parts(agents[0], batch, config, updates_made=m).loc[agents[1].name] for m in (0, 3, 4)
    )
    assert early["clipped"] < late["clipped"] <= shut["clipped"] == shut["rollouts"]
    assert shut["norm"] == 0 and math.isnan(shut["cosine_own"]) and shut["share"] == 0


def test_gradient_parts_have_a_part_for_the_kl(fresh_agent, problems, monkeypatch):
    agent = fresh_agent("qwen3-sums")
    config = hk.Config.preset("gspo", beta=0.5, n=4, minibatch=16, lr=1e-3, warmup=0)
    first = hk.step([agent], problems[:8], hk.Capability(), config)
    assert "kl" in (table := gradient_parts(agent, first.batches[agent.name], config)).index
    assert table.loc["kl", "norm"] > 1e-3 and table["share"].sum() == pytest.approx(1, abs=1e-5)
    whole = gradient_of_update(agent, first.batches[agent.name], config, monkeypatch)
    assert table.attrs["norm"] == pytest.approx(float(whole.norm()), rel=1e-4)
    fresh = fresh_agent("qwen3-sums")  # before its first update the agent is its own reference
    assert gradient_parts(fresh, first.batches[agent.name], config).loc["kl", "norm"] == 0
    assert fresh.reference is None
    late = fresh_agent("qwen3-sums")
    late.updates = 1
    with pytest.raises(ValueError, match="1 updates without beta"):
        gradient_parts(late, first.batches[agent.name], config)


def test_gradient_parts_of_equal_rewards_are_zero_and_their_cosines_nan(scored):
    agents, pool, capability = scored
    pool = pool.with_rewards([1.0] * len(pool), ["correct"] * len(pool))
    table = gradient_parts(agents[0], hk.advantage(pool, agents[0], capability, hk.Config()), hk.Config(), by="sign")
    assert set(table.index.get_level_values("sign")) == {"0"} and (table["norm"] == 0).all()
    assert table[["cosine_own", "cosine_total", "share"]].isna().all(axis=None)


def test_gradient_parts_refuses_invalid_batches_and_options(scored):
    agents, pool, capability = scored
    config = hk.Config()
    batch = hk.advantage(pool, agents[0], capability, config)
    with pytest.raises(ValueError, match="of 'qwen3-sums', not of 'llama-differences'"):
        gradient_parts(agents[1], batch, config)
    with pytest.raises(ValueError, match="use 'source' or 'sign'"):
        gradient_parts(agents[0], batch, config, by="signs")
    with pytest.raises(ValueError, match="share='none'"):
        gradient_parts(agents[0], batch, hk.Config.preset("grpo"))
    with pytest.raises(ValueError, match=f"2 labels for {len(batch)} rollouts"):
        part_gradients(agents[0], batch, config, ["a", "b"])
    empty = hk.advantage(pool.with_rewards([None] * len(pool), ["unscorable"] * len(pool)), agents[0], {}, config)
    with pytest.raises(ValueError, match=r"no rollouts.*unscorable"):
        gradient_parts(agents[0], empty, config)
    batch.source_mean_logp[0] = float("-inf")
    with pytest.raises(FloatingPointError, match="not finite"):
        gradient_parts(agents[0], batch, config)


def test_cosine_of_parallel_opposite_and_zero_gradients():
    a = torch.tensor([1.0, 2.0])
    assert cosine(a, 3 * a) == pytest.approx(1) and cosine(a, -a) == pytest.approx(-1)
    assert math.isnan(cosine(a, 0 * a))
