"""What `export_verl` takes, from the parameters of `hacpo-kit run` or from the folder of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hacpo_kit.common.files import read_lines
from hacpo_kit.config import METHODS, PAPER_PAIRS, PAPER_TRAINING, Config, coerce, settings_from_text
from hacpo_kit.experiments.parameters import check_parameters
from hacpo_kit.export.verl import VerlOptions
from hacpo_kit.runs.changes import FILE as CHANGES
from hacpo_kit.runs.record import read_record, reload_problems

_INTERVALS = ("eval_every", "eval_k", "save_every")


def from_parameters(values: Mapping[str, Any], pair: str | None = None, **options: Any) -> dict[str, Any]:
    """Return the arguments of `export_verl` for the parameters of `hacpo-kit run`, and other fields of VerlOptions.

    `pair` gives the paper's settings, which `values` override. Raises ValueError for an unknown parameter or pair, and for
    a value that its parameter does not take.
    """
    paper = {}
    if pair is not None:
        Config.preset("hacpo", pair=pair)  # raises ValueError for an unknown pair
        fixed = METHODS.get(str(values.get("method", "hacpo")), {})  # alpha=0 stays 0 with every pair
        paper = {n: v for n, v in {**PAPER_TRAINING, **PAPER_PAIRS[pair]}.items() if n not in fixed}
    experiment = check_parameters({**paper, **values})
    return {
        "config": experiment.config(), "problems": experiment.problem_set(), "test": experiment.test_set(),
        "agents": experiment.sources(), "steps": experiment.steps,
        "options": VerlOptions(**{name: getattr(experiment, name) for name in _INTERVALS}, **options),
    }  # fmt: skip


def from_run(folder: str | Path, values: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Return the arguments of `export_verl` for a run with its agents at its start; `values` override its settings.

    Raises FileNotFoundError for a folder without a run; ValueError for a setting that changed during the run and is not among
    `values`, for a reward function other than boxed_math, and for problems that cannot be loaded again unchanged.
    """
    folder, values = Path(folder), dict(values or {})
    record = read_record(folder)
    if record["reward_function"] != "boxed_math":
        raise ValueError(
            f"run {folder} used the reward function {record['reward_function']}, which reward.py cannot call; use -p instead "
            "of --run, and start launch.sh with REWARD=FILE, which defines compute_score as verl documents it"
        )
    if changed := {line["setting"] for line in read_lines(folder / CHANGES)} - set(values):
        names = ", ".join(sorted(changed))
        raise ValueError(f"run {folder} changed {names} while it ran; give the value for verl with -p")
    sets = {name: reload_problems(folder, record[name]) for name in ("problems", "test")}
    if different := [n for n, loaded in sets.items() if loaded and loaded.fingerprint() != record[n]["fingerprint"]]:
        raise ValueError(f"the {different[0]} of run {folder} have changed since it ran")
    schedule = {name: coerce(name, values.pop(name, record[name]), int) for name in ("steps", *_INTERVALS)}
    return {
        **sets, "agents": record["agents"], "steps": schedule.pop("steps"), "options": VerlOptions(**schedule, **options),
        "config": Config.read(folder / "config.json").replace(**settings_from_text(values)),
    }  # fmt: skip
