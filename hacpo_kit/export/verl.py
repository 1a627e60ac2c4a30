"""Towards more GPUs: a run's settings, problems and agents as the authors' recipe on verl reads them.

    Config, problems, agents  →  overrides.txt, train.parquet, test.parquet, reward.py, launch.sh, mapping.md

The recipe is `recipe/hacpo` in the branch of github.com/zzx-peter/HACRL-code for verl's V1 trainer (`RECIPE` has the
commits whose names these are). It knows one algorithm, HACPO for agents that share everything. So settings come in three
kinds: those it has under another name, those it fixes (a config that differs is exported with a note), and those without
which the run would be another method (refused).
"""

from __future__ import annotations

import json
import math
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hacpo_kit.advantages import FLOOR, OMEGA_MAX, OMEGA_MIN, STD_GUARD
from hacpo_kit.common.files import read_lines
from hacpo_kit.config import METHODS, PAPER_PAIRS, PAPER_TRAINING, Config, coerce, did_you_mean
from hacpo_kit.experiments.notebooks import check_parameters
from hacpo_kit.models.agents import built_in_sets, locate
from hacpo_kit.runs.changes import FILE as CHANGES
from hacpo_kit.runs.checkpoints import read_record
from hacpo_kit.tasks.loading import load_problems
from hacpo_kit.tasks.problems import Problem, Problems

RECIPE = {
    "recipe": "github.com/zzx-peter/HACRL-code, commit 81e6c64f31e6935683f77b43a21d30036dfaf875",
    "verl": "github.com/verl-project/verl, commit bf48903d93e4618531d3bbae96551a889007dd8b",
}
LONGEST_PROMPT = 1024  # tokens, where no tokenizer is at hand to measure it: the paper's limit
_ACTOR, _ROLLOUT, _OPTIM = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "actor.optim"))


@dataclass(frozen=True)
class Target:
    """Where a setting of Config stands in the recipe; without names it has no place there, and is always as `fixed` says."""

    names: tuple[str, ...] = ()
    remark: str = ""
    fixed: Any = None


TARGETS: dict[str, Target] = {
    "method": Target(("trainer.experiment_name",), "a label; what the method is, the other settings say"),
    "sources": Target(
        ("hacpo.agents",), "all: one job with all agents; own: one job after the other, an agent in each"
    ),
    "seed": Target(
        ("data.seed", f"{_ROLLOUT}.seed", f"{_ACTOR}.data_loader_seed", f"{_ACTOR}.fsdp_config.seed"),
        "the random numbers are others; the problems come in the order of a run here (train.parquet, not shuffled)",
    ),
    "prompts_per_step": Target(("data.train_batch_size", "data.gen_batch_size")),
    "n": Target((f"{_ROLLOUT}.n",), "n × oversample"),
    "oversample": Target((f"{_ROLLOUT}.n",), "n × oversample"),
    "temperature": Target((f"{_ROLLOUT}.temperature",), "sampling and scoring, as here"),
    "max_new_tokens": Target(("data.max_response_length",)),
    "rollout_batch": Target((f"{_ROLLOUT}.max_num_seqs",), "sequences at once in each vLLM engine; memory only"),
    "window": Target(("hacpo.capability.window_size",)),
    "capability_baseline": Target(
        ("hacpo.capability.ratio_min", "hacpo.capability.ratio_max"),
        "the recipe has one ω for baseline and update: both on, or both off (ω clipped to [1, 1])",
    ),
    "binary_guard": Target(("hacpo.advantage.binary_baseline_guard",)),
    "cross_baseline": Target((), "the recipe gives a peer rollout the learner's baseline", "learner"),
    "discrepancy": Target(("hacpo.capability.ratio_min", "hacpo.capability.ratio_max"), "see capability_baseline"),
    "exclude_solved": Target((), "ours; the recipe has no such switch", False),
    "ratio": Target(
        (), "the recipe has the sequence-level ratio only; token level is verl's own trainer without it", "sequence"
    ),
    "peer_update": Target((), "the recipe clips peer rollouts to the clipping range", "hacpo"),
    "alpha": Target(("hacpo.loss.alpha",)),
    "delta": Target(("hacpo.loss.cross_clip_delta",)),
    "delta_step": Target(("hacpo.loss.cross_clip_step",)),
    "eps_low": Target(("hacpo.loss.self_clip_low",)),
    "eps_high": Target(("hacpo.loss.self_clip_high",)),
    "count_eos": Target((), "the recipe drops the end token of every answer that ended", False),
    "beta": Target((f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef"), "own rollouts only, as here"),
    "minibatch": Target((f"{_ACTOR}.ppo_mini_batch_size",), "in problems: rollouts / (n × oversample)"),
    "equal_updates": Target((f"{_ACTOR}.ppo_mini_batch_size",), "True: as many times larger as there are agents"),
    "minibatch_order": Target(
        (), "the recipe takes all own mini-batches first, in the order of the problems", "own_first"
    ),
    "microbatch_tokens": Target(
        (
            f"{_ACTOR}.ppo_max_token_len_per_gpu",
            f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        ),
        "for each GPU; memory only",
    ),
    "lr": Target((f"{_OPTIM}.lr",)),
    "warmup": Target(
        (f"{_OPTIM}.lr_warmup_steps",), "steps, as here; verl's rises from 0, so it is one step behind; 1 means none"
    ),
    "beta1": Target((f"{_OPTIM}.betas",)),
    "beta2": Target((f"{_OPTIM}.betas",)),
    "adam_eps": Target((f"{_OPTIM}.override_optimizer_config",), "passed on to torch.optim.AdamW"),
    "weight_decay": Target((f"{_OPTIM}.weight_decay",)),
    "max_grad_norm": Target((f"{_OPTIM}.clip_grad",)),
}

# What the recipe needs, or has as a setting where this package has a fixed rule: name → value, why
FIXED: dict[str, tuple[Any, str]] = {
    "hacpo.loss.max_abs_log_ratio": (None, "the log of the importance ratio is not clamped here"),
    "hacpo.capability.metric": ("reward_mean", "P̂ is the mean reward (eq. 8)"),
    "hacpo.capability.minimum": (FLOOR, "floor of P̂"),
    "hacpo.capability.warmup_steps": (0, "ω counts from the first step on"),
    "hacpo.advantage.normalize_by_std": (True, "advantages are divided by the joint standard deviation (eq. 7)"),
    "hacpo.advantage.epsilon": (STD_GUARD, "added to the standard deviation"),
    "hacpo.advantage.disable_weighting_for_uniform_rewards": (True, "equal rewards give advantage 0"),
    "hacpo.trajectory.overflow": ("truncate", "a longer peer answer is cut; here it is left out and counted"),
    "data.return_raw_chat": (True, "the recipe exchanges text"),
    "data.shuffle": (False, "train.parquet has the order of the run"),
    "data.filter_overlong_prompts": (True, "verl counts and leaves out what is longer; otherwise it would cut"),
    "data.truncation": ("error", ""),
    "data.dataloader_num_workers": (0, ""),
    "data.validation_shuffle": (False, ""),
    "algorithm.adv_estimator": ("grpo", "the recipe asks for it and computes its own advantages"),
    "algorithm.use_kl_in_reward": (False, "the KL is part of the loss"),
    f"{_ACTOR}.use_dynamic_bsz": (True, "micro-batches are bounded by tokens, as here"),
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": (True, ""),
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz": (True, ""),
    f"{_ACTOR}.ppo_epochs": (1, "each rollout is used once"),
    f"{_ACTOR}.shuffle": (False, "the recipe's order: own first"),
    f"{_ACTOR}.loss_agg_mode": ("seq-mean-token-mean", "mean over tokens, then over rollouts"),
    f"{_ACTOR}.kl_loss_type": ("low_var_kl", "the estimator used here"),
    f"{_ACTOR}.entropy_coeff": (0.0, "no entropy bonus"),
    f"{_OPTIM}.lr_scheduler_type": ("constant", "after the warm-up"),
    f"{_OPTIM}.optimizer": ("AdamW", ""),
    f"{_ACTOR}.fsdp_config.param_offload": (True, "the agents take turns on the GPUs"),
    f"{_ACTOR}.fsdp_config.optimizer_offload": (True, ""),
    "actor_rollout_ref.ref.fsdp_config.param_offload": (True, ""),
    f"{_ACTOR}.checkpoint.save_contents": (
        ["model", "optimizer", "extra", "hf_model"],
        "hf_model: folders that load_agent reads",
    ),
    "actor_rollout_ref.model.enable_gradient_checkpointing": (True, "memory only"),
    "actor_rollout_ref.model.use_remove_padding": (False, "memory only; true needs flash-attention"),
    "+actor_rollout_ref.model.override_config.attn_implementation": ("sdpa", "needs no further package"),
    f"{_ROLLOUT}.name": ("vllm", ""),
    f"{_ROLLOUT}.mode": ("async", ""),
    f"{_ROLLOUT}.calculate_log_probs": (False, "the trainer scores the rollouts, as here"),
    f"{_ROLLOUT}.top_p": (1.0, "plain sampling: nothing is cut off"),
    f"{_ROLLOUT}.top_k": (-1, ""),
    f"{_ROLLOUT}.tensor_model_parallel_size": (1, "one vLLM engine on each GPU"),
    f"{_ROLLOUT}.enforce_eager": (True, ""),
    f"{_ROLLOUT}.gpu_memory_utilization": (0.45, "as the recipe's launcher"),
    "reward.reward_model.enable": (False, "rewards come from reward.py"),
    "reward.custom_reward_function.name": ("compute_score", ""),
    "trainer.total_epochs": (2, "total_training_steps ends the run; this lets it, even if verl leaves out a prompt"),
    "trainer.project_name": ("hacpo_kit", ""),
    "trainer.logger": (["console", "tensorboard"], ""),
}  # fmt: skip

# How much longer a peer answer may be in the learner's tokens before the recipe cuts it; its launcher has 3/2 for prompts
ROOM = 1.5

REWARD = r'''"""The verifier that paid in hacpo_kit, as verl calls it. Needs hacpo_kit, math-verify and psutil, but not torch."""

import math_verify  # noqa: F401  here, so that a missing package is noticed before the run and not within it

from hacpo_kit.rewards import boxed_math


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    r"""1.0 for a right last \boxed{}, else 0.0; also where the verifier fails, which hacpo_kit would leave out."""
    return boxed_math(solution_str, ground_truth).reward or 0.0
'''

LAUNCH = r"""#!/usr/bin/env bash
# {title}, with the authors' HACPO recipe on verl; mapping.md says what each setting became.
#
#   VERL=path/to/HACRL-code bash launch.sh [further overrides, which win]
#
# VERL is a checkout of the recipe's branch for verl's V1 trainer, installed as its README says. The same command goes on
# from the last checkpoint. Written by `hacpo-kit export verl`.
set -euo pipefail

here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
VERL=${{VERL:-$PWD}}
PYTHON=${{PYTHON:-python3}}
OUT=${{OUT:-$here/out}}                # checkpoints and logs; relative paths start at VERL
REWARD=${{REWARD:-$here/reward.py}}    # or the recipe's own: REWARD=recipe/hacpo/math_reward.py
# The models; set the variable where one lies elsewhere on this machine
{models}

refuse() {{ echo "launch.sh: $*" >&2; exit 2; }}
quoted() {{ printf "'%s'" "${{1//\'/\\\'}}"; }}  # a path in Hydra's grammar

command -v "$PYTHON" >/dev/null || refuse "there is no $PYTHON; set PYTHON to the one verl is installed for"
[[ -f $VERL/recipe/hacpo/main_hacpo.py ]] || refuse "$VERL holds no recipe/hacpo; set VERL to a checkout of {recipe}"
cd -- "$VERL"
for model in {names}; do
  [[ -f $model/config.json ]] && continue
  [[ $model != /* ]] || refuse "there is no model in $model; set its variable MODEL_… to where it lies"
  "$PYTHON" -c 'import sys, transformers; transformers.AutoConfig.from_pretrained(sys.argv[1])' "$model" >/dev/null 2>&1 ||
    refuse "$model is no folder with a model, and cannot be had from the model hub; set its variable MODEL_… to a folder"
done
"$PYTHON" -c 'import runpy, sys; runpy.run_path(sys.argv[1])["compute_score"]' "$REWARD" >/dev/null ||
  refuse "$REWARD cannot be loaded; install hacpo_kit, math-verify and psutil for $PYTHON, or set REWARD"

mapfile -t overrides < <(grep -v '^#' "$here/overrides.txt")  # one override a line, each with its meaning above it
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 HYDRA_FULL_ERROR=1

run() {{  # name of the job, its agents, further overrides
  export TENSORBOARD_DIR=$OUT/$1/tensorboard
  "$PYTHON" -m recipe.hacpo.main_hacpo "${{overrides[@]}}" \
    "data.train_files=[$(quoted "$here/train.parquet")]" \
    "data.val_files=[$(quoted "$here/{test}")]" \
    "reward.custom_reward_function.path=$(quoted "$REWARD")" \
    "trainer.experiment_name=$(quoted "$1")" \
    "trainer.default_local_dir=$(quoted "$OUT/$1/checkpoints")" \
    "hydra.run.dir=$(quoted "$OUT/$1/hydra")" \
    "${{@:2}}"
}}
{runs}
"""


def export_verl(
    config: Config,
    problems: Sequence[Problem],
    out: str | Path,
    *,
    agents: str | Sequence[str | Path | Mapping[str, Any]],
    steps: int,
    test: Sequence[Problem] | None = None,
    eval_every: int = 4,
    eval_k: int = 1,
    save_every: int = 5,
    gpus: int = 8,
    nodes: int = 1,
    max_prompt_tokens: int | None = None,
    template: Mapping[str, Any] | None = None,
) -> list[str]:
    """Writes the folder `out` with which the authors' verl recipe makes this run; returns, in sentences, what differs there.

    `agents`: a built-in set, or sources as `load_agent` takes them, or the records of a run.json (name, origin,
    prompt_format, template). `template`: keywords for every chat template. train.parquet holds the problems of `steps`
    steps in the order of a run here. `gpus` are those of each of the `nodes`. `max_prompt_tokens`: default the longest
    prompt, at least 1024 if a model is not on this machine.

    Raises ValueError for a folder that is not empty, a problem without gold, and settings that the recipe does not have or
    cannot divide; FileNotFoundError for a folder without a model. Nothing is then written.
    """
    out, problems, test = Path(out), _as_problems(problems), None if test is None else _as_problems(test)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; choose another, or remove it first")
    counts = {"steps": steps, "eval_every": eval_every, "eval_k": eval_k, "save_every": save_every}
    for name, value in {**counts, "gpus": gpus, "nodes": nodes}.items():
        if value < 1:
            raise ValueError(f"{name}={value}: it must be at least 1")
    if test is not None and not test:
        raise ValueError("the test set holds no problems; leave it out to evaluate nothing")
    members = _members(agents, template or {})
    together = len(members) if config.sources == "all" else 1
    _check_method(config, together)
    _check_golds(problems, test)
    members = [_fitted(m, [*problems, *(test or ())]) for m in members]
    prompt = _longest_prompt(members, max_prompt_tokens, config)
    overrides = {
        **_of_config(config, together, gpus * nodes),
        **_of_run(config, prompt, steps, eval_every if test else None, eval_k, save_every),
        **FIXED,
        "trainer.n_gpus_per_node": (gpus, ""),
        "trainer.nnodes": (nodes, ""),
    }
    notes = _differences(config, members, together)
    each = config.prompts_per_step
    drawn = [p for step in range(steps) for p in problems.batch(step * each, each, seed=config.seed)]
    texts = {
        "config.json": json.dumps(config.to_dict(), indent=2) + "\n",
        "overrides.txt": _overrides_text(overrides),
        "reward.py": REWARD,
        "launch.sh": _launch(config, members, "test.parquet" if test else "train.parquet"),
        "mapping.md": _mapping(config, overrides, notes),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        _write_parquet(made / "train.parquet", drawn, problems.name, "train")
        if test:
            _write_parquet(made / "test.parquet", test, test.name, "test")
        for name, text in texts.items():
            (made / name).write_text(text, encoding="utf-8")
        (made / "launch.sh").chmod(0o755)
        made.replace(out)  # whole, or not there
    return notes


def of_parameters(values: Mapping[str, Any], pair: str | None = None) -> dict[str, Any]:
    """What `export_verl` takes, from the parameters of `hacpo-kit run`; `pair` gives the paper's settings beneath them.

    Raises ValueError for an unknown parameter or pair, and for a value that its parameter does not take.
    """
    beneath = {}
    if pair is not None:
        Config.preset("hacpo", pair=pair)  # refuses an unknown one
        fixed = METHODS.get(str(values.get("method", "hacpo")), {})  # alpha=0 stays 0 on every pair
        beneath = {n: v for n, v in {**PAPER_TRAINING, **PAPER_PAIRS[pair]}.items() if n not in fixed}
    e = check_parameters({**beneath, **values})
    return {
        "config": e.config(), "problems": e.problem_set(), "agents": e.sources(), "steps": e.steps, "test": e.test_set(),
        "eval_every": e.eval_every, "eval_k": e.eval_k, "save_every": e.save_every,
    }  # fmt: skip


def of_run(folder: str | Path, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `export_verl` takes, from a run folder: its agents as they were at its start; `values` win over its settings.

    Raises FileNotFoundError for a folder without a run; ValueError for a setting that changed within the run and is not among
    `values`, for a reward function of one's own, and for problems that came from memory or are no longer the same.
    """
    folder, values = Path(folder), dict(values or {})
    if not (folder / "run.json").exists():
        raise FileNotFoundError(f"{folder} holds no run: run.json is missing")
    record = read_record(folder)
    if record["reward_function"] != "boxed_math":
        raise ValueError(
            f"run {folder} was paid by {record['reward_function']}, which reward.py cannot call; give the parameters with -p "
            "instead of --run, and at the launch REWARD=FILE with a function compute_score as verl documents it"
        )
    if changed := {line["setting"] for line in read_lines(folder / CHANGES)} - set(values):
        raise ValueError(
            f"run {folder} changed {', '.join(sorted(changed))} on its way, and in verl a setting holds for the whole run; say "
            "with -p which value is meant"
        )
    kinds = {n: about.annotation for n, about in Config.model_fields.items()}
    kinds |= dict.fromkeys(("steps", "eval_every", "eval_k", "save_every"), int)
    for name in values:
        if name not in kinds:
            raise ValueError(
                f"unknown parameter {name!r}{did_you_mean(name, kinds)}; with a run, settings of Config and steps"
            )
    checked = {name: coerce(name, value, kinds[name]) for name, value in values.items()}
    config = Config.read(folder / "config.json")
    config = config.replace(**{n: v for n, v in checked.items() if n in Config.model_fields})
    run = {n: checked.get(n, record[n]) for n in ("steps", "eval_every", "eval_k", "save_every")}
    test = _again("test", record["test"], folder) if record["test"] else None
    problems = _again("problems", record["problems"], folder)
    return {"config": config, "problems": problems, "agents": record["agents"], "test": test, **run}


def _again(what: str, described: Mapping[str, Any], folder: Path) -> Problems:
    if described["source"] is None:
        raise ValueError(f"the {what} of run {folder} came from memory; call export_verl with them, from Python")
    problems = load_problems(**described["source"])
    if problems.fingerprint() != described["fingerprint"]:
        raise ValueError(
            f"the {what} of run {folder} are not what they were when it ran: {described['source']['source']}"
        )
    return problems


# ── agents and problems ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Member:
    """One agent: `path` is an absolute folder or a hub id; `chat` None means: as its tokenizer has it."""

    name: str
    path: str
    local: bool
    chat: bool | None
    keywords: Mapping[str, Any]  # for the chat template
    plain: str | None = None  # the chat template it gets in verl if it takes plain prompts
    longest: int | None = None  # tokens of its longest prompt; None: its tokenizer is not here


def _as_problems(problems: Sequence[Problem]) -> Problems:
    return problems if isinstance(problems, Problems) else load_problems(list(problems))


def _members(agents: str | Sequence[str | Path | Mapping[str, Any]], keywords: Mapping[str, Any]) -> list[_Member]:
    if isinstance(agents, str):
        sets = built_in_sets()
        agents = sets[agents]["agents"] if agents in sets else [agents]
    members = []
    for given in agents:
        record = given if isinstance(given, Mapping) else {"origin": given}
        if record["origin"] is None:
            raise ValueError(
                f"agent {record['name']!r} came from memory; save it with agent.save(folder), and give the folder"
            )
        if more := [option for option in ("lora", "revision") if record.get(option)]:
            raise ValueError(
                f"agent {record['name']!r} was loaded with {' and '.join(more)}, which the recipe does not take: it trains all "
                "weights of a folder or hub id as it is; save the agent with agent.save(folder), and give the folder"
            )
        path, local = locate(record["origin"])
        members.append(
            _Member(
                name=record.get("name") or Path(str(record["origin"])).name,
                path=str(Path(path).resolve()) if local else path,
                local=local,
                chat=record["prompt_format"] == "chat" if "prompt_format" in record else None,
                keywords={**(record.get("template") or {}), **keywords},
            )
        )
    if not members:
        raise ValueError("no agents given")
    names = [m.name for m in members]
    if len({name.casefold() for name in names}) < len(names):
        raise ValueError(
            f"agents need different names, which become folders of checkpoints in verl: {', '.join(names)}"
        )
    return members


def _check_golds(problems: Problems, test: Problems | None) -> None:
    for which, given in (("problems", problems), ("test", test)):
        if empty := [p.id for p in given or () if not p.gold]:
            raise ValueError(
                f"{which}: {len(empty)} of {len(given)} have no gold ({', '.join(map(repr, empty[:5]))}); verl would pay 0 for "
                "every answer to them: leave them out"
            )


def plain_template(tokenizer) -> str:
    """A chat template that gives the text of the messages and nothing else, behind a BOS if the tokenizer opens texts so.

    The recipe always applies a chat template. With this one it encodes a prompt as an agent with plain prompts does here.
    """
    bos = tokenizer.bos_token_id
    opens = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return "{{ bos_token }}" * opens + "{% for message in messages %}{{ message.content }}{% endfor %}"


def _fitted(member: _Member, problems: Sequence[Problem]) -> _Member:
    """The member with its plain template and the length of its longest prompt, where its tokenizer is on this machine."""
    if not member.local:
        if member.chat is False:
            raise ValueError(
                f"agent {member.name!r} takes plain prompts, for which its tokenizer is needed; give its folder"
            )
        return member
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(member.path, trust_remote_code=False)
    plain, how = None, member.keywords
    if not (bool(tokenizer.chat_template) if member.chat is None else member.chat):
        if chats := [p.id for p in problems if not isinstance(p.prompt, str)]:
            raise ValueError(
                f"agent {member.name!r} has no chat template, but problem {chats[0]!r} is a list of messages"
            )
        plain = plain_template(tokenizer)
        how = {"chat_template": plain}
    texts = [
        tokenizer.apply_chat_template(_messages(p), tokenize=False, add_generation_prompt=True, **how) for p in problems
    ]
    longest = max(map(len, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]))
    return replace(member, plain=plain, longest=longest)


def _longest_prompt(members: Sequence[_Member], given: int | None, config: Config) -> int:
    """The limit of a prompt in verl (tokens); raises ValueError if a prompt is longer, or a model cannot read so much."""
    measured = max((m.longest for m in members if m.longest is not None), default=1)
    if given is not None and given < measured:
        raise ValueError(f"max_prompt_tokens={given}, but the longest prompt has {measured} tokens")
    limit = given or (measured if all(m.local for m in members) else max(measured, LONGEST_PROMPT))
    for member in members:
        about = json.loads((Path(member.path) / "config.json").read_text(encoding="utf-8")) if member.local else {}
        readable = about.get("max_position_embeddings") or math.inf
        if limit + config.max_new_tokens > readable:
            raise ValueError(
                f"agent {member.name!r} reads {readable} tokens; prompts of {limit} and answers of {config.max_new_tokens} "
                "(max_new_tokens) do not fit"
            )
    return limit


def _messages(problem: Problem) -> list[dict[str, str]]:
    if isinstance(problem.prompt, str):
        return [{"role": "user", "content": problem.prompt}]
    if more := {key for message in problem.prompt for key in message} - {"role", "content"}:
        raise ValueError(
            f"problem {problem.id!r}: the recipe takes messages of role and content only, not {sorted(more)}"
        )
    return [{"role": m["role"], "content": m["content"]} for m in problem.prompt]


def _write_parquet(path: Path, problems: Sequence[Problem], name: str, split: str) -> None:
    """Prompts as verl's RLHFDataset documents them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": name,
            "prompt": _messages(p),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": p.gold},
            "extra_info": {"split": split, "index": index, "id": p.id},
        }
        for index, p in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_method(config: Config, together: int) -> None:
    """Refuses what would be another method there: without these settings the run is not the one that was tuned here."""
    shared = together > 1
    # what concerns peer rollouts says nothing where nobody shares
    lacking = ["ratio", *(("peer_update", "cross_baseline", "exclude_solved") if shared else ())]
    lacking = [name for name in lacking if getattr(config, name) != TARGETS[name].fixed]
    lacking += ["capability_baseline"] * (shared and config.capability_baseline != config.discrepancy)
    if told := [f"{name}={getattr(config, name)!r} ({TARGETS[name].remark})" for name in lacking]:
        raise ValueError(f"method {config.method!r} is not one that the recipe can do: {'; '.join(told)}")


def _of_config(config: Config, together: int, gpus: int) -> dict[str, tuple[Any, str]]:
    """The overrides that say what Config says, for jobs of so many agents and GPUs: name → value, meaning."""
    omega = (OMEGA_MIN, OMEGA_MAX) if config.capability_baseline or config.discrepancy else (1.0, 1.0)
    values = {
        **dict.fromkeys(TARGETS["seed"].names, config.seed),
        **dict.fromkeys(TARGETS["prompts_per_step"].names, config.prompts_per_step),
        f"{_ROLLOUT}.n": config.rollouts_per_prompt,
        f"{_ROLLOUT}.temperature": config.temperature,
        "data.max_response_length": config.max_new_tokens,
        f"{_ROLLOUT}.max_num_seqs": config.rollout_batch,
        "hacpo.capability.window_size": config.window,
        "hacpo.capability.ratio_min": omega[0],
        "hacpo.capability.ratio_max": omega[1],
        "hacpo.advantage.binary_baseline_guard": config.binary_guard,
        "hacpo.loss.alpha": config.alpha,
        "hacpo.loss.cross_clip_delta": config.delta,
        "hacpo.loss.cross_clip_step": config.delta_step,
        "hacpo.loss.self_clip_low": config.eps_low,
        "hacpo.loss.self_clip_high": config.eps_high,
        f"{_ACTOR}.use_kl_loss": config.beta > 0,
        f"{_ACTOR}.kl_loss_coef": config.beta,
        f"{_ACTOR}.ppo_mini_batch_size": _problems_per_update(config, together, gpus),
        **dict.fromkeys(TARGETS["microbatch_tokens"].names, config.microbatch_tokens),
        f"{_OPTIM}.lr": config.lr,
        f"{_OPTIM}.lr_warmup_steps": config.warmup if config.warmup > 1 else 0,
        f"{_OPTIM}.betas": [config.beta1, config.beta2],
        f"{_OPTIM}.override_optimizer_config": {"eps": config.adam_eps},
        f"{_OPTIM}.weight_decay": config.weight_decay,
        f"{_OPTIM}.clip_grad": config.max_grad_norm,
    }
    meanings = {name: about.description for name, about in Config.model_fields.items()}
    of = {name: [setting for setting, target in TARGETS.items() if name in target.names] for name in values}
    return {name: (v, "; ".join(f"{s}: {meanings[s]}" for s in of[name])) for name, v in values.items()}


def _problems_per_update(config: Config, together: int, gpus: int) -> int:
    """`minibatch` as the recipe counts it: of how many problems the rollouts by one agent make an update."""
    rollouts, share = config.rollouts_per_prompt, together if config.equal_updates else 1
    # an update has all rollouts of some problems by one agent, so it divides what that agent samples in a step
    divisors = [p for p in range(1, config.prompts_per_step + 1) if config.prompts_per_step % p == 0]
    sizes = [p * rollouts // share for p in divisors if p * rollouts % gpus == 0 and p * rollouts % share == 0]
    if not sizes:
        raise ValueError(
            f"prompts_per_step={config.prompts_per_step} with {rollouts} rollouts of each cannot be divided among {gpus} GPUs"
        )
    if config.minibatch not in sizes:
        raise ValueError(
            f"minibatch={config.minibatch}: in the recipe all {rollouts} rollouts of a problem are in one update, updates are of "
            f"one size, which {gpus} GPUs share evenly, and own and peer rollouts never share one; minibatch can be "
            f"{', '.join(map(str, sizes))}"
        )
    return config.minibatch * share // rollouts


def _of_run(config, prompt, steps, eval_every, eval_k, save_every) -> dict[str, tuple[Any, str]]:
    """The overrides that say how long and how often."""
    room = (math.ceil(ROOM * prompt), math.ceil(ROOM * config.max_new_tokens))
    if sum(room) > config.microbatch_tokens:
        raise ValueError(
            f"microbatch_tokens={config.microbatch_tokens}: in verl a prompt and an answer must fit in, with room for another "
            f"tokenizer {sum(room)} tokens"
        )
    return {
        "data.max_prompt_length": (prompt, "longest prompt (tokens)"),
        "hacpo.trajectory.target_max_prompt_length": (room[0], "room for other tokenizers"),
        "hacpo.trajectory.target_max_response_length": (room[1], "room for other tokenizers"),
        f"{_ROLLOUT}.max_model_len": (prompt + config.max_new_tokens, "prompt and answer (tokens)"),
        f"{_ROLLOUT}.max_num_batched_tokens": (max(8192, config.rollout_batch), "memory only"),
        f"{_ROLLOUT}.val_kwargs.n": (eval_k, "answers to each test problem"),
        f"{_ROLLOUT}.val_kwargs.do_sample": (eval_k > 1, "one answer is greedy"),
        f"{_ROLLOUT}.val_kwargs.temperature": (1.0 if eval_k > 1 else 0.0, ""),
        "trainer.total_training_steps": (steps, "steps"),
        "trainer.val_before_train": (eval_every is not None, ""),
        "trainer.test_freq": (eval_every or -1, "steps between evaluations; -1: none"),
        "trainer.save_freq": (save_every, "steps between checkpoints; the last step has one in any case"),
    }


def _differences(config: Config, members: Sequence[_Member], together: int) -> list[str]:
    """What this package does and the recipe does otherwise, one sentence each."""
    shared, far = together > 1, ", ".join(m.name for m in members if not m.local)
    told = {
        f"count_eos=True: {TARGETS['count_eos'].remark}; count_eos=False is the same in both": config.count_eos,
        f"minibatch_order='mixed': {TARGETS['minibatch_order'].remark}": shared and config.minibatch_order == "mixed",
        f"warmup={config.warmup}: in verl the learning rate is 0 in the first step and stays one step behind": config.warmup
        > 1,
        "Peer answers with control tokens or lossy text are used, longer ones cut; here both are left out": shared,
        "Where the verifier fails, an answer is paid 0; here it counts nowhere": True,
        f"{together} agents share: the recipe says that it supports two": together > 2,
        "Each agent is a job of its own, with nobody to share with: the recipe's loss is then GSPO's": not shared,
        f"Not on this machine, so neither prompts nor chat templates were looked at: {far}": bool(far),
        "Computed in bfloat16 with float32 weights, verl's default": True,
    }
    return [f"{sentence}." for sentence, holds in told.items() if holds]


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────


def hydra(value: Any) -> str:
    r"""A value in the grammar of Hydra's overrides.

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
    if re.fullmatch(r"[A-Za-z_]\w*(-\w+)*", value, re.ASCII) and value.lower() not in (
        "null",
        "true",
        "false",
        "inf",
        "nan",
    ):
        return value
    # a backslash stands for itself, but not in front of a quote
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value) + "'"


def _overrides_text(overrides: Mapping[str, tuple[Any, str]]) -> str:
    lines = ["# Hydra overrides for recipe.hacpo.main_hacpo; launch.sh reads them, and adds models and paths"]
    for name, (value, why) in overrides.items():
        lines += [f"# {why}"] * bool(why) + [f"{name}={hydra(value)}"]
    return "\n".join(lines) + "\n"


def _launch(config: Config, members: Sequence[_Member], test: str) -> str:
    variables = {m.name: f"MODEL_{number}" for number, m in enumerate(members, start=1)}
    together = {config.method: members}
    alone = {f"{config.method}-{m.name}": [m] for m in members}
    jobs = together if config.sources == "all" else alone  # alone: one job after the other, since each takes every GPU
    return LAUNCH.format(
        title=f"{config.method} with {', '.join(variables)}",
        recipe=RECIPE["recipe"],
        models="\n".join(
            f"{variables[m.name]}=${{{variables[m.name]}:-{shlex.quote(m.path)}}}  # {m.name}" for m in members
        ),
        names=" ".join(f'"${name}"' for name in variables.values()),
        test=test,
        runs="\n".join(f'run {shlex.quote(name)} {_agents_word(job, variables)} "$@"' for name, job in jobs.items()),
    )


def _agents_word(job: Sequence[_Member], variables: Mapping[str, str]) -> str:
    """The override of hacpo.agents as one word of bash, in which the models' paths are variables."""
    word, text = "", "hacpo.agents=["
    for member in job:
        word += shlex.quote(f"{text}{{id:{hydra(member.name)},model_path:") + f'"$(quoted "${variables[member.name]}")"'
        more: dict[str, Any] = {"apply_chat_template_kwargs": dict(member.keywords) or None}
        if member.plain:
            more["actor_rollout_ref"] = {"model": {"custom_chat_template": member.plain}}
        text = f",{hydra(more)[1:]},"
    return word + shlex.quote(f"{text[:-1]}]")


def _mapping(config: Config, overrides: Mapping[str, tuple[Any, str]], notes: Sequence[str]) -> str:
    """The table that maps every setting of Config, or says why the recipe has no place for it."""
    lines = [
        "# What each setting became",
        "",
        f"For the recipe at {RECIPE['recipe']}, made for {RECIPE['verl']}.",
        "The names and what they do were read there. No training was run with it.",
        "",
        "## What differs",
        "",
        *(f"- {note}" for note in notes),
        "",
        "## Settings of Config",
        "",
        "| setting | here | in the recipe | remark |",
        "|---|---|---|---|",
    ]
    stored = config.to_dict()
    for setting in Config.model_fields:
        target = TARGETS[setting]
        there = [f"`{n}={hydra(overrides[n][0])}`" if n in overrides else f"`{n}`" for n in target.names]
        where = ", ".join(there) or f"not mappable: always {target.fixed}"
        lines.append(f"| `{setting}` | {stored[setting]} | {where} | {target.remark} |")
    beside = {n: given for n, given in overrides.items() if not any(n in t.names for t in TARGETS.values())}
    lines += ["", "## What the recipe is told besides", "", "| name | value | why |", "|---|---|---|"]
    lines += [f"| `{name}` | {hydra(value)} | {why} |" for name, (value, why) in beside.items()]
    return "\n".join(lines) + "\n"


__all__ = ["export_verl", "of_parameters", "of_run"]
