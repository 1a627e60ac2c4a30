"""export_verl() and `hacpo-kit export verl`: every setting arrives, under names that the authors' recipe documents."""

import ast
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import hacpo_kit as hk
from hacpo_kit.cli import main
from hacpo_kit.common.files import append_lines
from hacpo_kit.export.verl import FIXED, TARGETS, export_verl, hydra, of_parameters, of_run, plain_template

# What the recipe's hacpo_trainer.yaml and verl's ppo_trainer.yaml document, at the commits of export.RECIPE: name → type.
# "+" is for a name below one that is documented as free (override_config).
ACTOR, ROLLOUT, OPTIM, REF = (
    f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "actor.optim", "ref")
)  # fmt: skip
DOCUMENTED = {
    int: f"""data.seed data.train_batch_size data.gen_batch_size data.max_prompt_length data.max_response_length
        data.dataloader_num_workers hacpo.capability.window_size hacpo.capability.warmup_steps
        hacpo.trajectory.target_max_prompt_length hacpo.trajectory.target_max_response_length
        {ACTOR}.ppo_mini_batch_size {ACTOR}.ppo_max_token_len_per_gpu {ACTOR}.ppo_epochs {ACTOR}.data_loader_seed
        {ACTOR}.fsdp_config.seed {OPTIM}.lr_warmup_steps {REF}.log_prob_max_token_len_per_gpu
        {ROLLOUT}.log_prob_max_token_len_per_gpu {ROLLOUT}.seed {ROLLOUT}.n {ROLLOUT}.top_k {ROLLOUT}.max_num_seqs
        {ROLLOUT}.max_num_batched_tokens {ROLLOUT}.max_model_len {ROLLOUT}.tensor_model_parallel_size
        {ROLLOUT}.val_kwargs.n trainer.total_training_steps trainer.total_epochs trainer.test_freq trainer.save_freq
        trainer.n_gpus_per_node trainer.nnodes""",
    float: f"""hacpo.loss.self_clip_low hacpo.loss.self_clip_high hacpo.loss.cross_clip_delta hacpo.loss.cross_clip_step
        hacpo.loss.alpha hacpo.loss.max_abs_log_ratio hacpo.capability.minimum hacpo.capability.ratio_min
        hacpo.capability.ratio_max hacpo.advantage.epsilon {ACTOR}.kl_loss_coef {ACTOR}.entropy_coeff {OPTIM}.lr
        {OPTIM}.weight_decay {OPTIM}.clip_grad {ROLLOUT}.temperature {ROLLOUT}.top_p {ROLLOUT}.gpu_memory_utilization
        {ROLLOUT}.val_kwargs.temperature""",
    bool: f"""data.shuffle data.return_raw_chat data.filter_overlong_prompts data.validation_shuffle
        hacpo.advantage.normalize_by_std hacpo.advantage.binary_baseline_guard
        hacpo.advantage.disable_weighting_for_uniform_rewards algorithm.use_kl_in_reward {ACTOR}.use_kl_loss
        {ACTOR}.use_dynamic_bsz {ACTOR}.shuffle {ACTOR}.fsdp_config.param_offload {ACTOR}.fsdp_config.optimizer_offload
        {REF}.fsdp_config.param_offload {REF}.log_prob_use_dynamic_bsz {ROLLOUT}.log_prob_use_dynamic_bsz
        {ROLLOUT}.calculate_log_probs {ROLLOUT}.enforce_eager {ROLLOUT}.val_kwargs.do_sample
        actor_rollout_ref.model.enable_gradient_checkpointing actor_rollout_ref.model.use_remove_padding
        reward.reward_model.enable trainer.val_before_train""",
    str: f"""data.truncation hacpo.capability.metric hacpo.trajectory.overflow algorithm.adv_estimator
        {ACTOR}.loss_agg_mode {ACTOR}.kl_loss_type {OPTIM}.optimizer {OPTIM}.lr_scheduler_type {ROLLOUT}.name {ROLLOUT}.mode
        +actor_rollout_ref.model.override_config.attn_implementation reward.custom_reward_function.path
        reward.custom_reward_function.name trainer.project_name trainer.experiment_name trainer.default_local_dir
        hydra.run.dir""",
    list: f"""hacpo.agents data.train_files data.val_files {OPTIM}.betas {ACTOR}.checkpoint.save_contents trainer.logger""",
    dict: f"{OPTIM}.override_optimizer_config",
}
KIND_OF = {name: kind for kind, names in DOCUMENTED.items() for name in names.split()}
AGENT_KEYS = {"id", "model_path", "apply_chat_template_kwargs", "actor_rollout_ref"}


def read(text):
    """A value in the grammar of Hydra's overrides, as far as the export uses it."""
    value, rest = _read(text)
    assert not rest, text
    return value


def _read(text):
    if text.startswith(("[", "{")):
        close, items, text = {"[": "]", "{": "}"}[text[0]], [], text[1:]
        while text[0] != close:
            key, text = re.match(r"(?:(\w+):)?(.*)", text, re.DOTALL).groups() if close == "}" else (None, text)
            value, text = _read(text)
            items.append((key, value))
            text = text.removeprefix(",")
        return (dict(items) if close == "}" else [value for _, value in items]), text[1:]
    if text.startswith("'"):
        quoted, rest = re.match(r"'((?:[^\\']|\\+'|\\+(?!'))*?)(?<!\\)((?:\\\\)*)'(.*)", text, re.DOTALL), None
        inner, doubled, rest = quoted.groups()
        return re.sub(r"(\\+)'", lambda m: "\\" * (len(m[1]) // 2) + "'", inner) + doubled[: len(doubled) // 2], rest
    word, rest = re.match(r"([^,\]}]*)(.*)", text, re.DOTALL).groups()
    if word in ("null", "true", "false"):
        return {"null": None, "true": True, "false": False}[word], rest
    if re.fullmatch(r"-?\d+", word):
        return int(word), rest
    try:
        return float(word), rest
    except ValueError:
        assert re.fullmatch(r"[A-Za-z_][\w-]*", word, re.ASCII), word
        return word, rest


def overrides(folder):
    lines = [line for line in (Path(folder) / "overrides.txt").read_text().splitlines() if not line.startswith("#")]
    names = [line.split("=", 1)[0] for line in lines]
    assert len(set(names)) == len(names)
    return {name: read(line.split("=", 1)[1]) for name, line in zip(names, lines, strict=True)}


SMALL = {"agents": "tiny-model-pair", "steps": 3}


def exported(out, config=None, problems=None, **given):
    problems = hk.load_problems("arithmetic", size=80) if problems is None else problems
    export_verl(config or hk.Config(), problems, out, **{**SMALL, **given})
    return overrides(out)


@pytest.fixture
def checkout(tmp_path):
    """A folder that stands in for the recipe: its main writes down what it was called with."""
    recipe = tmp_path / "it's a checkout" / "recipe" / "hacpo"
    recipe.mkdir(parents=True)
    (recipe / "main_hacpo.py").write_text(
        "import os, sys\nprint(repr((sys.argv[1:], os.environ['TENSORBOARD_DIR'])))\n"
    )
    return recipe.parent.parent


def launch(out, checkout, *more, **variables):
    package = str(Path(hk.__file__).parents[1])
    environment = {**os.environ, "VERL": str(checkout), "PYTHON": sys.executable, "PYTHONPATH": package, **variables}
    return subprocess.run(
        ["bash", str(out / "launch.sh"), *more],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def calls(result):
    """The arguments of each job, parsed, and its folder of curves."""
    assert result.returncode == 0, result.stderr
    made = [ast.literal_eval(line) for line in result.stdout.splitlines()]
    return [{name: read(value) for name, value in (a.split("=", 1) for a in args)} for args, _ in made]


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_setting_is_mapped_or_said_to_be_fixed(tmp_path):
    settings = set(hk.Config.model_fields)
    assert settings == set(TARGETS)
    for name, target in TARGETS.items():
        assert target.names or (target.remark and target.fixed is not None), name
    exported(tmp_path / "out")
    table = (tmp_path / "out" / "mapping.md").read_text()
    assert settings == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_names_and_types_are_the_documented_ones(tmp_path, checkout):
    test = hk.load_problems("arithmetic", split="test", size=4)
    there = {**exported(tmp_path / "out", test=test), **calls(launch(tmp_path / "out", checkout))[0]}
    assert set(there) == set(KIND_OF)
    for name, value in there.items():
        assert value is None or type(value) is KIND_OF[name], (name, value)
    assert {name for target in TARGETS.values() for name in target.names} <= set(there)
    assert all(set(agent) <= AGENT_KEYS for agent in there["hacpo.agents"])


# another value for every setting that the recipe has
OTHER = {
    "seed": 7, "prompts_per_step": 64, "n": 4, "oversample": 2, "temperature": 0.7, "max_new_tokens": 40, "rollout_batch": 96,
    "window": 3, "binary_guard": False, "alpha": 2.5, "delta": 0.8, "delta_step": 0.01, "eps_low": 1e-5,
    "eps_high": math.inf, "beta": 0.001, "minibatch": 64, "equal_updates": True, "microbatch_tokens": 5000, "lr": 1e-6,
    "warmup": 10, "beta1": 0.85, "beta2": 0.999, "adam_eps": 1e-10, "weight_decay": 0.05, "max_grad_norm": math.inf,
}  # fmt: skip


def test_all_values_arrive_unchanged(tmp_path):
    config = hk.Config(**OTHER)
    there = exported(tmp_path / "out", config)
    expected = {
        "data.seed": 7, f"{ROLLOUT}.seed": 7, f"{ACTOR}.data_loader_seed": 7, f"{ACTOR}.fsdp_config.seed": 7,
        "data.train_batch_size": 64, "data.gen_batch_size": 64, f"{ROLLOUT}.n": 8, f"{ROLLOUT}.temperature": 0.7,
        "data.max_response_length": 40, f"{ROLLOUT}.max_num_seqs": 96, "hacpo.capability.window_size": 3,
        "hacpo.capability.ratio_min": 0.1, "hacpo.capability.ratio_max": 10.0,
        "hacpo.advantage.binary_baseline_guard": False, "hacpo.loss.alpha": 2.5, "hacpo.loss.cross_clip_delta": 0.8,
        "hacpo.loss.cross_clip_step": 0.01, "hacpo.loss.self_clip_low": 1e-5, "hacpo.loss.self_clip_high": math.inf,
        f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.001,
        f"{ACTOR}.ppo_mini_batch_size": 16,  # 64 rollouts × 2 agents (equal_updates) / 8 rollouts of a problem
        f"{ACTOR}.ppo_max_token_len_per_gpu": 5000, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 5000,
        f"{REF}.log_prob_max_token_len_per_gpu": 5000, f"{OPTIM}.lr": 1e-6, f"{OPTIM}.lr_warmup_steps": 10,
        f"{OPTIM}.betas": [0.85, 0.999], f"{OPTIM}.override_optimizer_config": {"eps": 1e-10},
        f"{OPTIM}.weight_decay": 0.05, f"{OPTIM}.clip_grad": math.inf,
    }  # fmt: skip
    assert {name: there[name] for name in expected} == expected
    text = (tmp_path / "out" / "overrides.txt").read_text()
    assert f"\n{OPTIM}.lr=1e-06\n" in text and "\nhacpo.loss.self_clip_high=inf\n" in text
    assert "\nhacpo.loss.max_abs_log_ratio=null\n" in text
    assert hk.Config.from_dict(json.loads((tmp_path / "out" / "config.json").read_text())) == config


@pytest.mark.parametrize("setting", OTHER)
def test_a_setting_changes_its_own_names_and_no_others(tmp_path, setting):
    """prompts and rollouts also change how a mini-batch is counted, and lengths how much room there is."""
    other = {setting: 64 if setting == "n" else OTHER[setting]}
    before = exported(tmp_path / "before", hk.Config(n=16, oversample=1))
    after = exported(tmp_path / "after", hk.Config(**{"n": 16, "oversample": 1, **other}))
    changed = {name for name in before if before[name] != after[name]}
    along = {
        "n": "ppo_mini_batch_size",
        "oversample": "ppo_mini_batch_size",
        "max_new_tokens": "max_model_len|response_length",
    }
    changed = {
        name for name in changed if name in TARGETS[setting].names or not re.search(along.get(setting, "^$"), name)
    }
    assert changed and changed <= set(TARGETS[setting].names)


def test_the_paper_s_pair_has_the_figures_of_the_recipe_s_launcher(tmp_path):
    given = of_parameters(
        {"agents": "a/qwen3-1.7b,b/qwen3-4b", "steps": "1", "delta": "0.2", "beta": "0.001"},
        pair="qwen3-1.7b-base + qwen3-4b-base",
    )
    export_verl(out=tmp_path / "out", **given)
    there = overrides(tmp_path / "out")
    launcher = {
        "data.train_batch_size": 128, f"{ACTOR}.ppo_mini_batch_size": 64, f"{ROLLOUT}.n": 8, "data.max_prompt_length": 1024,
        "data.max_response_length": 4096, "hacpo.trajectory.target_max_prompt_length": 1536, f"{OPTIM}.lr": 1e-6,
        f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.001, "hacpo.loss.self_clip_low": 0.0003,
        "hacpo.loss.self_clip_high": 0.0004, "hacpo.loss.cross_clip_delta": 0.2, "hacpo.loss.cross_clip_step": 0.025,
        "hacpo.loss.alpha": 1.0, "hacpo.capability.window_size": 5, f"{ROLLOUT}.max_model_len": 5120,
        f"{ROLLOUT}.temperature": 1.0, "trainer.n_gpus_per_node": 8, f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    }  # fmt: skip
    assert {name: there[name] for name in launcher} == launcher


def test_one_omega_for_baseline_and_update(tmp_path):
    off = hk.Config(capability_baseline=False, discrepancy=False)
    there = exported(tmp_path / "out", off)
    assert there["hacpo.capability.ratio_min"] == there["hacpo.capability.ratio_max"] == 1.0


def test_notes_name_what_differs_and_only_that(tmp_path):
    notes = export_verl(hk.Config(), hk.load_problems("arithmetic", size=80), tmp_path / "a", **SMALL)
    assert all(
        any(n.startswith(start) for n in notes) for start in ("count_eos=True", "minibatch_order='mixed'", "warmup=4")
    )
    alike = hk.Config(count_eos=False, minibatch_order="own_first", warmup=1)
    fewer = export_verl(alike, hk.load_problems("arithmetic", size=80), tmp_path / "b", **SMALL)
    assert set(fewer) < set(notes) and len(fewer) == len(notes) - 3
    assert all(f"- {note}" in (tmp_path / "b" / "mapping.md").read_text() for note in fewer)
    assert overrides(tmp_path / "b")[f"{OPTIM}.lr_warmup_steps"] == 0


# ── problems ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_prompts_in_the_order_of_a_run_here(tmp_path):
    problems = hk.load_problems("arithmetic", size=50)  # 3 steps of 32 cross the border of an epoch
    test = hk.load_problems("arithmetic", split="test", size=6)
    there = exported(tmp_path / "out", hk.Config(seed=3), problems, test=test, eval_every=2, eval_k=4)
    table = pd.read_parquet(tmp_path / "out" / "train.parquet")
    assert list(table.columns) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    drawn = [p for step in range(3) for p in problems.batch(32 * step, 32, seed=3)]
    assert [row["id"] for row in table["extra_info"]] == [p.id for p in drawn]
    assert [row["index"] for row in table["extra_info"]] == list(range(96))
    assert [list(row) for row in table["prompt"]] == [[{"role": "user", "content": p.prompt}] for p in drawn]
    assert list(table["reward_model"]) == [{"style": "rule", "ground_truth": p.gold} for p in drawn]
    assert not there["data.shuffle"] and there["trainer.total_training_steps"] == 3
    table = pd.read_parquet(tmp_path / "out" / "test.parquet")
    assert [row["ground_truth"] for row in table["reward_model"]] == [p.gold for p in test]
    assert there["trainer.test_freq"] == 2 and there["trainer.val_before_train"]
    assert there[f"{ROLLOUT}.val_kwargs.n"] == 4 and there[f"{ROLLOUT}.val_kwargs.do_sample"]


def test_chat_messages_stay_and_the_longest_prompt_is_measured(tmp_path, tiny_agent):
    chatty = tiny_agent(positions=400)
    chatty.tokenizer.chat_template = "{{ tone }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    folder = chatty.save(tmp_path / "chatty")
    said = ({"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="})
    problems = hk.load_problems([hk.Problem(str(i), said, "2") for i in range(8)])
    config = hk.Config(prompts_per_step=8, minibatch=64)
    there = exported(tmp_path / "out", config, problems, agents=[folder], template={"tone": "kind"}, steps=1)
    assert [dict(m) for m in pd.read_parquet(tmp_path / "out" / "train.parquet")["prompt"][0]] == list(said)
    assert there["data.max_prompt_length"] == len("kind<system>Add.<user>1+1=")  # a byte is a token
    assert "apply_chat_template_kwargs:{tone:kind}" in (tmp_path / "out" / "launch.sh").read_text()


@pytest.mark.parametrize("name", ["qwen3-sums", "llama-differences"])
def test_the_plain_template_gives_the_tokens_of_a_plain_prompt(fresh_agent, name):
    agent = fresh_agent(name)
    for prompt in ("37+58=", "What is 3 <b> & 'x'?\n"):
        chat = [{"role": "user", "content": prompt}]
        text = agent.tokenizer.apply_chat_template(
            chat, chat_template=plain_template(agent.tokenizer), tokenize=False, add_generation_prompt=True
        )
        ids = agent.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tuple(ids) == agent.encode_prompt(prompt)


# ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_script_hands_over_everything_whatever_the_folders_are_called(tmp_path, checkout):
    out = tmp_path / 'it\'s $HOME "here"'
    written = exported(out, test=hk.load_problems("arithmetic", split="test", size=4))
    assert subprocess.run(["bash", "-n", str(out / "launch.sh")], check=False).returncode == 0
    moved = tmp_path / "o'ther"
    moved.mkdir()
    (moved / "config.json").write_text("{}")
    (job,) = calls(launch(out, checkout, "trainer.nnodes=2", "data.seed=9", MODEL_2=str(moved)))
    assert {**job, **written} == {**job, "data.seed": written["data.seed"], "trainer.nnodes": written["trainer.nnodes"]}
    assert (job["data.seed"], job["trainer.nnodes"]) == (9, 2)  # what is given last wins
    assert job["data.train_files"] == [str(out / "train.parquet")] and job["data.val_files"] == [
        str(out / "test.parquet")
    ]
    assert job["reward.custom_reward_function.path"] == str(out / "reward.py")
    assert job["trainer.default_local_dir"] == str(out / "out" / "hacpo" / "checkpoints")
    first, second = job["hacpo.agents"]
    assert first["id"] == "qwen3-sums" and (Path(first["model_path"]) / "model.safetensors").exists()
    assert second["id"] == "llama-differences" and second["model_path"] == str(moved)
    assert second["actor_rollout_ref"]["model"]["custom_chat_template"].startswith("{{ bos_token }}{% for")


def test_agents_that_do_not_share_are_jobs_one_after_the_other(tmp_path, checkout):
    there = exported(tmp_path / "out", hk.Config.preset("gspo_x2", minibatch=64))
    assert there[f"{ROLLOUT}.n"] == 16 and there[f"{ACTOR}.ppo_mini_batch_size"] == 4
    jobs = calls(launch(tmp_path / "out", checkout))
    assert [[agent["id"] for agent in job["hacpo.agents"]] for job in jobs] == [["qwen3-sums"], ["llama-differences"]]
    assert len({job["trainer.default_local_dir"] for job in jobs}) == 2
    # verl wants a file to evaluate on even where nothing is evaluated
    assert jobs[0]["data.val_files"] == jobs[0]["data.train_files"] and jobs[0]["trainer.test_freq"] == -1


def test_the_script_refuses_what_cannot_start(tmp_path, checkout):
    exported(tmp_path / "out")
    for variables, message in (
        ({"VERL": str(tmp_path)}, "holds no recipe/hacpo; set VERL"),
        ({"MODEL_1": "/no/such/model"}, "there is no model in /no/such/model"),
        ({"REWARD": str(tmp_path / "none.py")}, "none.py cannot be loaded"),
        ({"PYTHON": "no-such-python"}, "there is no no-such-python"),
    ):
        result = launch(tmp_path / "out", checkout, **variables)
        assert result.returncode == 2 and message in result.stderr and not result.stdout, (variables, result)


def test_the_reward_pays_what_was_paid_here(tmp_path):
    exported(tmp_path / "out")
    pay = runpy.run_path(str(tmp_path / "out" / "reward.py"))["compute_score"]
    assert pay("arithmetic", r"so \boxed{95}", "95", {"index": 0}) == 1.0
    assert pay(data_source="x", solution_str=r"\boxed{94}", ground_truth="95", extra_info=None, more=1) == 0.0
    assert pay("x", "95", "95") == 0.0 and pay("x", r"\boxed{1}", " ") == 0.0


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(alphabet="ab\\'\"$ {}[],:=é-1\n"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b_1"]), inner, max_size=2),
    max_leaves=5,
))  # fmt: skip
def test_values_survive_the_grammar(value):
    assert read(hydra(value)) == value


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        ({"method": "grpo"}, {}, "method 'grpo' is not one that the recipe can do: ratio='token'"),
        ({"method": "naive"}, {}, "peer_update='own'"),
        ({"method": "no_discrepancy"}, {}, "capability_baseline=True (the recipe has one ω"),
        ({"cross_baseline": "source"}, {}, "cross_baseline='source'"),
        ({"exclude_solved": True}, {}, "exclude_solved=True (ours"),
        ({"minibatch": 100}, {}, "minibatch=100: in the recipe all 8 rollouts of a problem are in one update"),
        ({"minibatch": 512}, {}, "minibatch can be 8, 16, 32, 64, 128, 256"),
        ({"minibatch": 256, "equal_updates": True}, {}, "minibatch can be 4, 8, 16, 32, 64, 128"),
        ({}, {"gpus": 6}, "prompts_per_step=32 with 8 rollouts of each cannot be divided among 6 GPUs"),
        ({"prompts_per_step": 5, "n": 3}, {}, "cannot be divided among 8 GPUs"),
        ({"microbatch_tokens": 40}, {}, "microbatch_tokens=40: in verl a prompt and an answer must fit in"),
        ({"max_new_tokens": 300}, {}, "reads 256 tokens; prompts of 7 and answers of 300"),
        ({"prompts_per_step": 128}, {}, "a batch of 128 would repeat problems"),
        ({}, {"max_prompt_tokens": 5}, "max_prompt_tokens=5, but the longest prompt has 7 tokens"),
        ({}, {"steps": 0}, "steps=0: it must be at least 1"),
        ({}, {"gpus": 0}, "gpus=0"),
        ({}, {"agents": []}, "no agents given"),
        ({}, {"agents": ["qwen3-sums", "qwen3-sums"]}, "agents need different names"),
        ({}, {"agents": [{"name": "mine", "origin": None}]}, "agent 'mine' came from memory; save it"),
        ({}, {"agents": [{"name": "far", "origin": "a/far", "prompt_format": "plain"}]}, "agent 'far' takes plain prompts"),
        ({}, {"agents": [{"name": "thin", "origin": "a/b", "lora": {"r": 8}}]}, "agent 'thin' was loaded with lora, which"),
        ({}, {"agents": ["./nowhere"]}, "there is no folder"),
        ({}, {"test": [hk.Problem("x", "?", "")]}, "test: 1 of 1 have no gold ('x')"),
        ({}, {"problems": [hk.Problem("y", "?", "")]}, "problems: 1 of 1 have no gold ('y')"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*no gold")
def test_what_cannot_be_exported_is_named_and_leaves_nothing(tmp_path, config, given, message):
    config = hk.Config.preset(config.get("method", "hacpo"), **{k: v for k, v in config.items() if k != "method"})
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        exported(tmp_path / "out", config, **given)
    assert not list(tmp_path.iterdir())


def test_messages_that_an_agent_or_the_recipe_cannot_take(tmp_path):
    for said, message in (
        (
            {"role": "user", "content": "1+1="},
            "agent 'qwen3-sums' has no chat template, but problem 'x' is a list of messages",
        ),
        ({"role": "user", "content": "1+1=", "name": "me"}, "messages of role and content only, not ['name']"),
    ):
        agents = ["a/far"] if "name" in said else "tiny-model-pair"
        with pytest.raises(ValueError, match=re.escape(message)):
            exported(
                tmp_path / "out",
                hk.Config(prompts_per_step=1, minibatch=8),
                [hk.Problem("x", (said,), "2")],
                agents=agents,
            )
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    exported(tmp_path / "out")  # empty: it may be filled
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        exported(tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    import pyarrow.parquet

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    with pytest.raises(OSError, match="no space left"):
        exported(tmp_path / "out")
    assert not list(tmp_path.iterdir())


# ── from a run, and from the command line ────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one small step, as it lies in its folder."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = hk.Config(prompts_per_step=8, n=4, minibatch=16, max_new_tokens=4, alpha=2.0)
    test = hk.load_problems("arithmetic", split="test", size=4)
    hk.train(
        hk.load_agents("tiny-model-pair"),
        hk.load_problems("arithmetic"),
        config,
        1,
        out=folder,
        test=test,
        progress="off",
    )
    return folder


def command(*args):
    return CliRunner().invoke(main, ["export", "verl", *map(str, args)], catch_exceptions=False)


def test_a_run_is_exported_as_it_was_and_p_wins(run, tmp_path):
    result = command(tmp_path / "out", "--run", run, "-p", "lr", "1e-6", "-p", "steps", "2", "--gpus", "4")
    assert result.exit_code == 0, result.output
    assert "note      count_eos=True" in result.output and "launch.sh" in result.output
    there = overrides(tmp_path / "out")
    assert (there["hacpo.loss.alpha"], there[f"{OPTIM}.lr"], there["trainer.total_training_steps"]) == (2.0, 1e-6, 2)
    assert there["trainer.n_gpus_per_node"] == 4 and len(pd.read_parquet(tmp_path / "out" / "train.parquet")) == 16
    launch = (tmp_path / "out" / "launch.sh").read_text()
    assert "id:qwen3-sums" in launch and "id:llama-differences" in launch


def test_a_run_that_cannot_be_told_again(run, tmp_path):
    record, folder = json.loads((run / "run.json").read_text()), tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_bytes((run / "config.json").read_bytes())

    def refused(message, values=None, **changes):
        (folder / "run.json").write_text(json.dumps({**record, **changes}))
        with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
            of_run(folder, values)

    refused("was paid by mine", reward_function="mine")
    refused("the problems of run", problems={**record["problems"], "source": None})
    refused("are not what they were", problems={**record["problems"], "fingerprint": "0"})
    refused("unknown parameter 'alhpa'; did you mean 'alpha'?", {"alhpa": 1})
    append_lines(folder / "changes.jsonl", [{"step": 1, "from_step": 2, "setting": "lr", "old": 1e-4, "new": 1e-5}])
    refused("changed lr on its way")
    assert of_run(folder, {"lr": "1e-5"})["config"].lr == 1e-5
    with pytest.raises(FileNotFoundError, match="holds no run"):
        of_run(tmp_path)


def test_the_command_says_what_is_wrong_in_one_line(tmp_path):
    for args, message in (
        (("-p", "alhpa", "1"), "unknown parameter 'alhpa'"),
        (("--pair", "qwen3-1.7b"), "unknown pair 'qwen3-1.7b'"),
        (("--template", "{x"), "template='{x'"),
        (("--run", tmp_path, "--pair", "x"), "--run and --pair: give one of them"),
        (("-p", "method", "naive"), "method 'naive' is not one that the recipe can do"),
    ):
        result = command(tmp_path / "out", *args)
        assert result.exit_code == 2 and message in result.output and result.output.count("\n") == 1, result.output
    assert not list(tmp_path.iterdir())


def test_a_pair_leaves_an_ablation_what_defines_it():
    pair = "qwen3-4b-base + qwen3-8b-base"
    assert of_parameters({"method": "alpha=0"}, pair)["config"].alpha == 0
    config = of_parameters({"delta": "0.5"}, pair)["config"]
    assert (config.alpha, config.delta, config.lr) == (3.0, 0.5, 1e-6)


def test_fixed_values_are_given_once():
    assert not set(FIXED) & {name for target in TARGETS.values() for name in target.names}
