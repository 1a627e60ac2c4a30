"""A run's settings under the names of the authors' recipe, in the grammar of Hydra's overrides.

recipe.yaml lists the names. The recipe implements HACPO for agents that share all rollouts: settings that it fixes are
exported with a note if they differ here, and refused if the run would be another method.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hacpo_kit.advantages import OMEGA_MAX, OMEGA_MIN
from hacpo_kit.config import Config

RECIPE = yaml.safe_load((Path(__file__).parent / "recipe.yaml").read_text(encoding="utf-8"))
SETTINGS = {name: {"names": [], "remark": "", **entry} for name, entry in RECIPE["settings"].items()}
# How much longer than here a peer response may be in the learner's tokens; the recipe's launcher has 3/2 for prompts
TOKENIZER_MARGIN = 1.5
_LAUNCHER_SETTINGS = ("method", "share")  # launch.sh sets their names
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def config_values(config: Config, agents: int, gpus: int) -> dict[str, Any]:
    """Return the overrides for the settings of Config, for jobs with this number of agents and GPUs.

    Raises ValueError for settings that the recipe does not implement or cannot divide among the GPUs.
    """
    _check_method(config, agents)
    names = {name: s for s, entry in SETTINGS.items() if s not in _LAUNCHER_SETTINGS for name in entry["names"]}
    with_omega = config.capability_baseline or config.discrepancy
    return {name: getattr(config, setting) for name, setting in names.items()} | {
        f"{_ROLLOUT}.n": config.rollouts_per_prompt,
        "hacpo.capability.ratio_min": OMEGA_MIN if with_omega else 1.0,
        "hacpo.capability.ratio_max": OMEGA_MAX if with_omega else 1.0,
        f"{_ACTOR}.use_kl_loss": config.beta > 0,
        f"{_ACTOR}.ppo_mini_batch_size": _problems_per_update(config, agents, gpus),
        f"{_ACTOR}.optim.lr_warmup_steps": config.warmup if config.warmup > 1 else 0,
        f"{_ACTOR}.optim.betas": [config.beta1, config.beta2],
        f"{_ACTOR}.optim.override_optimizer_config": {"eps": config.adam_eps},
    }


def run_values(config: Config, prompt_tokens: int, steps: int, eval_every: int | None, eval_k: int, save_every: int):
    """Return the overrides for lengths (tokens), steps, evaluations (None: none) and checkpoints."""
    lengths = [math.ceil(TOKENIZER_MARGIN * tokens) for tokens in (prompt_tokens, config.max_new_tokens)]
    if sum(lengths) > config.microbatch_tokens:
        raise ValueError(
            f"microbatch_tokens={config.microbatch_tokens}: in verl it has to hold a prompt and a response, which have up to "
            f"{sum(lengths)} tokens in another tokenizer"
        )
    return {
        "data.max_prompt_length": prompt_tokens,
        "hacpo.trajectory.target_max_prompt_length": lengths[0],
        "hacpo.trajectory.target_max_response_length": lengths[1],
        f"{_ROLLOUT}.max_model_len": prompt_tokens + config.max_new_tokens,
        f"{_ROLLOUT}.max_num_batched_tokens": max(8192, config.rollout_batch),
        f"{_ROLLOUT}.val_kwargs.n": eval_k,
        f"{_ROLLOUT}.val_kwargs.do_sample": eval_k > 1,
        f"{_ROLLOUT}.val_kwargs.temperature": 1.0 if eval_k > 1 else 0.0,
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": eval_every is not None,
        "trainer.test_freq": eval_every or -1,
        "trainer.save_freq": save_every,
    }


def differences(config: Config, agents: int, remote_models: Sequence[str]) -> list[str]:
    """Return a sentence for everything that the recipe does differently with this config."""
    applies = {
        "count_eos": config.count_eos,
        "minibatch_order": agents > 1 and config.minibatch_order == "mixed",
        "warmup": config.warmup > 1,
        "peer_responses": agents > 1,
        "verifier_errors": True,
        "many_agents": agents > 2,
        "separate_jobs": agents == 1,
        "remote_models": bool(remote_models),
        "precision": True,
    }
    values = {"warmup": config.warmup, "agents": agents, "models": ", ".join(remote_models)}
    return [text.format(**values) for name, text in RECIPE["differences"].items() if applies[name]]


def meaning(name: str) -> str:
    """Return the meaning of an override, or "" if its name says it."""
    settings = [setting for setting, entry in SETTINGS.items() if name in entry["names"]]
    if settings:
        return "; ".join(f"{setting}: {Config.model_fields[setting].description}" for setting in settings)
    return RECIPE["run"].get(name) or RECIPE["fixed"].get(name, {}).get("meaning", "")


def hydra(value: Any) -> str:
    r"""Return a value in the grammar of Hydra's overrides.

    >>> print(hydra([1e-6, float("inf"), None, True]), hydra({"eps": 1e-8, "path": "it's"}))
    [1e-06,inf,null,true] {eps:1e-08,path:'it\'s'}
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra, value)) + "]"
    reserved = ("null", "true", "false", "inf", "nan")
    if re.fullmatch(r"[A-Za-z_]\w*(-\w+)*", value, re.ASCII) and value.lower() not in reserved:
        return value
    # a backslash is literal, except before a quote
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value) + "'"


def _check_method(config: Config, agents: int) -> None:
    fixed = ["ratio", "updates_factor", "dynamic_sampling"]
    fixed += ["peer_update", "cross_baseline", "exclude_solved", "max_peer", "mask_negative"] if agents > 1 else []
    refused = [name for name in fixed if getattr(config, name) != SETTINGS[name]["only"]]
    refused += ["share"] if config.share.startswith("rescue") else []
    if agents > 1 and config.capability_baseline != config.discrepancy:
        refused.append("capability_baseline")
    if refused:
        reasons = "; ".join(f"{name}={getattr(config, name)!r} ({SETTINGS[name]['remark']})" for name in refused)
        raise ValueError(f"the recipe does not implement method {config.method!r}: {reasons}")


def _problems_per_update(config: Config, agents: int, gpus: int) -> int:
    """Return `minibatch` in the recipe's unit: the problems whose rollouts by one agent make an update."""
    rollouts, share = config.rollouts_per_prompt, agents if config.equal_updates else 1
    # an update has all rollouts of some problems by one agent, so it divides what that agent samples in a step
    divisors = [p for p in range(1, config.prompts_per_step + 1) if config.prompts_per_step % p == 0]
    sizes = [p * rollouts // share for p in divisors if p * rollouts % gpus == 0 and p * rollouts % share == 0]
    if config.minibatch not in sizes:
        raise ValueError(
            f"minibatch={config.minibatch}: the recipe puts all {rollouts} rollouts of a problem by one agent into one update "
            f"and divides it evenly among {gpus} GPUs; with prompts_per_step={config.prompts_per_step} minibatch can be "
            f"{', '.join(map(str, sizes)) or 'nothing: choose other numbers of prompts or GPUs'}"
        )
    return config.minibatch * share // rollouts
