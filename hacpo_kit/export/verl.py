"""Export to more GPUs: a run's settings, problems and agents as the authors' recipe on verl reads them.

    Config, problems, agents  →  overrides.txt, train.parquet, test.parquet, reward.py, launch.sh, mapping.md

The recipe is `recipe/hacpo` in the branch of github.com/zzx-peter/HACRL-code for verl's V1 trainer (commits in recipe.yaml).
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacpo_kit.config import Config, whole_number
from hacpo_kit.export.members import Member, load_members
from hacpo_kit.export.overrides import RECIPE, SETTINGS, config_values, differences, hydra, meaning, run_values
from hacpo_kit.tasks.loading import load_problems
from hacpo_kit.tasks.problems import Problem, Problems


@dataclass(frozen=True)
class VerlOptions:
    """How verl evaluates, saves and distributes the run.

    eval_every and save_every are in steps, eval_k counts the responses to each test problem (1: greedy), gpus those of one
    node. verl excludes and counts prompts that are longer than max_prompt_tokens. template has keywords for every chat
    template.
    """

    eval_every: int = 4
    eval_k: int = 1
    save_every: int = 5
    gpus: int = 8
    nodes: int = 1
    max_prompt_tokens: int = 1024
    template: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        for name in ("eval_every", "eval_k", "save_every", "gpus", "nodes", "max_prompt_tokens"):
            whole_number(name, getattr(self, name), 1)


def export_verl(
    config: Config,
    problems: Sequence[Problem],
    out: str | Path,
    *,
    agents: str | Sequence[str | Path | Mapping[str, Any]],
    steps: int,
    test: Sequence[Problem] | None = None,
    options: VerlOptions | None = None,
) -> list[str]:
    """Write the folder `out`, with which the authors' verl recipe runs this config; return the differences as sentences.

    `agents` is a built-in set, sources as `load_agent` takes them, or the records of a run.json. train.parquet holds the
    problems of `steps` steps in the order in which a run here uses them.

    Raises ValueError for a folder that is not empty, a problem without a reference answer, and settings that the recipe does
    not implement; FileNotFoundError for a folder without a model. Nothing is written in these cases.
    """
    out, options, steps = Path(out), options or VerlOptions(), whole_number("steps", steps, 1)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; choose another, or remove it first")
    problems, test = _with_golds("problems", problems), None if test is None else _with_golds("test", test)
    members = load_members(agents, options.template)
    sharing = len(members) if config.share == "all" else 1
    eval_every = None if test is None else options.eval_every
    values = {
        **config_values(config, sharing, options.gpus * options.nodes),
        **run_values(config, options.max_prompt_tokens, steps, eval_every, options.eval_k, options.save_every),
        **{name: entry["value"] for name, entry in RECIPE["fixed"].items()},
        "trainer.n_gpus_per_node": options.gpus,
        "trainer.nnodes": options.nodes,
    }
    notes = differences(config, sharing, [member.name for member in members if not member.local])
    texts = {
        "config.json": json.dumps(config.to_dict(), indent=2) + "\n",
        "overrides.txt": _overrides_text(values),
        "reward.py": _template("reward.py.txt"),
        "launch.sh": _launch_script(config, members, "train.parquet" if test is None else "test.parquet"),
        "mapping.md": _mapping(config, values, notes),
    }
    size = config.prompts_per_step
    batches = [problems.batch(step * size, size, seed=config.seed) for step in range(steps)]
    tables = {"train": _rows([p for batch in batches for p in batch], problems.name, "train")}
    if test is not None:
        tables["test"] = _rows(test, test.name, "test")
    _write(out, texts, tables)
    return notes


def _with_golds(name: str, problems: Sequence[Problem]) -> Problems:
    problems = problems if isinstance(problems, Problems) else load_problems(list(problems))
    if not problems:
        raise ValueError(f"{name} contains no problems")
    if missing := [p.id for p in problems if not p.gold]:
        raise ValueError(
            f"{name}: {len(missing)} of {len(problems)} problems have no reference answer ({', '.join(map(repr, missing[:5]))}); "
            "verl would give every response to them the reward 0: remove them"
        )
    return problems


def _write(out: Path, texts: Mapping[str, str], tables: Mapping[str, list[dict]]) -> None:
    """Write the folder completely or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        folder = Path(temporary) / "export"
        folder.mkdir()
        for name, rows in tables.items():
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "launch.sh").chmod(0o755)
        folder.replace(out)


def _rows(problems: Sequence[Problem], name: str, split: str) -> list[dict[str, Any]]:
    """Return rows in the form that verl's RLHFDataset documents."""
    return [
        {
            "data_source": name,
            "prompt": _messages(p),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": p.gold},
            "extra_info": {"split": split, "index": index, "id": p.id},
        }
        for index, p in enumerate(problems)
    ]


def _messages(problem: Problem) -> list[dict[str, str]]:
    """Return the prompt as messages; raises ValueError if they contain more than role and content."""
    messages = [{"role": "user", "content": problem.prompt}] if isinstance(problem.prompt, str) else problem.prompt
    if more := {key for message in messages for key in message} - {"role", "content"}:
        raise ValueError(
            f"problem {problem.id!r}: the recipe reads role and content of a message only, not {sorted(more)}"
        )
    return [dict(message) for message in messages]


def _template(file: str, **texts: str) -> str:
    """Return the text of a template beside this file, with @NAME@ replaced by the text of that name."""
    content = (Path(__file__).parent / file).read_text(encoding="utf-8")
    for name, text in texts.items():
        content = content.replace(f"@{name.upper()}@", text)
    return content


def _overrides_text(values: Mapping[str, Any]) -> str:
    lines = ["# Hydra overrides for recipe.hacpo.main_hacpo; launch.sh reads them, and adds models and paths"]
    for name, value in values.items():
        lines += [f"# {why}" for why in [meaning(name)] if why] + [f"{name}={hydra(value)}"]
    return "\n".join(lines) + "\n"


def _launch_script(config: Config, members: Sequence[Member], test_file: str) -> str:
    variables = {member.name: f"MODEL_{number}" for number, member in enumerate(members, start=1)}
    models = [f"{variables[m.name]}=${{{variables[m.name]}:-{shlex.quote(m.path)}}}  # {m.name}" for m in members]
    jobs = {config.method: members}
    if config.share == "none":  # one job after the other, because each takes every GPU
        jobs = {f"{config.method}-{member.name}": [member] for member in members}
    return _template(
        "launch.sh.txt",
        title=f"{config.method} with {', '.join(variables)}",
        recipe=RECIPE["recipe"],
        models="\n".join(models),
        variables=" ".join(f'"${variable}"' for variable in variables.values()),
        test_file=test_file,
        jobs="\n".join(f'run {shlex.quote(name)} {_agents_word(job, variables)} "$@"' for name, job in jobs.items()),
    )


def _agents_word(job: Sequence[Member], variables: Mapping[str, str]) -> str:
    """Return the override of hacpo.agents as one word of bash, which contains the models' paths as variables."""
    word, text = "", "hacpo.agents=["
    for member in job:
        word += shlex.quote(f"{text}{{id:{hydra(member.name)},model_path:") + f'"$(quoted "${variables[member.name]}")"'
        more: dict[str, Any] = {"apply_chat_template_kwargs": dict(member.template_options) or None}
        if member.plain_template:
            more["actor_rollout_ref"] = {"model": {"custom_chat_template": member.plain_template}}
        text = f",{hydra(more)[1:]},"
    return word + shlex.quote(f"{text[:-1]}]")


def _mapping(config: Config, values: Mapping[str, Any], notes: Sequence[str]) -> str:
    """Return the table that has the name of every setting in the recipe, or the reason why there is none."""
    stored, rows = config.to_dict(), []
    for setting, entry in SETTINGS.items():
        names = [f"`{name}={hydra(values[name])}`" if name in values else f"`{name}`" for name in entry["names"]]
        where = ", ".join(names) or f"not mappable: always {entry['only']}"
        rows.append(f"| `{setting}` | {stored[setting]} | {where} | {entry['remark']} |")
    listed = "\n".join(f"- {note}" for note in notes)
    texts = {"recipe": RECIPE["recipe"], "verl": RECIPE["verl"], "notes": listed, "settings": "\n".join(rows)}
    return _template("mapping.md.txt", **texts)
