"""The settings under the recipe's names."""

import doctest
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verl_recipe import ACTOR, OPTIM, REF, ROLLOUT, export, read

import hacpo_kit as hk
from hacpo_kit.advantages import FLOOR, STD_GUARD
from hacpo_kit.export import overrides
from hacpo_kit.export.overrides import RECIPE, SETTINGS, hydra

# another value for every setting that the recipe has
OTHER = {
    "seed": 7, "prompts_per_step": 64, "n": 4, "oversample": 2, "temperature": 0.7, "max_new_tokens": 40, "rollout_batch": 96,
    "window": 3, "binary_guard": False, "alpha": 2.5, "delta": 0.8, "delta_step": 0.01, "eps_low": 1e-5,
    "eps_high": math.inf, "beta": 0.001, "minibatch": 64, "equal_updates": True, "microbatch_tokens": 5000, "lr": 1e-6,
    "warmup": 10, "beta1": 0.85, "beta2": 0.999, "adam_eps": 1e-10, "weight_decay": 0.05, "max_grad_norm": math.inf,
}  # fmt: skip


def test_overrides_map_every_setting_or_name_its_fixed_value(tmp_path):
    assert set(hk.Config.model_fields) == set(SETTINGS)
    for name, entry in SETTINGS.items():
        assert bool(entry["names"]) != bool(entry["remark"] and "only" in entry), name
    export(tmp_path / "out")
    table = (tmp_path / "out" / "mapping.md").read_text()
    assert set(SETTINGS) == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_overrides_fix_the_constants_of_this_package():
    fixed = {name: entry["value"] for name, entry in RECIPE["fixed"].items()}
    assert (fixed["hacpo.capability.minimum"], fixed["hacpo.advantage.epsilon"]) == (FLOOR, STD_GUARD)
    assert not set(fixed) & {name for entry in SETTINGS.values() for name in entry["names"]}


def test_overrides_keep_all_values(tmp_path):
    config = hk.Config(**OTHER)
    written = export(tmp_path / "out", config)
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
    assert {name: written[name] for name in expected} == expected
    assert "\nhacpo.loss.max_abs_log_ratio=null\n" in (tmp_path / "out" / "overrides.txt").read_text()
    assert hk.Config.from_dict(json.loads((tmp_path / "out" / "config.json").read_text())) == config


@pytest.mark.parametrize("setting", OTHER)
def test_overrides_of_a_setting_are_independent_of_other_settings(tmp_path, setting):
    other = {setting: 64 if setting == "n" else OTHER[setting]}
    before = export(tmp_path / "before", hk.Config(n=16, oversample=1))
    after = export(tmp_path / "after", hk.Config(**{"n": 16, "oversample": 1, **other}))
    changed = {name for name in before if before[name] != after[name]}
    # rollouts per problem change the unit of a mini-batch, and the response length the longest sequences
    derived = {
        "n": "ppo_mini_batch_size",
        "oversample": "ppo_mini_batch_size",
        "max_new_tokens": "max_model_len|response_length",
    }
    names = set(SETTINGS[setting]["names"])
    changed = {name for name in changed if name in names or not re.search(derived.get(setting, "^$"), name)}
    assert changed and changed <= names


def test_overrides_have_one_omega_for_baseline_and_update(tmp_path):
    written = export(tmp_path / "out", hk.Config(capability_baseline=False, discrepancy=False))
    assert written["hacpo.capability.ratio_min"] == written["hacpo.capability.ratio_max"] == 1.0


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"method": "grpo"}, {}, "'grpo': ratio='token'"),
        ({"method": "naive"}, {}, "peer_update='own'"),
        ({"method": "no_discrepancy"}, {}, "capability_baseline=True"),
        ({"cross_baseline": "source"}, {}, "cross_baseline='source'"),
        ({"exclude_solved": True}, {}, "exclude_solved=True"),
        ({"minibatch": 100}, {}, "minibatch=100"),
        ({"minibatch": 512}, {}, "minibatch can be 8, 16, 32, 64, 128, 256"),
        ({"minibatch": 256, "equal_updates": True}, {}, "minibatch can be 4, 8, 16, 32, 64, 128"),
        ({}, {"gpus": 6}, "among 6 GPUs"),
        ({"prompts_per_step": 5, "n": 3}, {}, "among 8 GPUs"),
        ({"microbatch_tokens": 40}, {}, "microbatch_tokens=40"),
    ],
)
def test_overrides_refuse(tmp_path, config, options, message):
    config = hk.Config.preset(config.pop("method", "hacpo"), **config)
    with pytest.raises(ValueError, match=re.escape(message)):
        export(tmp_path / "out", config, **options)
    assert not list(tmp_path.iterdir())


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(alphabet="ab\\'\"$ {}[],:=é-1\n"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b_1"]), inner, max_size=2),
    max_leaves=5,
))  # fmt: skip
def test_hydra_is_inverted_by_its_grammar(value):
    assert read(hydra(value)) == value


def test_hydra_docstring_example_holds():
    assert doctest.testmod(overrides).failed == 0
