"""All settings of an experiment in one immutable model, and the named methods as settings of it."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Json, TypeAdapter, ValidationError, field_validator, model_validator

from hacpo_kit.common.files import read_json

VERSION = 3  # of the stored form; another version is refused


def _setting(default: Any, meaning: str, *, unit: str = "–", source: str = "", **limits: Any) -> Any:
    """Describe one setting; `limits` are pydantic's constraints such as ge (greater than or equal to)."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit, "source": source}, **limits)


class Config(BaseModel):
    """All settings of a run. Equation numbers are those of arXiv 2603.02604 (v1).

    A default is the paper's where the paper gives one number, and otherwise fits the built-in agents.
    `preset` returns the settings of a named method.

    Raises TypeError for an unknown setting, ValueError for a value that the setting does not take.

    >>> Config.preset("gspo").share, Config.preset("hacpo", alpha=2).alpha
    ('none', 2.0)
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    # Which peer rollouts a learner takes, and how it learns from them
    method: str = _setting("hacpo", "name of the method in tables and legends")
    share: Literal["none", "all", "rescue", "rescue_any"] = _setting(
        "all",
        "peer rollouts that a learner takes: none, all, or a peer's group for problems on which all own rollouts fail and the "
        "peer's succeed in part (rescue, balanced between agents) or also entirely (rescue_any)",
    )
    peer_update: Literal["hacpo", "own", "gated", "nll"] = _setting(
        "hacpo",
        "how a learner uses peer rollouts: HACPO's objective, as own ones, gated by s with the source's advantages (GRAFT), "
        "or the negative log-likelihood of one correct rollout (SGT)",
        source="eqs. 12-14",
    )
    max_peer: int = _setting(0, "peer rollouts that a learner takes for a problem, drawn at random; 0: no limit", ge=0)
    floor: float = _setting(0.8, "gated: peer rollouts with s at or below it are excluded", source="GRAFT", ge=0)
    nll_weight: float = _setting(0.1, "nll: weight of the negative log-likelihood, λ", source="SGT", ge=0)
    mask_negative: float = _setting(
        math.inf, "exclude peer rollouts with A < 0 and −log s above it; inf: none", unit="nats", source="F-TIS", ge=0,
        allow_inf_nan=True,
    )  # fmt: skip
    seed: int = _setting(0, "seed of the run; every random choice is derived from it")

    # Rollout
    prompts_per_step: int = _setting(32, "problems in one step", unit="problems", ge=1)
    dynamic_sampling: bool = _setting(
        False, "replace problems on which every agent's own rewards are equal by further ones, whose cost is counted",
        source="DAPO",
    )  # fmt: skip
    n: int = _setting(8, "rollouts per agent and problem, G in the paper", unit="rollouts", ge=1)
    oversample: int = _setting(1, "factor on n; 2 in gspo_x2", ge=1)
    temperature: float = _setting(1.0, "sampling temperature; scoring divides the logits by it too", gt=0)
    max_new_tokens: int = _setting(32, "maximum length of a response", unit="tokens", ge=1)
    rollout_batch: int = _setting(256, "rollouts sampled at once; fewer need less memory", unit="rollouts", ge=1)

    # Capability and advantage
    window: int = _setting(5, "steps in the mean of the rewards, K", unit="steps", source="eqs. 8-9", ge=1)
    capability_baseline: bool = _setting(
        True, "scale peer rewards by ω(learner, source) in the baseline", source="eq. 6"
    )
    binary_guard: bool = _setting(
        True, "with 0/1 rewards replace a baseline above 1 by the learner's own mean", source="recipe"
    )
    cross_baseline: Literal["learner", "source"] = _setting(
        "learner", "agent whose baseline a peer rollout gets", source="eqs. 10, 50"
    )
    discrepancy: bool = _setting(True, "scale peer advantages by ω(source, learner)", source="eq. 10")
    exclude_solved: bool = _setting(
        False, "set advantages to 0 for problems that the learner solves in all its own rollouts", source="ours"
    )

    # Importance ratio and clipping
    ratio: Literal["sequence", "token"] = _setting("sequence", "level of the importance ratio", source="eq. 11")
    loss_mean: Literal["rollout", "token"] = _setting(
        "rollout", "mean of a token-level objective: within each rollout first, or over all tokens of a mini-batch"
    )
    alpha: float = _setting(
        1.0, "exponent of the stop-gradient ratio that weights a peer rollout, α", source="eq. 12", ge=0
    )
    delta: float = _setting(
        0.2, "width of the peer clipping range at the first update of a step, δ", source="eq. 13", ge=0, le=1
    )
    delta_step: float = _setting(0.025, "decrease of this width with each update, δ_step", source="eq. 14", ge=0)
    eps_low: float = _setting(3e-4, "own ratio: lower clipping distance", source="eq. 49", ge=0, allow_inf_nan=True)
    eps_high: float = _setting(4e-4, "own ratio: upper clipping distance", source="eq. 49", ge=0, allow_inf_nan=True)
    count_eos: bool = _setting(
        True, "count the end token of a peer rollout in both mean log-probabilities", source="recipe: False"
    )
    beta: float = _setting(
        0.0, "weight of the KL to the initial policy; own rollouts only", source="recipe: 0.001", ge=0
    )

    # Optimiser
    minibatch: int = _setting(128, "rollouts in one optimiser update", unit="rollouts", ge=1)
    updates_factor: int = _setting(1, "divides minibatch, and so multiplies the updates; 2 in gspo_updates_x2", ge=1)
    equal_updates: bool = _setting(
        False, "larger mini-batches, so that sharing does not change the number of updates in a step", source="ours"
    )
    minibatch_order: Literal["mixed", "own_first"] = _setting(
        "mixed", "own and peer rollouts shuffled together, or own rollouts first", source="recipe: own_first"
    )
    microbatch_tokens: int = _setting(16384, "padded tokens in one forward and backward pass", unit="tokens", ge=1)
    lr: float = _setting(1e-4, "learning rate of AdamW (paper: 1e-6)", ge=0)
    warmup: int = _setting(4, "steps of linear learning-rate warm-up", unit="steps", ge=0)
    beta1: float = _setting(0.9, "AdamW: decay of the first moment", ge=0, lt=1)
    beta2: float = _setting(0.99, "AdamW: decay of the second moment", ge=0, lt=1)
    adam_eps: float = _setting(1e-8, "AdamW: constant in the denominator", gt=0)
    weight_decay: float = _setting(0.0, "AdamW: decoupled weight decay", ge=0)
    max_grad_norm: float = _setting(
        1.0, "maximum norm of the gradient; inf disables gradient clipping", gt=0, allow_inf_nan=True
    )

    def __init__(self, **settings: Any):
        for name in settings.keys() - type(self).model_fields.keys():
            raise TypeError(f"unknown setting {name!r}{did_you_mean(name, type(self).model_fields)}")
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ValueError(_explanation(error)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _number(cls, value: Any, info) -> Any:
        """Accept "inf", which stands for infinity in JSON, and every kind of number."""
        if value == "inf" and cls.model_fields[info.field_name].annotation is float:
            return math.inf
        return _python_number(value)

    @model_validator(mode="after")
    def _combination(self) -> Config:
        token_level = self.peer_update in ("gated", "nll")
        if self.ratio == "token" and self.share != "none" and not token_level:
            raise ValueError(
                f"ratio='token' with peer_update={self.peer_update!r} needs share='none', because tokens of two tokenizers do "
                "not correspond one to one; set ratio='sequence', or peer_update='gated' or 'nll'"
            )
        if self.ratio == "sequence" and token_level:
            raise ValueError(f"peer_update={self.peer_update!r} is a token-level objective; set ratio='token'")
        if self.ratio == "sequence" and self.loss_mean == "token":
            raise ValueError("loss_mean='token' is the mean of a token-level objective; set ratio='token'")
        return self

    @property
    def rollouts_per_prompt(self) -> int:
        """Rollouts that each agent samples for a problem: n × oversample."""
        return self.n * self.oversample

    @classmethod
    def preset(cls, method: str = "hacpo", *, pair: str | None = None, **overrides: Any) -> Config:
        """Return the settings of a named method, optionally with the paper's settings for a model pair.

        `overrides` take precedence over the method's settings, and these over the pair's.

        Raises ValueError for an unknown method or pair, TypeError for an unknown setting.
        """
        settings = {"method": method, **_entry(METHODS, method, "method")}
        if pair is not None:
            settings = {**PAPER_TRAINING, **_entry(PAPER_PAIRS, pair, "pair"), **settings}
        return cls(**{**settings, **overrides})

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Config:
        """Return the config with these settings; raises ValueError for a stored form of another version."""
        settings = dict(settings)
        version = settings.pop("version", VERSION)
        if version != VERSION:
            raise ValueError(
                f"the stored settings have version {version!r}, this version of hacpo_kit reads version {VERSION} because "
                "settings and metrics were renamed; start a new run, or use the version of hacpo_kit that stored them"
            )
        return cls(**settings)

    @classmethod
    def read(cls, file: str | Path) -> Config:
        """Return the config that a file stores; a setting that the file lacks has its default.

        Raises ValueError, naming the file and the reason, for a file of another version and for invalid content.
        """
        settings = read_json(Path(file))
        try:
            return cls.from_dict(settings)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON types, with the version of the stored form."""
        # JSON has no infinity, which disables eps_high or max_grad_norm
        return {"version": VERSION, **{name: "inf" if value == math.inf else value for name, value in self}}

    def replace(self, **changes: Any) -> Config:
        """Return a copy with some settings changed."""
        return type(self)(**{**dict(self), **changes})

    def differences(self, other: Config) -> dict[str, tuple[Any, Any]]:
        """Return the settings in which two configs differ, with both values."""
        return {name: (value, getattr(other, name)) for name, value in self if value != getattr(other, name)}

    @classmethod
    def describe(cls):
        """Return a pandas table of all settings: default, meaning, unit, and source in the paper."""
        import pandas as pd

        rows = [
            {"setting": name, "default": f.default, "meaning": f.description, **f.json_schema_extra}
            for name, f in cls.model_fields.items()
        ]
        return pd.DataFrame(rows).set_index("setting")


_OWN = {"share": "none"}
_TOKEN = {"ratio": "token", "eps_low": 0.2, "eps_high": 0.28}
_TOKEN_MEAN = {**_TOKEN, "loss_mean": "token"}
METHODS: dict[str, dict[str, Any]] = {
    "hacpo": {},
    "gspo": _OWN,
    "gspo_x2": {**_OWN, "oversample": 2},
    "grpo": {**_OWN, **_TOKEN},
    "naive": {"capability_baseline": False, "discrepancy": False, "peer_update": "own"},
    # ours, not the paper's: sharing adds rollouts to each update instead of updates to each step
    "hacpo_equal": {"equal_updates": True},
    # ablations of hacpo
    "no_capability_baseline": {"capability_baseline": False},
    "no_discrepancy": {"discrepancy": False},
    "alpha=0": {"alpha": 0.0},
    "delta_step=0": {"delta_step": 0.0},
    "no_clip": {"delta": 1.0, "delta_step": 0.0},
    # other ways to share: version 2 of the paper, GRAFT (arXiv 2609.37868), Mutual RL (arXiv 2605.07244), combinations
    "hacpo_v2": {"window": 1},
    "gspo_updates_x2": {**_OWN, "updates_factor": 2},
    "graft": {**_TOKEN_MEAN, "share": "rescue", "peer_update": "gated", "minibatch_order": "own_first"},
    "sgt": {**_TOKEN_MEAN, "share": "rescue_any", "peer_update": "nll"},
    "sgt_gated": {**_TOKEN_MEAN, "share": "rescue_any", "peer_update": "gated", "minibatch_order": "own_first"},
    "hacpo_rescue": {"share": "rescue"},
}

PAPER_TRAINING = {
    "lr": 1e-6, "prompts_per_step": 128, "n": 8, "minibatch": 512, "max_new_tokens": 4096,
    "temperature": 1.0, "window": 5, "beta2": 0.999, "warmup": 0,
}  # fmt: skip
PAPER_PAIRS: dict[str, dict[str, float]] = {
    "qwen3-4b + qwen3-4b-instruct": {"alpha": 3.0, "delta": 0.8, "delta_step": 0.01},
    "qwen3-1.7b-base + qwen3-4b-base": {"alpha": 1.0, "delta": 0.8, "delta_step": 0.025},
    "qwen3-4b-base + qwen3-8b-base": {"alpha": 3.0, "delta": 0.8, "delta_step": 0.025},
    "llama3.2-1b-instruct + llama3.2-3b-instruct": {"alpha": 1.0, "delta": 0.9, "delta_step": 0.01},
    "qwen3-1.7b-base + llama3.2-1b-instruct": {"alpha": 1.0, "delta": 0.8, "delta_step": 0.025},
    "qwen3-4b-base + llama3.2-3b-instruct": {"alpha": 1.0, "delta": 0.8, "delta_step": 0.025},
}


def check(name: str, value: Any, kind: Any, *, strict: bool = True) -> Any:
    """Return the value as `kind`, a type with or without pydantic's constraints; strict=False also converts text.

    Raises ValueError with the name, the value and what `kind` takes.
    """
    try:
        return TypeAdapter(kind).validate_python(_python_number(value), strict=strict)
    except ValidationError as error:
        raise ValueError(_explanation(error, name)) from None


def coerce(name: str, value: Any, kind: Any) -> Any:
    """Return the value as `kind` (bool, int, float, str, dict or a Literal); text of a command line is converted.

    Raises ValueError as `check` does.

    >>> coerce("seed", "007", int), coerce("flag", "true", bool), coerce("settings", '{"beta": 0.1}', dict)
    (7, True, {'beta': 0.1})
    """
    if not isinstance(value, str):
        return check(name, value, kind)
    return check(name, value, Json[dict] if kind is dict else kind, strict=False)


def settings_from_text(values: Mapping[str, str]) -> dict[str, Any]:
    """Convert settings of Config from the text of a command line.

    Raises ValueError for an unknown setting, and for text that the setting does not take.
    """
    known = Config.model_fields
    return {name: coerce(name, text, _entry(known, name, "setting").annotation) for name, text in values.items()}


def whole_number(name: str, value: Any, least: int) -> int:
    """Return the value as an int; raises ValueError if it is not a whole number or is below `least`."""
    return check(name, value, Annotated[int, Field(ge=least)])


def _python_number(value: Any) -> Any:
    """Return a number as Python's int or float (8.0 and numpy's 8 become 8), any other value unchanged."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return int(value) if float(value).is_integer() else float(value)
    return value


def _explanation(error: ValidationError, name: str = "") -> str:
    """Return the errors that pydantic found, as in "n=0: Input should be greater than or equal to 1"."""
    raised = [e["ctx"]["error"] for e in error.errors() if e["type"] == "value_error"]
    found = [f"{name or e['loc'][0]}={e['input']!r}: {e['msg']}" for e in error.errors() if e["type"] != "value_error"]
    return "; ".join(map(str, [*found, *raised]))


def _entry(table: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}{did_you_mean(name, table)}; there are {', '.join(table)}")
    return table[name]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message that suggests the most similar known name, or nothing."""
    similar = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {similar[0]!r}?" if similar else ""
