"""Config: methods, the paper's pairs, types and ranges, the stored form."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hacpo_kit as hk
from hacpo_kit.config import METHODS, PAPER_PAIRS, coerce, did_you_mean

DEFAULT = hk.Config()
NAMES = [f.name for f in dataclasses.fields(hk.Config)]


# ── methods and pairs ────────────────────────────────────────────────────────────────────────────────────────────


def test_numpys_numbers_are_numbers_and_stored_as_such(tmp_path):
    config = hk.Config(n=np.int64(4), minibatch=np.float64(8), lr=np.float64(1e-5), delta=np.int32(1))
    assert config == hk.Config(n=4, minibatch=8, lr=1e-5, delta=1)
    assert all(type(getattr(config, name)) in (int, float) for name in ("n", "minibatch", "lr", "delta"))
    with pytest.raises(ValueError, match="it takes a number, not bool"):
        hk.Config(lr=np.bool_(True))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("hacpo", {}),
        ("gspo", {"sources": "own"}),
        ("gspo_x2", {"sources": "own", "oversample": 2}),
        ("grpo", {"sources": "own", "ratio": "token", "eps_low": 0.2, "eps_high": 0.28}),
        ("naive", {"capability_baseline": False, "discrepancy": False, "peer_update": "own"}),
        ("no_capability_baseline", {"capability_baseline": False}),
        ("no_discrepancy", {"discrepancy": False}),
        ("alpha=0", {"alpha": 0.0}),
        ("delta_step=0", {"delta_step": 0.0}),
        ("no_clip", {"delta": 1.0, "delta_step": 0.0}),
        ("hacpo_equal", {"equal_updates": True}),
    ],
)
def test_a_preset_differs_from_the_default_in_its_own_settings_alone(method, settings):
    changed = DEFAULT.differences(hk.Config.preset(method))
    changed.pop("method", None)
    assert {name: new for name, (_, new) in changed.items()} == settings
    assert hk.Config.preset(method).method == method and method in METHODS


def test_the_defaults_are_the_documented_ones():
    documented = {
        "alpha": 1.0,
        "delta": 0.2,
        "delta_step": 0.025,
        "window": 5,
        "n": 8,
        "eps_low": 3e-4,
        "eps_high": 4e-4,
    }
    documented |= {"count_eos": True, "beta": 0.0, "cross_baseline": "learner", "temperature": 1.0, "method": "hacpo"}
    assert {name: getattr(DEFAULT, name) for name in documented} == documented


@pytest.mark.parametrize(
    ("pair", "alpha", "delta", "delta_step"),
    [
        ("qwen3-4b + qwen3-4b-instruct", 3.0, 0.8, 0.01),
        ("qwen3-1.7b-base + qwen3-4b-base", 1.0, 0.8, 0.025),
        ("qwen3-4b-base + qwen3-8b-base", 3.0, 0.8, 0.025),
        ("llama3.2-1b-instruct + llama3.2-3b-instruct", 1.0, 0.9, 0.01),
        ("qwen3-1.7b-base + llama3.2-1b-instruct", 1.0, 0.8, 0.025),
        ("qwen3-4b-base + llama3.2-3b-instruct", 1.0, 0.8, 0.025),
    ],
)
def test_the_papers_pairs_have_the_papers_values(pair, alpha, delta, delta_step):
    config = hk.Config.preset("hacpo", pair=pair)
    assert (config.alpha, config.delta, config.delta_step) == (alpha, delta, delta_step)
    # 128 prompts a step, mini-batches of 64 prompts with 8 rollouts each, T = 1, lr 1e-6
    assert (config.prompts_per_step, config.n, config.minibatch) == (128, 8, 64 * 8)
    assert (config.lr, config.temperature, config.max_new_tokens) == (1e-6, 1.0, 4096)


def test_every_pair_is_tested_above():
    assert len(PAPER_PAIRS) == 6


def test_a_methods_own_settings_win_over_the_pairs_and_overrides_win_over_both():
    pair = "qwen3-4b + qwen3-4b-instruct"
    ablation = hk.Config.preset("alpha=0", pair=pair)
    assert (ablation.alpha, ablation.delta, ablation.delta_step) == (0.0, 0.8, 0.01)
    assert hk.Config.preset("no_clip", pair=pair).delta == 1.0
    assert hk.Config.preset("alpha=0", pair=pair, alpha=2, n=4).alpha == 2.0
    assert hk.Config.preset("gspo_x2", n=4).rollouts_per_prompt == 8


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_unknown_names_come_with_a_suggestion():
    with pytest.raises(TypeError, match="unknown setting 'detla'; did you mean 'delta'"):
        hk.Config.preset("hacpo", detla=0.2)
    with pytest.raises(TypeError, match=r"unknown setting 'learning_speed'$"):
        hk.Config.from_dict({"learning_speed": 1})
    with pytest.raises(TypeError, match="unknown setting 'aplha'; did you mean 'alpha'"):
        DEFAULT.replace(aplha=1)
    with pytest.raises(ValueError, match=r"unknown method 'gspo-x2'; did you mean 'gspo_x2'\?; there are hacpo, gspo"):
        hk.Config.preset("gspo-x2")
    with pytest.raises(ValueError, match=r"unknown pair 'qwen3-4b-base \+ qwen3-8b'; did you mean 'qwen3-4b-base"):
        hk.Config.preset("hacpo", pair="qwen3-4b-base + qwen3-8b")


def test_did_you_mean_is_silent_when_nothing_is_near():
    assert did_you_mean("dleta", ["delta", "alpha"]) == "; did you mean 'delta'?"
    assert did_you_mean("xyz", ["delta", "alpha"]) == ""


# ── types and ranges ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 0, "n=0: it must be at least 1"),
        ("prompts_per_step", 0, "at least 1"),
        ("oversample", 0, "at least 1"),
        ("max_new_tokens", 0, "at least 1"),
        ("window", 0, "at least 1"),
        ("minibatch", 0, "at least 1"),
        ("microbatch_tokens", 0, "at least 1"),
        ("alpha", -0.1, "alpha=-0.1: it must be 0 or more"),
        ("delta_step", -0.1, "0 or more"),
        ("eps_low", -1e-9, "0 or more"),
        ("eps_high", -1e-9, "0 or more"),
        ("beta", -1, "0 or more"),
        ("weight_decay", -1, "0 or more"),
        ("warmup", -1, "0 or more"),
        ("adam_eps", 0, "above 0"),
        ("lr", -1, "0 or more"),
        ("lr", math.inf, "finite"),
        ("alpha", math.inf, "finite"),
        ("delta_step", math.inf, "finite"),
        ("delta", 1.1, "delta=1.1: it must be between 0 and 1"),
        ("delta", -0.1, "between 0 and 1"),
        ("temperature", 0, "temperature=0.0: it must be above 0"),
        ("temperature", math.inf, "finite"),
        ("max_grad_norm", 0, "above 0"),
        ("beta1", 1.0, r"in \[0, 1\)"),
        ("beta2", -0.1, r"in \[0, 1\)"),
        ("lr", math.nan, "lr is NaN"),
        ("max_grad_norm", math.nan, "max_grad_norm is NaN"),
        ("n", 1.5, "n=1.5: it takes a whole number, not float"),
        ("n", True, "n=True: it takes a whole number, not bool"),
        ("n", "8", "n='8': it takes a whole number, not str"),
        ("lr", "1e-6", "lr='1e-6': it takes a number, not str"),
        ("lr", False, "lr=False: it takes a number, not bool"),
        ("lr", None, "it takes a number, not NoneType"),
        ("count_eos", 1, "count_eos=1: it takes true or false, not int"),
        ("count_eos", "true", "it takes true or false, not str"),
        ("method", 3, "method=3: it takes text, not int"),
        ("sources", "others", "sources='others': it takes one of 'all', 'own'"),
        ("ratio", "sequences", "ratio='sequences': it takes one of 'sequence', 'token'"),
        ("ratio", "token", "ratio='token' needs sources='own'"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_setting(name, value, message):
    with pytest.raises(ValueError, match=message) as caught:
        hk.Config(**{name: value})
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("delta", 0), ("delta", 1), ("lr", 0), ("alpha", 3), ("beta1", 0), ("warmup", 0), ("n", 1), ("seed", -7),
        ("max_grad_norm", math.inf), ("eps_high", math.inf), ("temperature", 0.6), ("n", 8.0),
    ],
)  # fmt: skip
def test_the_ends_of_the_ranges_are_allowed(name, value):
    stored = getattr(hk.Config(**{name: value}), name)
    assert stored == value and type(stored) is type(getattr(DEFAULT, name))


def test_a_config_cannot_be_changed_in_place_and_replace_checks_again():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT.alpha = 2.0
    assert DEFAULT.replace(alpha=2).alpha == 2.0 and DEFAULT.alpha == 1.0
    with pytest.raises(ValueError, match="n=0"):
        DEFAULT.replace(n=0)
    assert DEFAULT.differences(DEFAULT.replace(n=4, alpha=2)) == {"n": (8, 4), "alpha": (1.0, 2.0)}


# ── stored form ──────────────────────────────────────────────────────────────────────────────────────────────────

SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(-(2**40), 2**40),
        "n": st.integers(1, 64),
        "alpha": st.floats(0, 1e6),
        "delta": st.floats(0, 1),
        "lr": st.floats(0, 1, width=32),
        "max_grad_norm": st.floats(1e-3, allow_nan=False),
        "count_eos": st.booleans(),
        "sources": st.sampled_from(["all", "own"]),
        "method": st.text(max_size=8),
    },
)


@given(SETTINGS)
def test_json_gives_back_the_same_config(settings):
    config = hk.Config(**settings)
    again = hk.Config.from_dict(json.loads(config.to_json()))
    assert again == config and all(type(getattr(again, n)) is type(getattr(config, n)) for n in NAMES)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_a_stored_form_of_another_version_is_refused(version):
    with pytest.raises(ValueError, match=f"this config has version {version}, this program reads version 1"):
        hk.Config.from_dict({**DEFAULT.to_dict(), "version": version})


def test_a_config_of_an_older_program_is_read_or_refused_with_the_file_and_the_reason(tmp_path):
    file, stored = tmp_path / "config.json", DEFAULT.replace(alpha=2).to_dict()
    older = {k: v for k, v in stored.items() if k not in ("exclude_solved", "equal_updates", "rollout_batch")}
    file.write_text(json.dumps(older))
    assert hk.Config.read(file) == DEFAULT.replace(alpha=2)  # settings that came later are as it was before them
    for content, message in (
        ({**stored, "version": 0}, "this config has version 0.*begin a new run"),
        ({**stored, "clip_ratio": 0.2}, "unknown setting 'clip_ratio'.*another version of hacpo_kit"),
        ({**stored, "n": "many"}, "n='many': it takes a whole number"),
        ([1], "holds no object"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
            hk.Config.read(file)
    for broken in (b"{", b"\xff", b"[" * 200_000, b""):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=r"config\.json is no JSON"):
            hk.Config.read(file)


def test_every_setting_is_described():
    table = hk.Config.describe()
    assert table.index.tolist() == NAMES
    assert (table["meaning"].str.len() > 5).all() and table.loc["delta", "source"] == "eq. 13"


# ── text from a command line or a notebook ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("true", bool, True), ("True", bool, True), ("no", bool, False), ("0", bool, False), (True, bool, True),
        ("007", int, 7), (" 12 ", int, 12), ("-3", int, -3), (7, int, 7), (8.0, int, 8),
        ("1e-6", float, 1e-6), ("inf", float, math.inf), (2, float, 2.0), ("0.5", float, 0.5),
        ("7", str, "7"), ("true", str, "true"),
    ],
)  # fmt: skip
def test_text_becomes_the_kind_of_its_parameter(value, kind, expected):
    out = coerce("p", value, kind)
    assert out == expected and type(out) is kind


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("maybe", bool, "p: 'maybe' is neither true nor false"),
        (1, bool, "p=1: it takes true or false, not int"),
        ("1.5", int, "p: '1.5' is no whole number"),
        ("", int, "p: '' is no whole number"),
        ("fast", float, "p: 'fast' is no number"),
        ("nan", float, "p is NaN"),
        (True, int, "p=True: it takes a whole number, not bool"),
        (7, str, "p=7: it takes text, not int"),
        ([1], float, "it takes a number, not list"),
    ],
)
def test_what_cannot_become_that_kind_is_refused_by_name(value, kind, message):
    with pytest.raises(ValueError, match=message):
        coerce("p", value, kind)
