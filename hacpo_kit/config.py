"""Every setting of an experiment, in one frozen dataclass, and the named methods as settings of it."""

from __future__ import annotations

import difflib
import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hacpo_kit.common.files import read_json

VERSION = 2  # of the stored form; a config of another version is refused with a reason


def _setting(default: Any, meaning: str, *, unit: str = "–", source: str = "") -> Any:
    return field(default=default, metadata={"meaning": meaning, "unit": unit, "source": source})


@dataclass(frozen=True)
class Config:
    """All settings of a run; equation numbers are those of arXiv 2603.02604 (v1).

    Defaults are the paper's where it names one number and otherwise fit the built-in agents; `preset` names methods.

    >>> Config.preset("gspo").sources, Config.preset("hacpo", alpha=2).alpha
    ('own', 2.0)
    """

    # Who teaches whom
    method: str = _setting("hacpo", "name of the method, for tables and legends")
    sources: Literal["all", "own"] = _setting("all", "whose rollouts a learner uses")
    seed: int = _setting(0, "every random choice of the run is derived from it")

    # Rollout
    prompts_per_step: int = _setting(32, "problems answered in one step", unit="problems")
    n: int = _setting(8, "rollouts per agent and problem, G in the paper", unit="rollouts")
    oversample: int = _setting(1, "factor on n; 2 in gspo_x2")
    temperature: float = _setting(1.0, "sampling temperature; the logits of every scoring are divided by it too")
    max_new_tokens: int = _setting(32, "length limit of an answer", unit="tokens")
    rollout_batch: int = _setting(256, "answers sampled at once; a smaller number needs less memory", unit="rollouts")

    # Capability and advantage
    window: int = _setting(5, "steps over which mean rewards are averaged, K", unit="steps", source="eqs. 8-9")
    capability_baseline: bool = _setting(
        True, "scale peer rewards by ω(learner, source) in the baseline", source="eq. 6"
    )
    binary_guard: bool = _setting(
        True, "0/1 rewards: a baseline above 1 becomes the learner's own mean", source="recipe"
    )
    cross_baseline: Literal["learner", "source"] = _setting(
        "learner", "whose baseline a peer rollout gets", source="eqs. 10, 50"
    )
    discrepancy: bool = _setting(True, "scale peer advantages by ω(source, learner)", source="eq. 10")
    exclude_solved: bool = _setting(
        False, "a problem that the learner solves in all its own rollouts teaches it nothing", source="ours"
    )

    # Importance ratio and clip
    ratio: Literal["sequence", "token"] = _setting("sequence", "level of the importance ratio", source="eq. 11")
    peer_update: Literal["hacpo", "own"] = _setting(
        "hacpo", "clip of peer rollouts: HACPO's band, or as if they were own", source="eqs. 12-14"
    )
    alpha: float = _setting(1.0, "exponent of the stopped ratio in a peer weight, α", source="eq. 12")
    delta: float = _setting(0.2, "width of the band at the first update of a step, δ", source="eq. 13")
    delta_step: float = _setting(0.025, "by how much the band narrows with each update, δ_step", source="eq. 14")
    eps_low: float = _setting(3e-4, "own ratio: lower clip distance", source="eq. 49")
    eps_high: float = _setting(4e-4, "own ratio: upper clip distance", source="eq. 49")
    count_eos: bool = _setting(True, "an answer that ended counts its end token when exchanged", source="recipe: False")
    beta: float = _setting(0.0, "weight of the KL to the initial policy, own rollouts only", source="recipe: 0.001")

    # Optimiser
    minibatch: int = _setting(128, "rollouts in one optimiser update", unit="rollouts")
    equal_updates: bool = _setting(
        False,
        "as many updates a step as the learner would make alone: mini-batches grow with the sources",
        source="ours",
    )
    minibatch_order: Literal["mixed", "own_first"] = _setting(
        "mixed", "own and peer rollouts shuffled together, or all own ones first", source="recipe: own_first"
    )
    microbatch_tokens: int = _setting(16384, "padded tokens in one forward and backward pass", unit="tokens")
    lr: float = _setting(1e-4, "learning rate of AdamW (paper: 1e-6)")
    warmup: int = _setting(4, "steps over which the learning rate rises linearly", unit="steps")
    beta1: float = _setting(0.9, "AdamW, decay of the first moment")
    beta2: float = _setting(0.99, "AdamW, decay of the second moment")
    adam_eps: float = _setting(1e-8, "AdamW, added to the denominator")
    weight_decay: float = _setting(0.0, "AdamW, decoupled weight decay")
    max_grad_norm: float = _setting(1.0, "the gradient is scaled down to this norm; inf switches it off")

    def __post_init__(self):
        hints = get_type_hints(type(self))
        for f in fields(self):
            object.__setattr__(self, f.name, _checked(f.name, getattr(self, f.name), hints[f.name]))
        for name in (
            "prompts_per_step",
            "n",
            "oversample",
            "max_new_tokens",
            "rollout_batch",
            "window",
            "minibatch",
            "microbatch_tokens",
        ):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("eps_low", "eps_high"):  # inf: no bound
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("alpha", "delta_step", "beta", "weight_decay", "warmup", "lr"):
            _require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "0 or more, and finite")
        _require(0 <= self.delta <= 1, "delta", self.delta, "between 0 and 1, since the band is 1 − δ to 1")
        _require(
            0 < self.temperature < math.inf,
            "temperature",
            self.temperature,
            "above 0 and finite: greedy answers have no log-probability",
        )
        _require(
            0 < self.adam_eps < math.inf, "adam_eps", self.adam_eps, "above 0 and finite: it keeps 0 / 0 out of a step"
        )
        _require(self.max_grad_norm > 0, "max_grad_norm", self.max_grad_norm, "above 0")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "in [0, 1)")
        if self.ratio == "token" and self.sources == "all":
            raise ValueError(
                "ratio='token' needs sources='own': tokens of two tokenizers cannot be compared one by one; "
                "use ratio='sequence' to share rollouts"
            )

    @property
    def rollouts_per_prompt(self) -> int:
        """Rollouts that each agent samples for a problem: n × oversample."""
        return self.n * self.oversample

    @classmethod
    def preset(cls, method: str = "hacpo", *, pair: str | None = None, **overrides: Any) -> Config:
        """A named method, optionally with the paper's settings for one of its model pairs; `overrides` win.

        Raises ValueError for an unknown method or pair, TypeError for an unknown setting.
        """
        settings: dict[str, Any] = {"method": method, **_known(method, METHODS, "method")}
        if pair is not None:
            # the method's own settings come last: alpha=0 stays 0 on every pair
            settings = {**PAPER_TRAINING, **_known(pair, PAPER_PAIRS, "pair"), **settings}
        return cls.from_dict({**settings, **overrides})

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Config:
        """The config with these settings; raises TypeError for a name that is no setting, ValueError for a bad value."""
        settings = dict(settings)
        version = settings.pop("version", VERSION)
        if version != VERSION:
            raise ValueError(
                f"this config has version {version}, this program reads version {VERSION}; "
                "use the version of hacpo_kit that wrote it, or begin a new run"
            )
        for name in settings:
            if name not in cls.__dataclass_fields__:
                raise TypeError(f"unknown setting {name!r}{did_you_mean(name, cls.__dataclass_fields__)}")
        return cls(**settings)

    @classmethod
    def read(cls, file: str | Path) -> Config:
        """The config in its stored form. A setting that it lacks came later: its default is what was done before.

        Raises ValueError, naming the file and the reason, for what is no config or comes from another version.
        """
        settings = read_json(Path(file))
        try:
            return cls.from_dict(settings)
        except TypeError as error:
            raise ValueError(f"{file}: {error}; it was written by another version of hacpo_kit") from None
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON types, with the version of the stored form."""
        # JSON has no infinity, which switches eps_high or max_grad_norm off
        return {"version": VERSION, **{k: "inf" if v == math.inf else v for k, v in asdict(self).items()}}

    def replace(self, **changes: Any) -> Config:
        """A copy with some settings changed."""
        return type(self).from_dict({**self.to_dict(), **changes})

    def differences(self, other: Config) -> dict[str, tuple[Any, Any]]:
        """The settings in which two configs differ, with both values."""
        mine, theirs = asdict(self), asdict(other)
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def to_json(self) -> str:
        """The stored form."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    @classmethod
    def describe(cls):
        """A pandas table of all settings: default, unit, meaning, and where in the paper it stands."""
        import pandas as pd

        rows = [{"setting": f.name, "default": f.default, **f.metadata} for f in fields(cls)]
        return pd.DataFrame(rows).set_index("setting")


_OWN = {"sources": "own"}
METHODS: dict[str, dict[str, Any]] = {
    "hacpo": {},
    "gspo": _OWN,
    "gspo_x2": {**_OWN, "oversample": 2},
    "grpo": {**_OWN, "ratio": "token", "eps_low": 0.2, "eps_high": 0.28},
    "naive": {"capability_baseline": False, "discrepancy": False, "peer_update": "own"},
    # ours, not the paper's: sharing adds rollouts to each update instead of updates to each step
    "hacpo_equal": {"equal_updates": True},
    # ablations of hacpo
    "no_capability_baseline": {"capability_baseline": False},
    "no_discrepancy": {"discrepancy": False},
    "alpha=0": {"alpha": 0.0},
    "delta_step=0": {"delta_step": 0.0},
    "no_clip": {"delta": 1.0, "delta_step": 0.0},
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


def coerce(name: str, value: Any, kind: Any) -> Any:
    """The value as `kind` (bool, int, float, str or a Literal of strings), also from the text of a command line.

    Raises ValueError that names the parameter and what it takes.

    >>> coerce("seed", "007", int), coerce("flag", "true", bool), coerce("lr", "1e-6", float)
    (7, True, 1e-06)
    """
    if isinstance(value, str) and kind is not str and get_origin(kind) is not Literal:
        value = _from_text(name, value, kind)
    return _checked(name, value, kind)


def settings_from_text(values: Mapping[str, str]) -> dict[str, Any]:
    """Settings of Config as a command line gives them, as what each takes.

    Raises ValueError for a name that is no setting, and for text that is no value of it.
    """
    hints = get_type_hints(Config)
    for name in values:
        if name not in Config.__dataclass_fields__:
            raise ValueError(f"unknown setting {name!r}{did_you_mean(name, Config.__dataclass_fields__)}")
    return {name: coerce(name, text, hints[name]) for name, text in values.items()}


def _from_text(name: str, text: str, kind: type) -> Any:
    word = text.strip().lower()
    if kind is bool:
        if word in ("true", "yes", "1", "false", "no", "0"):
            return word in ("true", "yes", "1")
        raise ValueError(f"{name}: {text!r} is neither true nor false")
    if kind is dict:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f'{name}: {text!r} is no JSON like {{"beta": 0.001}}: {error}') from None
    try:
        return kind(word)
    except ValueError:
        raise ValueError(f"{name}: {text!r} is no {'whole number' if kind is int else 'number'}") from None


def _checked(name: str, value: Any, kind: Any) -> Any:
    """The value as Python's own type, if it fits (an int may stand for a float); booleans are never numbers here."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name}={value!r}: it takes one of {', '.join(map(repr, get_args(kind)))}")
        return value
    if kind is float and value == "inf":
        value = math.inf
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)  # numpy's are such, too
    if kind is float and number:
        if math.isnan(value):
            raise ValueError(f"{name} is NaN; give a number")
        return float(value)
    if kind is int and number and (isinstance(value, numbers.Integral) or float(value).is_integer()):
        return int(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name}={value!r}: it takes {_KINDS[kind]}, not {type(value).__name__}")
    return value


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "names with values"}


def whole_number(name: str, value: Any, least: int) -> int:
    """A whole number, also 3.0 or one of numpy's; raises ValueError for another value, and for one below `least`."""
    value = _checked(name, value, int)
    _require(value >= least, name, value, f"at least {least}")
    return value


def _require(condition: bool, name: str, value: Any, what: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value!r}: it must be {what}")


def _known(name: str, table: Mapping[str, Any], kind: str) -> Any:
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}{did_you_mean(name, table)}; there are {', '.join(table)}")
    return table[name]


def did_you_mean(name: str, known: Any) -> str:
    """The end of an error message: the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


__all__ = ["METHODS", "PAPER_PAIRS", "Config", "coerce", "did_you_mean", "settings_from_text"]
