"""The metrics of a run, by their name in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hacpo_kit.advantages import Capability
from hacpo_kit.config import Config
from hacpo_kit.records import Batch, Pool, StepStats
from hacpo_kit.runs.exchange import peer_metrics

# A test checks that every metric in metrics.jsonl is listed here, and the other way round.
METRICS = {
    "step": "number of the step, from 1",
    "rollouts": "rollouts sampled for training so far, all agents together",
    "tokens": "tokens sampled for training so far, all agents together",
    "seconds": "wall time of the run so far, without interruptions (s)",
    "seconds_rollout": "time of sampling (s)",
    "seconds_scoring": "time to compute the sources' log-probabilities (s)",
    "seconds_reward": "time of the verifier (s)",
    "seconds_advantage": "time to build all learners' batches, including re-encoding (s)",
    "seconds_update": "time of forward, backward and optimiser, all learners (s)",
    "seconds_evaluation": "time of the evaluation after this step (s)",
    "omega": "capability ratio in this step: omega[k][j] = ω(k, j) = P̂(k) / P̂(j)",
    "reward": "mean reward of the agent's rollouts, without unscorable ones",
    "capability": "P̂: mean of the agent's mean rewards over the window",
    "length": "mean length of the agent's rollouts (tokens)",
    "share_cut": "share of the agent's rollouts that were cut at the length limit",
    "share_hazard": "share of the agent's rollouts that cannot be shared (lossy text or control tokens)",
    "share_disputed": "share of the agent's rollouts whose verdict differs from a comparison of boxed answer and gold as texts",
    "distinct_answers": "mean number of different boxed answers among the agent's rollouts for a problem",
    "equal_reward_prompts": "share of problems whose rewards are all equal for the agent: alone they contribute no gradient",
    "all_fail_prompts": "share of problems on which all the agent's rollouts fail (reward below 1)",
    "all_correct_prompts": "share of problems on which all the agent's rollouts succeed",
    "entropy": "entropy of the agent's own responses, estimated by the mean of −log π over sampled tokens (nats per token)",
    "rescuable/*": "share of problems on which all own rollouts fail and some, not all, of this peer's succeed",
    "discarded_problems": "problems sampled in this step and replaced, since all own rewards were equal; dynamic_sampling only",
    "rescued_prompts": "share of problems for which the learner takes a peer's group; only with share='rescue' or 'rescue_any'",
    "effective_sample_share/*": "(Σw)² / (N·Σw²) over this peer's rollouts in use; w: s^(1+α)·ω, 0 if clipped (gated: the gate)",
    "k3/*": "mean of s − 1 − ln s over this peer's rollouts in use, an estimate of KL(peer ‖ learner)",
    "chi2/*": "mean of (s − 1)² over this peer's rollouts in use, an estimate of χ²(learner ‖ peer)",
    "status_*": "share of the agent's rollouts with this verdict: correct, wrong, no_answer, timeout, error, unscorable",
    "engine_gap_mean": "distance between engine and trainer log-probabilities, mean over tokens (nats; also _max); with vLLM",
    "updates": "optimiser updates in this step",
    "rollouts_used": "rollouts in the learner's mini-batches",
    "loss": "mean loss of the mini-batches; close to zero on policy although its gradient is not",
    "grad_norm": "mean gradient norm before clipping to max_grad_norm",
    "lr": "learning rate of the last update",
    "kl": "KL to the initial policy on own rollouts (nats per token); only with beta > 0",
    "own_ratio_mean": "importance ratio s of own rollouts: mean (also _min, _max)",
    "peer_ratio_mean": "importance ratio s of peer rollouts: mean (also _min, _max)",
    "clip_own_low": "share of own rollouts clipped at a ratio below 1 (also _high); grpo: with a clipped token",
    "clip_peer_low": "share of peer rollouts below the clipping range (also clip_peer_high)",
    "peer_weight": "mean ω(source, learner) over the peer rollouts in use",
    "bytes_moved": "bytes moved between device and host since the last update, both ways; only with offload",
    "seconds_moving": "time of these moves (s); only with offload",
    "solved_prompts": "share of problems without gradient because all the learner's own rollouts solved them (exclude_solved)",
    "excluded_*": "rollouts excluded for this learner: unscorable, lossy_text, control_token, lossy_reencoding, too_long, empty, "
    "replaced, below_floor (gated), not_drawn (max_peer, nll), masked (mask_negative)",
    "avg@k": "evaluation: mean reward over k responses to each test problem (k written as its number)",
    "best@k": "evaluation: unbiased probability that at least one of k responses is correct (k written as its number)",
    "avg@k/*": "the same on a further test set, by its name; before training and at the end of the run",
    "best@k/*": "the same on a further test set, by its name; before training and at the end of the run",
}


def step_metrics(
    pool: Pool, capability: Capability, config: Config, batches: Mapping[str, Batch], stats: Mapping[str, StepStats]
) -> dict[str, Any]:
    """Return the metrics of a step, named as in METRICS."""
    known = [name for name in batches if name in capability]  # without a scorable rollout there is no capability
    of_agents = {name: {"capability": capability[name]} if name in known else {} for name in batches}
    for name, values in of_agents.items():
        values |= {**pool.metrics(name), **stats[name].metrics(), **peer_metrics(pool, stats[name], config)}
        if config.exclude_solved:
            values["solved_prompts"] = batches[name].solved_prompts / len(pool.problems)
    omega = {a: {b: capability.ratio(a, b) for b in known if b != a} for a in known}
    discarded = {"discarded_problems": pool.discarded.get("problems", 0)} if config.dynamic_sampling else {}
    return {"omega": omega, **discarded, "agents": of_agents}
