"""What the recipe's hacpo_trainer.yaml and verl's ppo_trainer.yaml document, and a parser of Hydra's overrides."""

import re
from pathlib import Path

import hacpo_kit as hk
from hacpo_kit.export.verl import VerlOptions, export_verl

# name → type, at the commits of recipe.yaml; "+" is for a name below a documented free one (override_config)
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
    """The parsed overrides.txt of an export."""
    lines = [line for line in (Path(folder) / "overrides.txt").read_text().splitlines() if not line.startswith("#")]
    names = [line.split("=", 1)[0] for line in lines]
    assert len(set(names)) == len(names)
    return {name: read(line.split("=", 1)[1]) for name, line in zip(names, lines, strict=True)}


def export(out, config=None, problems=None, *, agents="tiny-model-pair", steps=3, test=None, **options):
    """Export a small run and return its overrides."""
    problems = hk.load_problems("arithmetic", size=80) if problems is None else problems
    export_verl(
        config or hk.Config(), problems, out, agents=agents, steps=steps, test=test, options=VerlOptions(**options)
    )
    return overrides(out)
