"""A grid of experiments, as a readable YAML file: what every run shares, and lists of which every combination is run."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hacpo_kit.common.files import check_name
from hacpo_kit.config import Config, did_you_mean
from hacpo_kit.experiments.notebooks import (
    Experiment,
    check_parameters,
    find_notebook,
    notebook_parameters,
    other_settings,
)
from hacpo_kit.tasks.arithmetic import ARITHMETIC_SETS

KEYS = {
    "name": "name of the study and of its folder; default: the file's",
    "notebook": "the notebook to run; default: 06_experiment",
    "common": "parameters that every run has",
    "seeds": "a number of seeds, counted from 0, or a list of them",
    "grids": "a list of blocks; of each block's lists every combination is run",
}


@dataclass(frozen=True)
class Grid:
    """The runs of a study: folder name → experiment, in the order in which they are run."""

    name: str
    notebook: Path
    runs: Mapping[str, Experiment]


def read_grid(grid: str | Path | Mapping[str, Any]) -> Grid:
    """Reads and checks a grid, from a YAML file or from a mapping of the same form (`KEYS`); starts nothing.

    The blocks of `grids` are added together, equal runs count once, and the first seed of all comes before the second.
    Raises ValueError that names the place and the fault: unknown names, wrong types, keys given twice, empty lists,
    parameters that a method defines. Raises FileNotFoundError for a missing file, notebook, or file of problems.
    """
    stem = "study" if isinstance(grid, Mapping) else Path(grid).stem
    content = grid if isinstance(grid, Mapping) else _read_yaml(Path(grid))
    where = "the grid" if isinstance(grid, Mapping) else Path(grid).name
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} holds no keys; it takes {', '.join(KEYS)}")
    for key in content:
        if key not in KEYS:
            raise ValueError(f"{where}: unknown key {key!r}{did_you_mean(str(key), KEYS)}; it takes {', '.join(KEYS)}")
    try:
        name = check_name(str(content.get("name", stem)), "a folder")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    notebook = find_notebook(str(content.get("notebook", "06_experiment")))
    defaults = notebook_parameters(notebook)
    if missing := sorted(set(Experiment.__dataclass_fields__) - set(defaults)):
        raise ValueError(
            f"{where}: {notebook.name} has no parameters {', '.join(missing)}; start from a copy of 06_experiment"
        )
    runs: dict[str, Experiment] = {}
    for experiment, set_here, base in _expand(content, defaults, where):
        label = _name(experiment, set_here, base)
        if _meaning(runs.setdefault(label, experiment)) != _meaning(experiment):
            raise ValueError(f"{where}: two different runs would both be named {label}; give one of them another value")
    return Grid(name, notebook, runs)


def _meaning(experiment: Experiment) -> tuple[Experiment, Config]:
    """Equal for equal runs: a setting that is given at its default changes nothing."""
    return replace(experiment, settings={}), experiment.config()


def _expand(
    content: Mapping[str, Any], defaults: Mapping[str, Any], where: str
) -> list[tuple[Experiment, set[str], Experiment]]:
    """Every run, with the parameters that its block sets, and what it would be without them."""
    common = {**defaults, **_mapping(content.get("common", {}), f"{where}: common")}
    for key, value in common.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            raise ValueError(f"{where}: common: {key} is a list; lists of values stand in grids")
    seeds = _seeds(content, where)
    if seeds is not None and "seed" in content.get("common", {}):
        raise ValueError(f"{where}: seed stands in common and in seeds; leave one out")
    blocks = content.get("grids", [{}])
    blocks = [blocks] if isinstance(blocks, Mapping) else blocks
    if isinstance(blocks, str) or not isinstance(blocks, Sequence) or not blocks:
        raise ValueError(f"{where}: grids takes a list of blocks, each with names and lists of values")
    base = _checked(common, f"{where}: common")
    out = []
    for number, block in enumerate(blocks, 1):
        place = f"{where}: block {number} of grids"
        lists = {k: _values(k, v, place) for k, v in _mapping(block, place).items()}
        if seeds is not None:
            lists.setdefault("seed", seeds)
        for values in itertools.product(*lists.values()):
            out.append((_checked({**common, **dict(zip(lists, values, strict=True))}, place), set(lists), base))
    order = list(dict.fromkeys(experiment.seed for experiment, _, _ in out))
    return sorted(out, key=lambda entry: order.index(entry[0].seed))  # what a stopped study has done is balanced


def _seeds(content: Mapping[str, Any], where: str) -> list[Any] | None:
    if "seeds" not in content:
        return None
    seeds = content["seeds"]
    if isinstance(seeds, Sequence) and not isinstance(seeds, str):
        return _values("seeds", seeds, where)
    if not re.fullmatch(r"[0-9]+", str(seeds)) or int(seeds) < 1:
        raise ValueError(f"{where}: seeds={seeds!r}: it takes a number of seeds, at least 1, or a list of them")
    return list(range(int(seeds)))


def _mapping(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{place} takes names with values, as in 'method: hacpo', not {value!r}")
    for key in value:
        if key in ("out", "settings"):
            told = "the sweep chooses the folders" if key == "out" else "give its settings by their own names"
            raise ValueError(f"{place}: leave {key} out, {told}")
    if "seeds" in value:
        raise ValueError(f"{place}: seeds stands beside common and grids; in here it is seed")
    return value


def _values(name: str, given: Any, place: str) -> list[Any]:
    values = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not values:
        raise ValueError(f"{place}: {name} has no values, so nothing would run")
    if bad := [v for v in values if isinstance(v, Mapping | list | tuple)]:
        raise ValueError(f"{place}: {name} takes one value or a list of values, not {bad[0]!r}")
    return values


def _checked(parameters: Mapping[str, Any], place: str) -> Experiment:
    for name, value in parameters.items():
        if name not in ("out", "settings", "tests", "workers") and (value == "" or isinstance(value, Mapping)):
            raise ValueError(f"{place}: {name} has no value; none stands for: as the method has it")
    try:
        experiment = check_parameters(parameters)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from None
    _check_agents(experiment.agents, place)
    for name in ("problems", "test", "tests"):
        given = getattr(experiment, name)
        for source in given.split(",") if name == "tests" else [given]:
            if (source := source.strip()) and source not in ARITHMETIC_SETS and not Path(source).exists():
                known = ", ".join(ARITHMETIC_SETS)
                raise FileNotFoundError(f"{place}: {name}={source!r} is neither a file nor one of {known}")
    return experiment


def _check_agents(agents: str, place: str) -> None:
    """Names of built-in sets and agents; folders and hub ids have a slash or exist."""
    from hacpo_kit.models.sources import built_in_names

    names, known = [n for a in agents.split(",") if (n := a.strip())], built_in_names()
    if not names:
        raise ValueError(f"{place}: agents={agents!r} names nobody")
    for name in names:
        if name not in known and "/" not in name and not Path(name).exists():
            there = f"there are {', '.join(known)}, folders, and hub ids owner/name"
            raise ValueError(f"{place}: unknown agents {name!r}{did_you_mean(name, known)}; {there}")


def _name(experiment: Experiment, set_here: set[str], base: Experiment) -> str:
    """`hacpo-tiny-model-pair-alpha=2.0-seed0`: method, agents, what else the block sets to another value than the base, seed."""
    mine, others = experiment.parameters, base.parameters
    others = {**{name: Config.model_fields[name].default for name in other_settings()}, **others}
    marks = [f"{k}={mine[k]}" for k in sorted(set_here - {"method", "agents", "seed"}) if mine[k] != others[k]]
    return "-".join(
        _file_name(part) for part in (experiment.method, experiment.agents, *marks, f"seed{experiment.seed}")
    )


def _file_name(text: str) -> str:
    """The text as part of a file name; what had to be changed or cut gets a mark of the whole, so that it stays its own."""
    name = re.sub(r"[^\w.=+-]+", "+", text)[-60:]
    return name if name == text else f"{name.strip('+-.')}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


# ── YAML ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _read_yaml(path: Path) -> Any:
    """The content with every value as text, which the checks turn into what each parameter takes.

    YAML itself reads 1e-4 as text, no as false, 010 as eight and 1:30 as ninety, and of a key given twice keeps the last.
    """
    import yaml

    class Loader(yaml.BaseLoader):  # makes text, lists and mappings, nothing else, so it is as safe as safe_load
        def construct_mapping(self, node, deep=False):
            seen: set[str] = set()
            for key, _ in node.value:
                line = f"{path.name}, line {key.start_mark.line + 1}"
                if not isinstance(key.value, str):
                    raise ValueError(f"{line}: a key has to be a name")
                if key.value in seen:
                    raise ValueError(f"{line}: {key.value!r} is given twice")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    if not path.is_file():
        raise FileNotFoundError(f"no grid {path}: give a YAML file with {', '.join(KEYS)}")
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is no YAML: {error}") from None
