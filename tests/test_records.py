"""The pool: completeness, tables and metrics."""

from dataclasses import replace

import pytest
from batches import batch_of, with_given_rewards

import hacpo_kit as hk
from hacpo_kit.records import disputed

QUIET = {"progress": False}


@pytest.fixture
def pool(pair, problems, say):
    """Two problems, two agents, two answers each."""
    say(pair[0], [r"\boxed{1}", r"1+0=1;\boxed{1}", "no box", "none"])
    say(pair[1], [r"\boxed{3}"])
    return hk.rollout(pair, problems[:2], n=2, **QUIET)


def test_pool_names_missing_and_surplus_rollouts(pool, pair):
    first = pool.problems[0].id
    short = hk.Pool(pool.rollouts[1:], pool.problems, pool.agents, 2)
    with pytest.raises(ValueError, match=f"problem '{first}' has 1 rollouts of agent 'qwen3-sums', need 2"):
        short.check_complete()
    with pytest.raises(ValueError, match=f"problem '{first}' has 1 rollouts of agent 'qwen3-sums'"):
        batch_of(pair[1], short)
    surplus = hk.Pool((*pool, pool.rollouts[-1]), pool.problems, pool.agents, 2)
    with pytest.raises(
        ValueError, match=f"'{pool.problems[1].id}' has 3 rollouts of agent 'llama-differences', need 2"
    ):
        surplus.check_complete()
    absent = hk.Pool(tuple(pool.by_source["qwen3-sums"]), pool.problems, pool.agents, 2)
    with pytest.raises(ValueError, match="has 0 rollouts of agent 'llama-differences'"):
        absent.check_complete()
    pool.check_complete()


def test_pool_distinct_counts_texts_and_boxed_answers(pool):
    table = pool.distinct().set_index("source")
    assert table.loc["qwen3-sums", "texts"].tolist() == [2, 2]
    assert table.loc["qwen3-sums", "answers"].tolist() == [1, 1]  # one box twice; two texts without a box
    assert table.loc["llama-differences", "texts"].tolist() == [1, 1]
    assert table["rollouts"].tolist() == [2] * 4
    for source in pool.agents:
        assert with_given_rewards(pool).metrics(source)["distinct_answers"] == table.loc[source, "answers"].mean()


def test_advantage_refuses_an_agent_without_rollouts_and_a_pool_without_rewards(pool, tiny_agent):
    with pytest.raises(ValueError, match="no rewards yet"):
        hk.advantage(pool, tiny_agent(), hk.Capability(), hk.Config())
    with pytest.raises(ValueError, match=r"agent 'tiny'.*'qwen3-sums'"):
        batch_of(tiny_agent(), with_given_rewards(pool))


def test_pool_refuses_another_number_of_rewards(pool):
    with pytest.raises(ValueError, match="8 rollouts, 1 rewards, 8 statuses"):
        pool.with_rewards([1.0], ["correct"] * 8)


def test_pool_to_frame_and_metrics(pool):
    scored = with_given_rewards(pool, [1.0, None, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    frame = scored.to_frame()
    assert len(frame) == 8 and frame["mean_logp"].notna().all()
    assert frame["length"].tolist() == [len(r.token_ids) for r in pool] and pool.tokens == frame["length"].sum()
    assert frame["prompt"].tolist() == [pool.problem(r.problem).prompt for r in pool]
    metrics = scored.metrics("qwen3-sums")
    assert metrics["reward"] == pytest.approx(1 / 3) and metrics["status_unscorable"] == 0.25
    assert metrics["equal_reward_prompts"] == 1.0 and scored.metrics("llama-differences")["equal_reward_prompts"] == 0.5
    assert scored.restricted_to("llama-differences").agents == ("llama-differences",)
    assert len(scored.restricted_to("llama-differences")) == 4


def test_pool_metrics_count_disputed_verdicts(pool):
    texts = [r"\boxed{2}", r"\boxed{2.0}", r"\boxed{3}", "2"]
    golds = [pool.problem(r.problem).gold for r in pool.by_source["qwen3-sums"]]
    rollouts = [
        replace(r, text=t.replace("2", g)) for r, t, g in zip(pool.by_source["qwen3-sums"], texts, golds, strict=True)
    ]
    own = hk.reward(replace(pool.restricted_to("qwen3-sums"), rollouts=tuple(rollouts)))
    assert [r.status for r in own] == ["correct", "correct", "wrong", "no_answer"]
    assert [disputed(r.text, g, r.status) for r, g in zip(own, golds, strict=True)] == [False, True, False, False]
    assert own.metrics("qwen3-sums")["share_disputed"] == 0.25
    unpaid = own.with_rewards([0.0] * 4, ["wrong"] * 4)
    assert unpaid.metrics("qwen3-sums")["share_disputed"] == 0.25  # the first: the texts are equal
    assert pool.metrics("qwen3-sums")["share_disputed"] == 0  # nothing is scored yet
