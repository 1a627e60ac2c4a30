"""Config: methods, the paper's pairs, types and ranges, the stored form."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hacpo_kit as hk
from hacpo_kit.config import METHODS, PAPER_PAIRS, coerce, did_you_mean, whole_number

DEFAULT = hk.Config()
NAMES = list(hk.Config.model_fields)


# ── methods and pairs ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("hacpo", {}),
        ("gspo", {"share": "none"}),
        ("gspo_x2", {"share": "none", "oversample": 2}),
        ("grpo", {"share": "none", "ratio": "token", "eps_low": 0.2, "eps_high": 0.28}),
        ("naive", {"capability_baseline": False, "discrepancy": False, "peer_update": "own"}),
        ("no_capability_baseline", {"capability_baseline": False}),
        ("no_discrepancy", {"discrepancy": False}),
        ("alpha=0", {"alpha": 0.0}),
        ("delta_step=0", {"delta_step": 0.0}),
        ("no_clip", {"delta": 1.0, "delta_step": 0.0}),
        ("hacpo_equal", {"equal_updates": True}),
    ],
)
def test_preset_differs_from_the_default_only_in_its_own_settings(method, settings):
    changed = DEFAULT.differences(hk.Config.preset(method))
    changed.pop("method", None)
    assert {name: new for name, (_, new) in changed.items()} == settings
    assert hk.Config.preset(method).method == method and method in METHODS


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
def test_preset_has_the_papers_values_for_each_pair(pair, alpha, delta, delta_step):
    config = hk.Config.preset("hacpo", pair=pair)
    assert (config.alpha, config.delta, config.delta_step) == (alpha, delta, delta_step)
    # 128 prompts a step, mini-batches of 64 prompts with 8 rollouts each, T = 1, lr 1e-6
    assert (config.prompts_per_step, config.n, config.minibatch) == (128, 8, 64 * 8)
    assert (config.lr, config.temperature, config.max_new_tokens) == (1e-6, 1.0, 4096)
    assert len(PAPER_PAIRS) == 6


def test_preset_prefers_overrides_to_the_method_and_the_method_to_the_pair():
    pair = "qwen3-4b + qwen3-4b-instruct"
    ablation = hk.Config.preset("alpha=0", pair=pair)
    assert (ablation.alpha, ablation.delta, ablation.delta_step) == (0.0, 0.8, 0.01)
    assert hk.Config.preset("no_clip", pair=pair).delta == 1.0
    assert hk.Config.preset("alpha=0", pair=pair, alpha=2, n=4).alpha == 2.0
    assert hk.Config.preset("gspo_x2", n=4).rollouts_per_prompt == 8


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_config_suggests_the_nearest_name():
    for call in (hk.Config, DEFAULT.replace, lambda **s: hk.Config.preset("hacpo", **s)):
        with pytest.raises(TypeError, match="'detla'; did you mean 'delta'"):
            call(detla=0.2)
    with pytest.raises(TypeError, match=r"'learning_speed'$"):
        hk.Config.from_dict({"learning_speed": 1})
    with pytest.raises(ValueError, match=r"method 'gspo-x2'; did you mean 'gspo_x2'\?; there are hacpo, gspo"):
        hk.Config.preset("gspo-x2")
    with pytest.raises(ValueError, match=r"pair 'qwen3-4b-base \+ qwen3-8b'; did you mean 'qwen3-4b-base"):
        hk.Config.preset("hacpo", pair="qwen3-4b-base + qwen3-8b")


def test_did_you_mean_is_empty_without_a_similar_name():
    assert did_you_mean("dleta", ["delta", "alpha"]) == "; did you mean 'delta'?"
    assert did_you_mean("xyz", ["delta", "alpha"]) == ""


# ── types and ranges ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, 1.5, True, "8"]),
        *((name, [0]) for name in ("prompts_per_step", "oversample", "max_new_tokens", "rollout_batch")),
        *((name, [0]) for name in ("window", "minibatch", "microbatch_tokens", "max_grad_norm", "adam_eps")),
        *((name, [-0.1, math.inf]) for name in ("alpha", "delta_step", "beta", "weight_decay")),
        *((name, [-1e-9, math.nan]) for name in ("eps_low", "eps_high", "max_grad_norm")),
        ("lr", [-1, math.inf, math.nan, "1e-6", False, None]),
        ("warmup", [-1]),
        ("delta", [-0.1, 1.1]),
        ("temperature", [0, math.inf]),
        ("beta1", [1]),
        ("beta2", [-0.1]),
        ("count_eos", [1, "true"]),
        ("method", [3]),
        ("share", ["others"]),
        ("peer_update", ["hapco"]),
        ("ratio", ["sequences", "token"]),
    ],
)
def test_config_refuses_a_wrong_value_with_the_name_of_the_setting(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{name}={value!r}"):
            hk.Config(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("delta", 0), ("delta", 1), ("lr", 0), ("alpha", 3), ("beta1", 0), ("warmup", 0), ("n", 1), ("seed", -7),
        ("max_grad_norm", math.inf), ("eps_high", math.inf), ("temperature", 0.6), ("n", 8.0),
        ("n", np.int64(4)), ("minibatch", np.float64(8)), ("lr", np.float64(1e-5)), ("delta", np.int32(1)),
    ],
)  # fmt: skip
def test_config_accepts_the_ends_of_the_ranges_and_numpys_numbers(name, value):
    stored = getattr(hk.Config(**{name: value}), name)
    assert stored == value and type(stored) is type(getattr(DEFAULT, name))


def test_config_is_immutable_and_replace_checks_again():
    with pytest.raises(ValueError, match="frozen"):
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
        "share": st.sampled_from(["all", "none"]),
        "method": st.text(max_size=8),
    },
)


@given(SETTINGS)
def test_to_dict_as_json_gives_back_the_same_config(settings):
    config = hk.Config(**settings)
    again = hk.Config.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False)))
    assert again == config and all(type(getattr(again, n)) is type(getattr(config, n)) for n in NAMES)


@pytest.mark.parametrize("version", [0, 1, "2", None])
def test_from_dict_refuses_another_version(version):
    with pytest.raises(ValueError, match=f"version {version!r}.*start a new run"):
        hk.Config.from_dict({**DEFAULT.to_dict(), "version": version})


def test_read_names_the_file_and_the_reason(tmp_path):
    file, stored = tmp_path / "config.json", DEFAULT.replace(alpha=2).to_dict()
    fewer = {k: v for k, v in stored.items() if k not in ("exclude_solved", "equal_updates", "rollout_batch")}
    file.write_text(json.dumps(fewer))
    assert hk.Config.read(file) == DEFAULT.replace(alpha=2)
    for content, message in (
        ({**stored, "version": 1}, "version 1.*start a new run"),
        ({**stored, "clip_ratio": 0.2}, "unknown setting 'clip_ratio'"),
        ({**stored, "n": "many"}, "n='many'"),
        ([1], "list"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
            hk.Config.read(file)
    for broken in (b"{", b"\xff", b"[" * 200_000, b""):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=r"config\.json"):
            hk.Config.read(file)


def test_describe_has_a_row_for_every_setting():
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
        ("7", str, "7"), ("true", str, "true"), ('{"beta": 0.1}', dict, {"beta": 0.1}),
    ],
)  # fmt: skip
def test_coerce_converts_text_and_numbers(value, kind, expected):
    out = coerce("p", value, kind)
    assert out == expected and type(out) is kind


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("maybe", bool), (1, bool), ("1.5", int), ("", int), (True, int), ("fast", float), ([1], float), (7, str),
        ("{", dict), ("[1]", dict), ([1], dict),
    ],
)  # fmt: skip
def test_coerce_refuses_other_values_with_the_name(value, kind):
    with pytest.raises(ValueError, match=r"^p="):
        coerce("p", value, kind)


def test_whole_number_takes_numpys_numbers_and_no_text():
    assert type(whole_number("steps", np.int64(3), least=1)) is int
    for value in (0, 2.5, True, "3"):
        with pytest.raises(ValueError, match=f"steps={value!r}"):
            whole_number("steps", value, least=1)
