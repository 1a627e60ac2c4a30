"""A grid of experiments in a YAML file: shared parameters, and lists of which every combination is run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo_kit.common.files import check_name
from hacpo_kit.config import did_you_mean
from hacpo_kit.experiments.notebooks import notebook_parameters
from hacpo_kit.experiments.parameters import Experiment
from hacpo_kit.experiments.paths import file_name, find_notebook
from hacpo_kit.tasks.arithmetic import ARITHMETIC_SETS

KEYS = ("name", "notebook", "common", "seeds", "grids")


@dataclass(frozen=True)
class Grid:
    """The runs of a study, by the names of their folders and in the order in which they run."""

    name: str
    notebook: Path
    runs: Mapping[str, Experiment]


def read_grid(grid: str | Path | Mapping[str, Any]) -> Grid:
    """Read and check a grid from a YAML file, or from a mapping of the same form.

    Keys, all optional: `name` of the study and its folder (default: the name of the file); `notebook` (default:
    06_experiment); `common`, parameters of every run; `seeds`, a number of seeds or a list of them; `grids`, a list of
    blocks, each with lists of which every combination is run. Identical runs of several blocks are run once. All runs of
    the first seed come before those of the second, so a stopped study has all methods for some seeds.

    Raises ValueError with the place and the fault, FileNotFoundError for a missing grid, notebook, or file of problems.
    """
    place, name = ("the grid", "study") if isinstance(grid, Mapping) else (Path(grid).name, Path(grid).stem)
    content = grid if isinstance(grid, Mapping) else _read_yaml(Path(grid))
    if not isinstance(content, Mapping):
        raise ValueError(f"{place} has no keys; it takes {', '.join(KEYS)}")
    for key in content:
        if key not in KEYS:
            raise ValueError(f"{place}: unknown key {key!r}{did_you_mean(str(key), KEYS)}; it takes {', '.join(KEYS)}")
    name, notebook = content.get("name", name), find_notebook(content.get("notebook", "06_experiment"))
    defaults, common = notebook_parameters(notebook), _parameters(content.get("common", {}), f"{place}: common")
    if "settings" not in defaults:
        raise ValueError(f"{place}: {notebook.name} is not an experiment; start from a copy of 06_experiment")
    base = _experiment({**defaults, **common}, f"{place}: common")
    all_seeds = {"seed": _seeds(content["seeds"], place)} if "seeds" in content else {}
    if all_seeds and "seed" in common:
        raise ValueError(f"{place}: seed in common and seeds exclude each other; give one of them")
    blocks = content.get("grids", [{}])
    blocks = [blocks] if isinstance(blocks, Mapping) else blocks
    if not isinstance(blocks, list) or not blocks:
        raise ValueError(f"{place}: grids={blocks!r}: it takes a list of blocks, each with names and lists of values")
    runs: dict[str, Experiment] = {}
    for number, block in enumerate(blocks, 1):
        where = f"{place}: block {number} of grids"
        block = _parameters(block, where)
        lists = {**all_seeds, **{name: v if isinstance(v, list) else [v] for name, v in block.items()}}
        if empty := [name for name, values in lists.items() if not values]:
            raise ValueError(f"{where}: {empty[0]} has no values, so there is no run")
        for values in itertools.product(*lists.values()):
            experiment = _experiment({**defaults, **common, **dict(zip(lists, values, strict=True))}, where)
            runs.setdefault(_run_name(experiment, lists, base), experiment)
    seeds = {name: experiment.config().seed for name, experiment in runs.items()}
    order = list(dict.fromkeys(seeds.values()))
    runs = {name: runs[name] for name in sorted(runs, key=lambda name: order.index(seeds[name]))}
    return Grid(check_name(str(name), "a folder"), notebook, runs)


def _seeds(seeds: Any, place: str) -> list[Any]:
    if isinstance(seeds, list):
        return seeds
    if not re.fullmatch(r"[1-9][0-9]*", str(seeds)):
        raise ValueError(f"{place}: seeds={seeds!r}: it takes a number of seeds, at least 1, or a list of seeds")
    return list(range(int(seeds)))


def _parameters(block: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(block, Mapping):
        raise ValueError(f"{place}: {block!r}: it takes names with values, such as 'method: hacpo'")
    if bad := [name for name in ("out", "settings", "seeds") if name in block]:
        raise ValueError(
            f"{place}: {bad[0]} cannot be set here; settings have their own names, the sweep chooses the folders"
        )
    return block


def _experiment(parameters: Mapping[str, Any], place: str) -> Experiment:
    """Return a checked experiment whose agents and problems exist."""
    from hacpo_kit.models.sources import built_in_names

    try:
        experiment = Experiment.from_parameters(parameters)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    known = built_in_names()
    for name in map(str.strip, experiment.agents.split(",")):
        if name not in known and "/" not in name and not (name and Path(name).exists()):  # a hub id has a slash
            near = did_you_mean(name, known)
            raise ValueError(
                f"{place}: unknown agents {name!r}{near}; there are {', '.join(known)}, folders, and hub ids"
            )
    further = [name for source in experiment.tests.split(",") if (name := source.strip())]
    for source in (experiment.problems, experiment.test, *further):
        if source not in ARITHMETIC_SETS and not Path(source).is_file():
            known = ", ".join(ARITHMETIC_SETS)
            raise FileNotFoundError(f"{place}: the set of problems {source!r} is neither a file nor one of {known}")
    return experiment


def _run_name(experiment: Experiment, varied: Mapping[str, Any], base: Experiment) -> str:
    """Return a name such as `hacpo-tiny-model-pair-alpha=2.0-seed0`, which a larger grid does not change.

    It has the method, the agents, those settings of the block that differ from the base, and the seed.
    """
    own, others = experiment.parameters, base.parameters
    names = sorted(set(varied) - {"method", "agents", "seed"})
    marks = [f"{name}={own[name]}" for name in names if own[name] != others[name]]
    return "-".join(map(file_name, (experiment.method, experiment.agents, *marks, f"seed{own['seed']}")))


def _read_yaml(path: Path) -> Any:
    """Return the content with every value as text, which each parameter converts to its type.

    YAML itself would read 1e-4 as text, no as false and 010 as eight, and of a key that is given twice keep the last value.
    """
    import yaml

    class Loader(yaml.BaseLoader):  # as safe as SafeLoader: it makes only text, lists and mappings
        def construct_mapping(self, node, deep=False):
            keys = [key.value for key, _ in node.value]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise ValueError(f"{path.name}, line {node.start_mark.line + 1}: {twice[0]!r} is given twice")
            return super().construct_mapping(node, deep)

    if not path.is_file():
        raise FileNotFoundError(f"there is no grid {path}; give a YAML file with {', '.join(KEYS)}")
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is not valid YAML: {error}") from None
