"""update(): accumulation, order, reduction to GSPO, refusals, and what it reports."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch

import hacpo_kit as hk
from hacpo_kit.common.seeds import derive_seed
from hacpo_kit.objective import clip_band
from hacpo_kit.runs.gradients import gradient_parts
from hacpo_kit.updates import minibatches, objective_of


@pytest.fixture
def scored(pair, problems):
    """Two agents, a scored pool of theirs, and the capability after it."""
    pool = hk.reward(hk.rollout(pair, problems[:8], n=4, progress=False))
    return pair, pool, hk.Capability().observe(pool)


def weights(agent):
    return {k: v.detach().clone() for k, v in agent.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def gradient_of(agent, batch, config, monkeypatch):
    """The gradient of one mini-batch, taken where the optimiser would use it."""
    seen = {}

    def look(optimizer):
        seen["g"] = torch.cat([p.grad.flatten() for g in optimizer.param_groups for p in g["params"]])

    monkeypatch.setattr(torch.optim.AdamW, "step", look)
    hk.update(agent, batch, config)
    return seen["g"]


@pytest.mark.parametrize("method", ["hacpo", "gspo", "grpo", "naive"])
def test_update_accumulates_to_the_same_gradient(scored, monkeypatch, method):
    agents, pool, capability = scored
    config = hk.Config.preset(method, minibatch=4096, max_grad_norm=float("inf"))
    batch = hk.advantage(pool, agents[0], capability, config)
    assert len({len(r) for r in batch.response_ids}) > 1  # unequal lengths, or the test shows nothing
    whole = gradient_of(agents[0], batch, config, monkeypatch)
    agents[0].updates = 0
    parts = gradient_of(agents[0], batch, config.replace(microbatch_tokens=64), monkeypatch)
    assert whole.norm() > 1e-3
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-6)


def plain_update(agent, batch, config):
    """An update as the paper writes it: a backward pass over all rollouts of each mini-batch; returns what it computed."""
    results, optimizer = (
        [],
        torch.optim.AdamW(agent.model.parameters(), lr=config.lr, betas=(config.beta1, config.beta2)),
    )
    for m, rows in enumerate(minibatches(batch.own, config, seed=derive_seed("order", config.seed, agent.name, 0))):
        optimizer.param_groups[0].update(eps=config.adam_eps, weight_decay=config.weight_decay)
        optimizer.zero_grad()
        out = objective_of(agent, batch, rows, m, config)
        (-out.objective.sum() / len(rows)).backward()
        norm = torch.nn.utils.clip_grad_norm_(agent.model.parameters(), config.max_grad_norm)
        results.append((out, float(norm)))
        optimizer.step()
    return results


def counting_gradients(agent):
    """The list that grows by the number of rollouts of each pass with gradients."""
    counts, logprobs = [], agent.logprobs

    def watch(prompts, *args, **kwargs):
        counts.append(len(prompts) if torch.is_grad_enabled() and kwargs.get("model") is None else 0)
        return logprobs(prompts, *args, **kwargs)

    agent.logprobs = watch
    return counts


@pytest.mark.parametrize(("method", "more"), [("hacpo", {}), ("gspo", {}), ("grpo", {}), ("hacpo", {"beta": 0.1})])
def test_update_has_the_gradient_of_all_rollouts_though_some_get_a_forward_pass_only(scored, monkeypatch, method, more):
    agents, pool, capability = scored
    agent, config = agents[0], hk.Config.preset(method, minibatch=4096, max_grad_norm=float("inf"), **more)
    batch = hk.advantage(pool, agent, capability, config)
    # some advantages of 0 among the own rollouts as well
    batch = dataclasses.replace(batch, advantages=torch.where(torch.arange(len(batch)) % 3 == 0, 0.0, batch.advantages))
    out = objective_of(agent, batch, range(len(batch)), 0, config)
    kl = 0.0 if out.kl is None else config.beta * out.kl.sum() / batch.own.sum()
    gradients = torch.autograd.grad(-out.objective.sum() / len(batch) + kl, list(agent.model.parameters()))
    counts = counting_gradients(agent)
    found = gradient_of(agent, batch, config, monkeypatch)
    torch.testing.assert_close(found, torch.cat([g.flatten() for g in gradients]), rtol=1e-4, atol=1e-7)
    assert found.norm() > 1e-3 and 0 < sum(counts) < len(batch)


def test_update_of_several_mini_batches_is_the_plain_one(scored):
    agents, pool, capability = scored
    config = hk.Config.preset("gspo", minibatch=8, lr=1e-4, warmup=0)
    batch = hk.advantage(pool, agents[0], capability, config)
    agent, plain = agents[0], copy.deepcopy(agents[0])
    for one in (agent, plain):
        one.model.double()  # in float32 AdamW makes full steps of rounding
    counts = counting_gradients(agent)
    found, expected = hk.update(agent, batch, config).minibatches, plain_update(plain, batch, config)
    for part, (out, norm) in zip(found, expected, strict=True):
        np.testing.assert_allclose(part.ratio, out.ratio.detach().numpy(), rtol=1e-6)
        assert part.clipped.tolist() == out.clipped.tolist() and part.grad_norm == pytest.approx(norm, rel=1e-6)
        assert part.loss == pytest.approx(-out.objective.mean().item(), abs=1e-6)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(agent.model.state_dict()[name], value, rtol=0, atol=1e-9, msg=name)
    # clipped rollouts of later mini-batches, and those without advantage, got no backward pass
    idle = sum(int((part.clipped | (part.advantages == 0)).sum()) for part in found)
    assert any(part.clipped.any() for part in found) and sum(counts) == len(batch) - idle


def test_update_without_a_gradient_moves_by_its_momentum(scored):
    agents, pool, capability = scored
    config = hk.Config.preset("hacpo", minibatch=4096)
    batch = hk.advantage(pool, agents[0], capability, config)
    hk.update(agents[0], batch, config)
    moments = {name: value.clone() for name, value in agents[0].optimizer.tensors().items()}
    name = next(n for n in moments if n.endswith("exp_avg"))
    hk.update(agents[0], dataclasses.replace(batch, advantages=torch.zeros(len(batch))), config)
    assert torch.allclose(agents[0].optimizer.tensors()[name], moments[name] * config.beta1)


def test_update_of_one_agent_is_bit_identical_for_hacpo_and_gspo(fresh_agent, problems):
    results = []
    for method in ("hacpo", "gspo"):
        agent, capability = fresh_agent("qwen3-sums"), hk.Capability()
        for k in range(2):
            config = hk.Config.preset(method, n=4, minibatch=16, alpha=2.0, delta=0.5)
            result = hk.step([agent], problems[8 * k : 8 * k + 8], capability, config)
            capability = result.capability
        results.append(weights(agent))
    assert same(*results)


def test_update_does_not_depend_on_the_order_of_agents(fresh_agent, problems):
    results = []
    for names in (["qwen3-sums", "llama-differences"], ["llama-differences", "qwen3-sums"]):
        agents = [fresh_agent(n) for n in names]
        hk.step(agents, problems[:6], hk.Capability(), hk.Config(n=4, minibatch=16))
        results.append({a.name: weights(a) for a in agents})
    assert all(same(results[0][n], results[1][n]) for n in results[0])


def test_update_starts_with_own_ratios_of_one(pair, problems):
    """Also at T = 0.6: both sides divide the logits by T."""
    pool = hk.reward(hk.rollout(pair, problems[:4], n=4, temperature=0.6, progress=False))
    config = hk.Config(minibatch=4096)
    stats = hk.update(pair[0], hk.advantage(pool, pair[0], hk.Capability().observe(pool), config), config)
    first = stats.minibatches[0]
    np.testing.assert_allclose(first.ratio[first.own], 1.0, atol=2e-5)
    assert first.ratio[~first.own].std() > 0.01  # peer ratios differ


def test_update_returns_what_each_mini_batch_computed(scored):
    agents, pool, capability = scored
    config = hk.Config(minibatch=16)
    batch = hk.advantage(pool, agents[1], capability, config)
    stats = hk.update(agents[1], batch, config)
    assert [mb.updates_made for mb in stats.minibatches] == list(range(len(stats.minibatches)))
    assert sorted(np.concatenate([mb.index for mb in stats.minibatches])) == sorted(batch.index)
    assert agents[1].updates == len(stats.minibatches) == -(-len(batch) // 16)
    frame = stats.to_frame()
    peer = frame[~frame["own"]]
    outside = (peer["ratio"] < peer["lower"]) | (peer["ratio"] > 1)
    assert (peer["clipped"] == outside).all() and set(peer["source"]) == {agents[0].name}
    for mb in stats.minibatches:
        assert mb.lower == clip_band(mb.updates_made, config.delta, config.delta_step)[0]
    m = stats.metrics()
    assert m["clip_peer_low"] + m["clip_peer_high"] == pytest.approx(peer["clipped"].mean())
    assert m["rollouts_used"] == len(batch) and m["peer_weight"] == pytest.approx(peer["weight"].mean())


def test_minibatches_are_nearly_equal_and_lose_nothing():
    own = torch.tensor([True] * 70 + [False] * 60)
    mixed = minibatches(own, hk.Config(minibatch=32), seed=1)
    assert [len(rows) for rows in mixed] == [26] * 5 and sorted(sum(mixed, [])) == list(range(130))
    first = minibatches(own, hk.Config(minibatch=32, minibatch_order="own_first"), seed=1)
    kinds = [set(own[rows].tolist()) for rows in first]
    assert kinds == [{True}] * 3 + [{False}] * 2 and sorted(sum(first, [])) == list(range(130))
    assert minibatches(own, hk.Config(minibatch=32), seed=2) != mixed


@pytest.mark.parametrize("sources", [1, 2, 3])
def test_minibatches_with_equal_updates_are_as_many_as_without_peers(sources):
    own = torch.arange(64 * sources) < 64
    alone = minibatches(own[:64], hk.Config(minibatch=16), seed=0)
    together = minibatches(own, hk.Config(minibatch=16, equal_updates=True), seed=0)
    assert len(together) == len(alone) == 4 and {len(part) for part in together} == {16 * sources}
    assert sorted(i for part in together for i in part) == list(range(64 * sources))
    assert len(minibatches(own, hk.Config(minibatch=16), seed=0)) == 4 * sources  # the paper's way
    if sources == 1:
        assert together == alone
    odd = torch.arange(67 + sources) < 67  # a few peer rollouts must not cost an update
    assert len(minibatches(odd, hk.Config(minibatch=16, equal_updates=True), seed=0)) == 5


def test_update_count_grows_with_the_rollouts(fresh_agent, problems):
    updates = {}
    for method in ("gspo", "gspo_x2"):
        agent = fresh_agent("qwen3-sums")
        hk.step([agent], problems[:4], hk.Capability(), hk.Config.preset(method, n=4, minibatch=8))
        updates[method] = agent.updates
    assert updates == {"gspo": 2, "gspo_x2": 4}


def test_update_measures_the_kl_against_the_initial_policy(fresh_agent, problems):
    agent = fresh_agent("qwen3-sums")
    before = weights(agent)
    config = hk.Config.preset("gspo", beta=0.5, n=4, minibatch=8, lr=1e-3, warmup=0)
    result = hk.step([agent], problems[:8], hk.Capability(), config)
    kls = [mb.kl for mb in result.stats[agent.name].minibatches]
    assert kls[0] == pytest.approx(0, abs=1e-6) and kls[-1] > 1e-4
    assert same(agent.reference.state_dict(), before)
    late = fresh_agent("qwen3-sums")
    hk.step([late], problems[:4], hk.Capability(), config.replace(beta=0.0))
    with pytest.raises(ValueError, match="beta"):
        hk.step([late], problems[:4], hk.Capability(), config)


def test_update_stays_closer_to_the_initial_policy_with_a_kl(fresh_agent, problems):
    distance = {}
    for beta in (0.0, 20.0):
        agent = fresh_agent("qwen3-sums")
        start = weights(agent)
        config = hk.Config.preset("gspo", beta=beta, n=4, minibatch=8, lr=3e-4, warmup=0)
        for k in range(3):
            hk.step([agent], problems[8 * k : 8 * k + 8], hk.Capability().with_step({agent.name: 0.5}), config)
        distance[beta] = sum((v - start[k]).norm() for k, v in weights(agent).items()).item()
    assert 0 < distance[20.0] < distance[0.0]


def test_update_with_equal_rewards_changes_nothing(scored):
    agents, pool, capability = scored
    pool = pool.with_rewards([1.0] * len(pool), ["correct"] * len(pool))
    before = weights(agents[0])
    stats = hk.update(agents[0], hk.advantage(pool, agents[0], capability, hk.Config()), hk.Config())
    assert same(before, weights(agents[0])) and stats.metrics()["grad_norm"] == 0


def test_update_stops_before_the_optimiser_step_at_a_number_that_is_not_finite(scored):
    agents, pool, capability = scored
    agent = agents[0]
    batch = hk.advantage(pool, agent, capability, hk.Config())
    bad = batch.source_mean_logp.clone()
    bad[3] = float("-inf")
    before = weights(agent)
    r = batch.rollouts[3]
    with pytest.raises(
        FloatingPointError, match=f"mini-batch 0: the objective of 1 rollouts .*{r.problem} by {r.source} #{r.sample}"
    ):
        hk.update(
            agent,
            dataclasses.replace(batch, source_mean_logp=bad, own=torch.ones_like(batch.own)),
            hk.Config(minibatch=4096),
        )
    assert same(before, weights(agent)) and agent.updates == 0


def poisoned(agent, batch, row, way):
    """From now on the learner's log-probs of one rollout are NaN or huge, or fine with a gradient that is NaN."""
    logprobs, target = agent.logprobs, batch.response_ids[row]

    def spoiled(prompts, responses, **how):
        logps, mask = logprobs(prompts, responses, **how)
        if how.get("model") is not None:
            return logps, mask
        hit, more = torch.tensor([r == target for r in responses]), torch.zeros_like(logps)
        if way == "gradient":  # √0 has the slope ∞, and 0·∞ is NaN
            more[hit] = (logps[hit] - logps[hit].detach()).pow(2).sqrt()
        else:
            more[hit] = {"nan": float("nan"), "huge": 500.0}[way]
        return logps + more, mask

    agent.logprobs = spoiled


@pytest.mark.parametrize(
    ("way", "what", "settings"),
    [
        ("nan", "objective", {}),
        ("huge", "importance ratio", {}),
        ("gradient", "gradient", {"minibatch": 4096}),  # in a later mini-batch it can be clipped, and has none
        ("gradient", "gradient", {"beta": 0.1}),
        ("nan", "objective", {"method": "grpo"}),
    ],
)
def test_update_names_and_keeps_the_rollout_with_a_number_that_is_not_finite(scored, way, what, settings):
    agents, pool, capability = scored
    agent, config = agents[0], hk.Config.preset(**{"method": "hacpo", "minibatch": 8, **settings})
    batch = hk.advantage(pool, agent, capability, config)
    order = minibatches(batch.own, config, seed=derive_seed("order", config.seed, agent.name, 0))
    # one that occurs once, with a positive advantage: its clip gives a finite objective even at an infinite ratio
    row = next(i for i, ids in enumerate(batch.response_ids)
               if batch.own[i] and batch.advantages[i] > 0 and batch.response_ids.count(ids) == 1)  # fmt: skip
    m = next(m for m, rows in enumerate(order) if row in rows)
    poisoned(agent, batch, row, way)
    r = batch.rollouts[row]
    message = (
        rf"agent 'qwen3-sums', mini-batch {m}: the {what} of 1 rollouts .*\({r.problem} by {r.source} #{r.sample}\)"
    )
    with pytest.raises(FloatingPointError, match=message) as caught:
        hk.update(agent, batch, config)
    assert agent.updates == m and all(v.isfinite().all() for v in agent.model.state_dict().values())
    fault = caught.value.fault
    (kept,) = fault["rollouts"]
    assert (fault["agent"], fault["minibatch"]) == (agent.name, m)
    assert (kept["text"], kept["token_ids"], kept["reward"]) == (r.text, list(r.token_ids), r.reward)
    assert kept["advantage"] == batch.advantages[row].item() and kept["logps"] == r.logps.tolist()
    assert kept["prompt"] == pool.problem(r.problem).prompt_text
    assert set(kept["learner_logps"]) == {"NaN"} if way == "nan" else len(kept["learner_logps"]) == len(r.token_ids)
    json.dumps(fault, allow_nan=False)


def test_update_names_a_kl_that_is_not_finite(scored):
    agents, pool, capability = scored
    agent, config = agents[0], hk.Config.preset("gspo", beta=0.1, minibatch=4096)
    batch = hk.advantage(pool, agent, capability, config)
    agent.reference_logprobs = lambda prompts, responses, **how: torch.full(
        (len(prompts), max(map(len, responses))), float("inf")
    )
    before = weights(agent)
    with pytest.raises(FloatingPointError, match=r"mini-batch 0: the KL of \d+ rollouts is not finite"):
        hk.update(agent, batch, config)
    assert same(before, weights(agent)) and agent.updates == 0


def test_update_warns_about_a_clipping_range_that_closes_within_a_step(scored):
    agents, pool, capability = scored
    config = hk.Config(minibatch=6, delta=0.05, delta_step=0.025)
    with pytest.warns(UserWarning, match=r"mini-batch 2 of \d+ .*\[1, 1\].*delta"):
        stats = hk.update(agents[0], hk.advantage(pool, agents[0], capability, config), config)
    late = stats.to_frame().query("updates_made >= 2 and not own")
    assert len(late) and late["clipped"].all()


def test_update_refuses_another_learners_batch_and_advantage_an_unscored_pool(scored):
    agents, pool, capability = scored
    batch = hk.advantage(pool, agents[0], capability, hk.Config())
    with pytest.raises(ValueError, match=f"'{agents[0].name}', not of '{agents[1].name}'"):
        hk.update(agents[1], batch, hk.Config())
    unscored = dataclasses.replace(
        pool, rollouts=tuple(dataclasses.replace(r, status="unscored", reward=None) for r in pool)
    )
    for call in (
        lambda: hk.advantage(unscored, agents[0], capability, hk.Config()),
        lambda: hk.Capability().observe(unscored),
    ):
        with pytest.raises(ValueError, match="reward"):
            call()


def test_advantage_and_capability_ignore_unscorable_rollouts(scored):
    agents, pool, _ = scored
    rewards = [None if i % 5 == 0 else r.reward for i, r in enumerate(pool)]
    statuses = ["unscorable" if v is None else r.status for v, r in zip(rewards, pool, strict=True)]
    pool = pool.with_rewards(rewards, statuses)
    capability = hk.Capability().observe(pool)
    mine = [v for v, r in zip(rewards, pool, strict=True) if r.source == agents[0].name and v is not None]
    assert capability[agents[0].name] == pytest.approx(sum(mine) / len(mine))
    batch = hk.advantage(pool, agents[0], capability, hk.Config())
    assert batch.excluded == {"unscorable": sum(v is None for v in rewards)}
    assert not set(batch.index) & {i for i, v in enumerate(rewards) if v is None}


def test_update_of_an_empty_batch_warns_and_changes_nothing(scored):
    agents, pool, capability = scored
    pool = pool.with_rewards([None] * len(pool), ["unscorable"] * len(pool))
    before = weights(agents[0])
    batch = hk.advantage(pool, agents[0], capability, hk.Config())
    with pytest.warns(UserWarning, match="no rollouts"):
        stats = hk.update(agents[0], batch, hk.Config())
    assert stats.metrics() == {"updates": 0, "excluded_unscorable": len(pool)} and same(before, weights(agents[0]))


def test_update_refuses_peer_rollouts_of_a_batch_for_a_method_without_them(scored):
    """The batch of one config and the update of another."""
    agents, pool, capability = scored
    batch = hk.advantage(pool, agents[0], capability, hk.Config())
    before = weights(agents[0])
    with pytest.raises(ValueError, match="share='none'"):
        hk.update(agents[0], batch, hk.Config.preset("grpo"))
    assert same(before, weights(agents[0])) and agents[0].updates == 0


def test_update_averages_the_kl_over_own_rollouts(scored):
    """Mini-batches without own rollouts have no KL."""
    agents, pool, capability = scored
    config = hk.Config(minibatch=8, minibatch_order="own_first", beta=0.1, delta=1, delta_step=0)
    stats = hk.update(agents[0], hk.advantage(pool, agents[0], capability, config), config)
    assert [mb.kl is None for mb in stats.minibatches] == [not mb.own.any() for mb in stats.minibatches]
    kls = [mb.kl for mb in stats.minibatches if mb.own.any()]
    assert len(kls) == 4 < len(stats.minibatches)
    assert stats.metrics()["kl"] == pytest.approx(np.mean(kls))  # equal parts here, so the plain mean


def test_update_reports_the_lower_bound_of_naive_sharing(scored):
    agents, pool, capability = scored
    config = hk.Config.preset("naive")
    stats = hk.update(agents[0], hk.advantage(pool, agents[0], capability, config), config)
    assert {mb.lower for mb in stats.minibatches} == {1 - config.eps_low}


def test_pool_refuses_a_reward_that_is_not_finite(scored):
    _, pool, _ = scored
    r = pool.rollouts[3]
    rewards = [float("nan") if i == 3 else 1.0 for i in range(len(pool))]
    with pytest.raises(
        ValueError, match=f"rewards of 1 rollouts are not finite .{r.problem} by {r.source} #{r.sample}"
    ):
        pool.with_rewards(rewards, ["correct"] * len(pool))


def test_reprs_are_short(scored):
    agents, pool, capability = scored
    config = hk.Config()
    batch = hk.advantage(pool, agents[0], capability, config)
    for thing in (pool, batch, hk.update(agents[0], batch, config)):
        assert len(repr(thing)) < 200, repr(thing)


def test_update_calls_before_with_each_mini_batch(scored):
    """The call changes nothing, and its mini-batch is the one of the update."""
    agents, pool, capability = scored
    config = hk.Config(minibatch=16)
    batch = hk.advantage(pool, agents[0], capability, config)
    parts, norms = [], []

    def look(m, part):
        parts.append((m, part))
        norms.append(gradient_parts(agents[0], part, config, updates_made=m).attrs["norm"])

    stats = hk.update(agents[0], batch, config, before=look)
    assert [m for m, _ in parts] == list(range(4)) == [mb.updates_made for mb in stats.minibatches]
    assert [list(part.index) for _, part in parts] == [mb.index.tolist() for mb in stats.minibatches]
    assert norms == pytest.approx([mb.grad_norm for mb in stats.minibatches], rel=1e-3)
    agents[1].updates = 0
    other = hk.advantage(pool, agents[1], capability, config)
    with pytest.raises(ValueError, match="stop here"):
        hk.update(agents[1], other, config, before=lambda m, part: (_ for _ in ()).throw(ValueError("stop here")))
    assert agents[1].updates == 0
