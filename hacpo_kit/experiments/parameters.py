"""The parameters of an experiment: checked values of the variables in `06_experiment.ipynb`."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import numpy as np
from pydantic import Field

from hacpo_kit.config import METHODS, Config, coerce, did_you_mean
from hacpo_kit.experiments.paths import file_name, runs_folder
from hacpo_kit.tasks.arithmetic import ARITHMETIC_SETS
from hacpo_kit.tasks.loading import load_problems

if TYPE_CHECKING:
    from hacpo_kit.runs.run import Run
    from hacpo_kit.tasks.problems import Problems

Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Experiment:
    """The parameters of an experiment; `from_parameters` checks them."""

    method: str = "hacpo"  # one of config.METHODS
    agents: str = "tiny-model-pair"  # a built-in set, or agents (names, folders, hub ids) separated by commas
    problems: str = "arithmetic"  # a built-in set of problems, or a file with columns prompt and gold
    test: str = "arithmetic"  # the same, for evaluation
    tests: str = ""  # further test sets (names or files) separated by commas, evaluated at the start and at the end
    test_size: Count = 200  # problems in an evaluation
    steps: Count = 12
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of forward and backward passes
    engine: Literal["transformers", "vllm"] = "transformers"  # the sampling engine
    eval_every: Count = 4
    eval_k: Count = 1
    save_every: Count = 5
    workers: Literal["", "ray"] = (
        ""  # "ray": each agent in its own process, on the cluster of RAY_ADDRESS or this machine
    )
    peers: str = ""  # the folder of a finished run, or a file of rollouts, from which the agents learn
    out: str = ""  # the run folder; empty: a folder in reports/runs/ named after the parameters
    settings: dict[str, Any] = field(default_factory=dict, hash=False)  # settings of Config: {"beta": 0.001}

    @classmethod
    def from_parameters(cls, values: Mapping[str, Any]) -> Experiment:
        """Return the experiment with these parameters; text such as "true" or "1e-6" is converted, None is the default.

        A setting of `Config` can be given by its name or in `settings`. `agents` and `tests` can be lists. Raises ValueError
        for an unknown name, and for a value that the parameter does not take.
        """
        values = dict(values)
        settings = coerce("settings", plain_value("settings", values.pop("settings", {})), dict)
        if twice := [name for name in settings if values.get(name) is not None]:
            raise ValueError(f"{twice[0]} is given twice, by its name and in settings")
        own = get_type_hints(cls, include_extras=True)
        kinds = {name: about.annotation for name, about in Config.model_fields.items()} | own
        checked = {}
        for name, value in {**values, **settings}.items():
            if name not in kinds:
                raise ValueError(f"unknown parameter {name!r}{did_you_mean(name, kinds)}; there are {', '.join(kinds)}")
            value = plain_value(name, value)
            if name in ("agents", "tests"):
                value = _comma_separated(name, value)
            if value is not None and str(value).strip().lower() != "none":
                checked[name] = coerce(name, value, kinds[name])
        settings = {name: checked.pop(name) for name in list(checked) if name not in own}
        experiment = cls(**checked, settings=settings)
        experiment.config()
        return experiment

    def config(self) -> Config:
        """Return the training settings; raises ValueError for a value that contradicts the method."""
        for name, fixed in METHODS.get(self.method, {}).items():
            if self.settings.get(name, fixed) != fixed:
                raise ValueError(
                    f"method {self.method!r} is defined by {name}={fixed}; do not set {name}, or use method hacpo"
                )
        return Config.preset(self.method, **self.settings)

    @property
    def parameters(self) -> dict[str, Any]:
        """All parameters and all settings of Config by their names, as JSON types."""
        values = asdict(self) | self.config().to_dict()
        return {name: value for name, value in values.items() if name not in ("settings", "version")}

    @property
    def given(self) -> dict[str, Any]:
        """The parameters without the settings that have the method's or the default value."""
        names = {*self.__dataclass_fields__, *self.settings}
        return {name: value for name, value in self.parameters.items() if name in names}

    @property
    def folder(self) -> Path:
        """The run folder: `out`, else a folder in `paths.runs_folder()` that has a name of its own for these parameters.

        The same parameters have the same folder, so that the same command resumes a run.
        """
        if self.out:
            return Path(self.out)
        text = repr(sorted((k, v) for k, v in self.parameters.items() if k not in ("out", "steps", "workers")))
        mark = hashlib.sha256(text.encode()).hexdigest()[:6]
        return runs_folder() / f"{file_name(f'{self.method}-{self.agents}')}-{mark}"

    def sources(self) -> str | list[str]:
        """Return the agents in the form that `load_agents` takes: a built-in set, or a list."""
        from hacpo_kit.models.sources import built_in_sets

        names = _split(self.agents)
        return names[0] if len(names) == 1 and names[0] in built_in_sets() else names

    def problem_set(self) -> Problems:
        """Return the training problems."""
        return load_problems(self.problems, split="train" if self.problems in ARITHMETIC_SETS else None)

    def test_set(self, source: str | None = None) -> Problems:
        """Return at most `test_size` problems of `test`, or of another set or file."""
        source = self.test if source is None else source
        if source in ARITHMETIC_SETS:
            return load_problems(source, split="test", size=self.test_size)
        return load_problems(source, limit=self.test_size)

    def run(self, **options: Any) -> Run:
        """Train, or resume the run in the run folder; `options` are those of `train`."""
        from hacpo_kit.models.loading import load_agents
        from hacpo_kit.training import train

        config, sources = self.config(), _split(self.tests)
        names = [Path(source).stem for source in sources]
        if len(set(names)) < len(names):
            raise ValueError(f"tests={self.tests!r}: two sets have the same name; rename a file")
        tests = {name: self.test_set(source) for name, source in zip(names, sources, strict=True)}
        agents = load_agents(self.sources(), dtype=self.dtype, engine=self.engine, workers=self.workers or None)
        options |= {name: getattr(self, name) for name in ("eval_every", "eval_k", "save_every")}
        sets = {"test": self.test_set(), "tests": tests}
        sets |= {"peers": self.peers or None}
        return train(agents, self.problem_set(), config, self.steps, out=self.folder, **sets, **options)


def check_parameters(variables: Mapping[str, Any]) -> Experiment:
    """Return the experiment that the variables of a notebook describe, after papermill has set its own among them.

    Raises ValueError as `Experiment.from_parameters` does; papermill itself does not report a misspelt name.
    """
    known = {*Experiment.__dataclass_fields__, *Config.model_fields}
    values = {name: value for name, value in variables.items() if name in known}
    # if the cell runs again, variables of later cells stand beside the parameters
    if not any(isinstance(value, Experiment) for value in variables.values()):
        ignored = ("In", "Out")  # of IPython
        others = {
            name: value for name, value in variables.items() if name[0] != "_" and name not in (*ignored, *values)
        }
        values |= {name: value for name, value in others.items() if isinstance(value, PARAMETER_TYPES)}
    return Experiment.from_parameters(values)


# the types of a variable that could be a parameter; others are modules and functions of the notebook
PARAMETER_TYPES = (
    bool, int, float, str, type(None), list, tuple, dict, os.PathLike, datetime.date, np.generic, np.ndarray,
)  # fmt: skip


def plain_value(name: str, value: Any) -> Any:
    """Return the value of a parameter as JSON types; tuples, paths and numpy's numbers and arrays are converted.

    Raises ValueError for other types, which papermill would replace by a text.
    """
    if isinstance(value, np.generic | np.ndarray):
        return plain_value(name, value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [plain_value(name, item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain_value(name, item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{name}={value!r}: a parameter is text, a number, true, false or None, or a list or mapping of these, not "
        f"{type(value).__name__}"
    )


def from_json(name: str, text: str) -> Any:
    """Return the list or mapping that a text describes; raises ValueError for text that is not JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f'{name}={text!r} is not JSON ({error}); quote the items, as in ["a", "b"]') from None


def _comma_separated(name: str, value: Any) -> Any:
    """Return a list of names, which may be JSON, as text with commas; text with commas and None are unchanged."""
    names = from_json(name, value) if isinstance(value, str) and value.strip().startswith("[") else value
    if not isinstance(names, list):
        return names
    if bad := [item for item in names if not isinstance(item, str) or "," in item]:
        raise ValueError(
            f"{name}={value!r}: {bad[0]!r} is not a name; give names, or one text with commas between them"
        )
    return ",".join(names)


def _split(names: str) -> list[str]:
    return [name for part in names.split(",") if (name := part.strip())]
