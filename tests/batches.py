"""Pools with given rewards and the batches of learners, for tests of records and encoding."""

import hacpo_kit as hk


def with_given_rewards(pool, rewards=None):
    """Return the pool with these rewards; default: 1, 0, 1, 0, …."""
    rewards = [float(i % 2 == 0) for i in range(len(pool))] if rewards is None else rewards
    return pool.with_rewards(rewards, ["unscorable" if r is None else "correct" if r else "wrong" for r in rewards])


def batch_of(agent, pool, **options):
    """Return the learner's batch of a pool."""
    pool = pool if pool.rollouts[0].status != "unscored" else with_given_rewards(pool)
    return hk.advantage(pool, agent, hk.Capability().observe(pool), hk.Config(**options))
