"""Ways to share: values of an independent implementation, and methods that reduce to others."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from batches import with_given_rewards

import hacpo_kit as hk
from hacpo_kit.objective import grpo_loss, nll_loss, token_loss
from hacpo_kit.sharing import diagnostics, gate, peer_groups, source_advantages
from hacpo_kit.updates import objective_of, weighted_peers

GOLDEN = json.loads((Path(__file__).parent / "golden" / "sharing.json").read_text(encoding="utf-8"))
TOKEN_MEAN = {"loss_mean": "token"}


def wide(values):
    return torch.tensor(values, dtype=torch.float64)


def padded(rows):
    """Rows of different lengths as one matrix, with NaN where there is no token, and their mask."""
    values = torch.full((len(rows), max(map(len, rows))), float("nan"), dtype=torch.float64)
    for i, row in enumerate(rows):
        values[i, : len(row)] = wide(row)
    return values, ~values.isnan()


def close(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", GOLDEN["peer_groups"])
def test_peer_groups_golden(case):
    for learner, expected in case["expect"].items():
        found = peer_groups(case["rewards"], learner, rule=case["rule"], balance=case["balance"])
        assert found == expected


def test_peer_groups_refuses_another_rule():
    with pytest.raises(ValueError, match="'all'"):
        peer_groups({}, "A", rule="all")


def test_source_advantages_gate_and_diagnostics_golden():
    for case in GOLDEN["group_advantages"]:
        close(source_advantages(wide(case["rewards"])), wide(case["expect"]))
    for case in GOLDEN["gate"]:
        close(gate(wide(case["ratio"]), case["floor"]), wide(case["expect"]))
    for case in GOLDEN["diagnostics"]:
        assert diagnostics(wide(case["ratio"]), wide(case["weights"])) == pytest.approx(case["expect"], abs=1e-9)


def test_token_and_nll_loss_golden_values_and_gradients():
    for case in GOLDEN["token_objective"]:
        (logp, mask), (old, _) = padded(case["logp"]), padded(case["old_logp"])
        logp.requires_grad_()
        config = hk.Config(eps_low=case["eps_low"], eps_high=case["eps_high"])
        out = token_loss(logp, old, mask, wide(case["advantages"]), wide(case["weights"]), config)
        check_golden(out.loss, logp, mask, case["expect"])
    for case in GOLDEN["nll"]:
        logp, mask = padded(case["logp"])
        logp.requires_grad_()
        check_golden(nll_loss(logp, mask, case["weight"]), logp, mask, case["expect"])


def check_golden(loss, logp, mask, expected):
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-9)
    (gradient,) = torch.autograd.grad(loss, logp)
    close(gradient[mask], wide([value for row in expected["grad"] for value in row]))


def test_token_loss_with_rows_of_equal_length_is_that_of_grpo():
    logp, old = -torch.rand(4, 5, dtype=torch.float64), -torch.rand(4, 5, dtype=torch.float64)
    mask, advantages = torch.ones(4, 5, dtype=torch.bool), wide([1.0, -1.0, 0.5, 0.0])
    config = hk.Config.preset("grpo")
    close(
        token_loss(logp, old, mask, advantages, torch.ones(4).double(), config).loss,
        grpo_loss(logp, old, mask, advantages, config).loss,
    )


# ── on real agents ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sampled(pair, problems):
    """A pool of two agents: on even problems the first agent fails and the second is mixed; on odd ones the reverse."""
    pool = hk.rollout(pair, problems[:6], n=4, max_new_tokens=16, progress=False)

    def reward(i, r):
        fails = (problems.index(pool.problem(r.problem)) % 2 == 0) == (r.source == pair[0].name)
        return 0.0 if fails else float(r.sample % 2)

    return pair, pool, [reward(i, r) for i, r in enumerate(pool)]


def updated(agent, pool, config):
    """The weights of a copy of the agent after an update, and the statistics."""
    agent = copy.deepcopy(agent)
    batch = hk.advantage(pool, agent, hk.Capability().observe(pool), config)
    stats = hk.update(agent, batch, config)
    return torch.cat([p.detach().flatten() for p in agent.model.parameters()]), stats


@pytest.mark.parametrize("method", ["graft", "sgt", "sgt_gated"])
def test_rescue_without_an_eligible_problem_is_grpo_to_the_last_bit(sampled, method):
    agents, pool, _ = sampled
    pool = with_given_rewards(pool)  # every group is mixed
    alone, _ = updated(agents[0], pool, hk.Config.preset("grpo", minibatch=8, **TOKEN_MEAN))
    shared, stats = updated(agents[0], pool, hk.Config.preset(method, minibatch=8))
    assert torch.equal(alone, shared) and all(part.own.all() for part in stats.minibatches)


@pytest.mark.parametrize(
    ("method", "alone", "settings"),
    [
        ("graft", "grpo", TOKEN_MEAN),
        ("sgt", "grpo", TOKEN_MEAN),
        ("sgt_gated", "grpo", TOKEN_MEAN),
        ("hacpo_rescue", "gspo", {}),
        ("hacpo_v2", "gspo", {}),
    ],
)
def test_method_with_one_agent_is_the_method_alone(sampled, method, alone, settings):
    agents, pool, rewards = sampled
    pool = with_given_rewards(pool, rewards).restricted_to(agents[0].name)
    expected, _ = updated(agents[0], pool, hk.Config.preset(alone, minibatch=8, **settings))
    found, _ = updated(agents[0], pool, hk.Config.preset(method, minibatch=8))
    assert torch.equal(expected, found)


def test_max_peer_of_all_rollouts_is_hacpo_and_fewer_are_counted(sampled):
    agents, pool, rewards = sampled
    pool = with_given_rewards(pool, rewards)
    whole, _ = updated(agents[0], pool, hk.Config(minibatch=8))
    assert torch.equal(whole, updated(agents[0], pool, hk.Config(minibatch=8, max_peer=4))[0])
    fewer, stats = updated(agents[0], pool, hk.Config(minibatch=8, max_peer=1))
    table = stats.to_frame()
    assert not torch.equal(whole, fewer) and stats.excluded == {"not_drawn": 18}
    problems = [pool.rollouts[i].problem for i in table["index"][~table["own"]]]
    assert sorted(problems) == sorted(p.id for p in pool.problems)


def test_graft_takes_the_peers_group_in_place_of_the_failed_one(sampled):
    agents, pool, rewards = sampled
    pool = with_given_rewards(pool, rewards)
    config = hk.Config.preset("graft", floor=0.0)
    batch = hk.advantage(pool, agents[0], hk.Capability().observe(pool), config)
    taken = {(r.problem, r.source) for r in batch.rollouts}
    assert taken == {(p.id, agents[i % 2 == 0].name) for i, p in enumerate(pool.problems)}
    assert sorted(set(batch.advantages.tolist())) == pytest.approx([-math.sqrt(3) / 2, math.sqrt(3) / 2], abs=1e-5)


def test_gate_weights_are_the_ratios_before_the_update_and_the_floor_excludes(sampled):
    agents, pool, rewards = sampled
    pool = with_given_rewards(pool, rewards)
    config = hk.Config.preset("graft", floor=0.0)
    batch = hk.advantage(pool, agents[0], hk.Capability().observe(pool), config)
    weighted, old = weighted_peers(agents[0], batch, config)
    peers = (~weighted.own).nonzero().flatten().tolist()
    logp, mask = agents[0].logprobs(*weighted.tokens(peers))
    s = (torch.where(mask, logp, 0).sum(1) / mask.sum(1) - weighted.source_mean_logp[peers]).exp()
    torch.testing.assert_close(weighted.weights[peers], s.clamp(max=1.0), rtol=1e-5, atol=1e-6)
    assert len(peers) == len(old) == 12 and weighted.excluded == {"replaced": 12}
    floor = float(s.median())
    _, stats = updated(agents[0], pool, config.replace(floor=floor))
    assert stats.excluded == {"replaced": 12, "below_floor": int((s <= floor).sum())}
    assert not {"below_floor"} & set(batch.excluded)


@pytest.mark.parametrize(
    ("method", "loss_mean"), [("graft", "token"), ("graft", "rollout"), ("sgt", "token"), ("sgt", "rollout")]
)
def test_objective_of_a_mini_batch_is_the_sum_of_the_pure_functions(sampled, method, loss_mean):
    agents, pool, rewards = sampled
    pool = with_given_rewards(pool, rewards)
    config = hk.Config.preset(method, floor=0.0, loss_mean=loss_mean)
    batch = hk.advantage(pool, agents[0], hk.Capability().observe(pool), config)
    batch = weighted_peers(agents[0], batch, config)[0]
    rows = list(range(len(batch)))
    out = objective_of(agents[0], batch, rows, 0, config)
    logp, mask = agents[0].logprobs(*batch.tokens(rows))
    policy = batch.own if method == "sgt" else torch.ones_like(batch.own)
    terms = (logp[policy], logp[policy].detach(), mask[policy], batch.advantages[policy])
    weights = batch.weights[policy]
    if loss_mean == "token":
        expected = token_loss(*terms, weights, config).loss
    else:
        expected = -(weights * grpo_loss(*terms, config).objective).mean()
    if method == "sgt":
        assert int((~batch.own).sum()) == 3  # one correct rollout for each rescued problem
        assert all(r.reward == 1 for r, own in zip(batch.rollouts, batch.own, strict=True) if not own)
        expected = expected + nll_loss(logp[~policy], mask[~policy], config.nll_weight)
    loss = -out.objective.sum() / len(batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    parameters = list(agents[0].model.parameters())
    gradients = [torch.autograd.grad(value, parameters, retain_graph=True) for value in (loss, expected)]
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["graft", "sgt"])
def test_update_with_peers_does_not_depend_on_the_size_of_passes(sampled, method):
    agents, pool, rewards = sampled
    pool = with_given_rewards(pool, rewards)
    config = hk.Config.preset(method, floor=0.0, minibatch=12, lr=1e-3, adam_eps=1.0)
    whole, stats = updated(agents[0], pool, config)
    parts, _ = updated(agents[0], pool, config.replace(microbatch_tokens=48))
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-6)
    assert any((~part.own).any() for part in stats.minibatches)


def test_sgt_has_as_many_updates_as_alone_and_graft_uses_peers_last(sampled):
    agents, pool, rewards = sampled
    pool = with_given_rewards(pool, rewards)
    _, beside = updated(agents[0], pool, hk.Config.preset("sgt", minibatch=8))
    assert [int(part.own.sum()) for part in beside.minibatches] == [8, 8, 8]
    assert [int((~part.own).sum()) for part in beside.minibatches] == [1, 1, 1]
    _, last = updated(agents[0], pool, hk.Config.preset("graft", minibatch=8, floor=0.0))
    assert [bool(part.own.all()) for part in last.minibatches] == [True, True, False, False]


def test_mask_negative_excludes_unlikely_peer_rollouts_with_a_negative_advantage(sampled):
    agents, pool, rewards = sampled
    pool = with_given_rewards(pool, rewards)
    config = hk.Config(mask_negative=0.0)
    batch = hk.advantage(pool, agents[0], hk.Capability().observe(pool), config)
    kept, _ = weighted_peers(agents[0], batch, config)
    logp, mask = agents[0].logprobs(batch.prompt_ids, batch.response_ids)
    s = (torch.where(mask, logp, 0).sum(1) / mask.sum(1) - batch.source_mean_logp).exp()
    masked = ~batch.own & (batch.advantages < 0) & (s < 1)
    assert 0 < masked.sum() < (~batch.own).sum() and kept.excluded == {"masked": int(masked.sum())}
    assert kept.index == tuple(i for i, hit in zip(batch.index, masked.tolist(), strict=True) if not hit)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": "token", "share": "all"}, "share='none'"),
        ({"peer_update": "gated"}, "ratio='token'"),
        ({"peer_update": "nll", "share": "rescue"}, "ratio='token'"),
        ({"loss_mean": "token"}, "ratio='token'"),
    ],
)
def test_config_refuses_combinations_without_a_meaning(settings, message):
    with pytest.raises(ValueError, match=message):
        hk.Config(**settings)


def test_dynamic_sampling_replaces_problems_with_equal_rewards_and_counts_their_cost(qwen, problems, tmp_path):
    def even(response, gold):  # every second problem has mixed rewards: the characters of the responses decide there
        return float(sum(response.encode()) % 2) if int(gold) % 2 else 0.0

    config = hk.Config.preset("grpo", prompts_per_step=4, n=4, max_new_tokens=16, minibatch=8, dynamic_sampling=True)
    options = {"reward_function": even, "progress": "off", "save_every": 1}
    whole = hk.train([copy.deepcopy(qwen)], problems, config, 2, **options)
    pool = whole.last.pool
    assert len(pool.problems) == 4 and all(int(p.gold) % 2 for p in pool.problems)
    assert whole.history[-1]["discarded_problems"] > 0
    drawn = sum(line.get("discarded_problems", 0) for line in whole.history) + 8
    assert whole.state.position == drawn and whole.state.rollouts == 4 * drawn
    hk.train([copy.deepcopy(qwen)], problems, config, 1, out=tmp_path / "run", **options)
    resumed = hk.train([copy.deepcopy(qwen)], problems, config, 2, out=tmp_path / "run", **options)
    weights = [torch.cat([p.flatten() for p in run.agents[0].model.parameters()]) for run in (whole, resumed)]
    assert torch.equal(*weights)


def test_dynamic_sampling_without_a_mixed_problem_keeps_the_first_ones(qwen, problems):
    config = hk.Config.preset("grpo", prompts_per_step=4, n=2, max_new_tokens=8, minibatch=8, dynamic_sampling=True)
    run = hk.train([qwen], problems, config, 1, reward_function=lambda response, gold: 1.0, progress="off")
    assert [p.id for p in run.last.pool.problems] == [p.id for p in problems.batch(0, 4, seed=0)]
    assert run.state.rollouts == 4 * 8 * 2 and run.state.position == 32
    with pytest.raises(ValueError, match="dynamic_sampling"):
        hk.step([qwen], problems[:4], hk.Capability(), config)


def test_updates_factor_multiplies_the_updates(sampled):
    agents, pool, rewards = sampled
    pool = with_given_rewards(pool, rewards)
    counts = [
        len(updated(agents[0], pool, hk.Config.preset(m, minibatch=12))[1].minibatches)
        for m in ("gspo", "gspo_updates_x2")
    ]
    assert counts == [2, 4]
