"""The command `hacpo-kit`: run a notebook with parameters, go on with a run, evaluate agents."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def main(context: click.Context) -> None:
    """Train several language models on each other's verified answers."""
    if context.invoked_subcommand != "sweep":  # which has a bar of its own
        # a kernel started from here has nobody who watches a bar
        os.environ.setdefault("HACPO_KIT_PROGRESS", "lines")


def _pairs(argument: str, help: str):
    """The option -p NAME VALUE, as often as wanted."""
    return click.option("-p", argument, nargs=2, multiple=True, metavar="NAME VALUE", help=help)


@main.command()
@click.argument("notebook", default="06_experiment")
@_pairs("parameters", "Set a parameter of the notebook, or any setting of Config.")
@click.option("--name", default=None, help="Name of the run; default: notebook and parameters.")
@click.option("--out", default="reports/runs", show_default=True, help="Folder for notebook, HTML and run folder.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def run(notebook: str, parameters: tuple[tuple[str, str], ...], name: str | None, out: str, quiet: bool) -> None:
    """Run NOTEBOOK (default: 06_experiment) and leave it executed, as HTML, with its run folder.

    The same command goes on where a stopped run ended.

    Example: hacpo-kit run -p method gspo -p steps 20 -p seed 1
    """
    from hacpo_kit.experiments import notebooks as experiments

    with _readable_errors():
        source = experiments.find_notebook(notebook)
        values = dict(parameters)
        if "experiment" in source.stem:
            defaults = experiments.notebook_parameters(source)
            checked = experiments.check_parameters({**defaults, **values})
            values = {k: checked.parameters.get(k, checked.settings) for k in values}
        told = "-".join([source.stem, *(f"{k}={v}" for k, v in values.items() if k != "out")])
        told = re.sub(r"[^\w.=+-]+", "+", told)  # it becomes a file name
        name = name or (told if len(told) <= 100 else f"{told[:90]}-{hashlib.sha256(told.encode()).hexdigest()[:8]}")
        executed, html = experiments.run_notebook(source, values, name=name, out=out, progress=not quiet)
    click.echo(f"notebook  {executed}\nreport    {html}")
    if (executed.with_suffix("") / "run.json").exists():
        click.echo(f"run       {executed.with_suffix('')}")


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
@click.option("--steps", type=int, default=None, help="New number of steps; default: the run's own.")
@_pairs("changes", "Change a setting from here on.")
def resume(folder: str, steps: int | None, changes: tuple[tuple[str, str], ...]) -> None:
    """Go on with the run in FOLDER from its last checkpoint.

    Example, after running out of memory: hacpo-kit resume FOLDER -p microbatch_tokens 4096
    """
    from hacpo_kit.config import settings_from_text
    from hacpo_kit.training import resume as go_on

    with _readable_errors():
        result = go_on(folder, steps=steps, changes=settings_from_text(dict(changes)))
    click.echo(
        f"{folder}: {result.state.step} steps done (notebook and HTML are as the last `hacpo-kit run` left them)"
    )


@main.command()
@click.argument("folder", type=click.Path(exists=True))
@_pairs("parameters", "Set a parameter of 07_compare.")
@click.option("--out", default=None, metavar="FILE", help="The HTML page; default: report.html in FOLDER.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def report(folder: str, parameters: tuple[tuple[str, str], ...], out: str | None, quiet: bool) -> None:
    """Compare the methods in FOLDER, which holds runs (or is a Parquet table of them).

    Leaves an HTML page without code, the executed notebook, and the table that both were made of, side by side.

    Example: hacpo-kit report reports/runs --out reports/mine.html
    """
    from hacpo_kit.common import files
    from hacpo_kit.experiments import compare
    from hacpo_kit.experiments import notebooks as experiments

    source = Path(folder)
    page = Path(out) if out else source / "report.html" if source.is_dir() else source.with_suffix(".html")
    with _readable_errors():
        if page.suffix != ".html":
            raise ValueError(f"--out {out}: give the name of an HTML page, like report.html")
        frame = compare.load(source)
        _, notes = compare.usable(frame)  # what cannot be compared is refused before anything starts
        page.parent.mkdir(parents=True, exist_ok=True)
        table = page.with_suffix(".parquet")
        if table.resolve() != source.resolve():
            with files.replacing(table) as temporary:
                frame.to_parquet(temporary, index=False)
        # inside the project a relative path: the stored notebook then says nothing of this machine
        where = table.resolve()
        inside = where.is_relative_to(experiments.PROJECT)
        values = {**dict(parameters), "runs": str(where.relative_to(experiments.PROJECT) if inside else where)}
        executed, html = experiments.run_notebook(
            "07_compare", values, name=page.stem, out=page.parent, progress=not quiet, code=False
        )
    click.echo(
        "".join(f"note      {note}\n" for note in notes) + f"report    {html}\nnotebook  {executed}\ntable     {table}"
    )


@main.command()
@click.argument("grid", type=click.Path(dir_okay=False))
@click.option("--out", default=None, help="Folder for all runs; default: reports/runs/ and the grid's name.")
@click.option("--jobs", default=1, show_default=True, help="How many runs at a time.")
@click.option("--retries", default=2, show_default=True, help="New tries of a run whose kernel could not start.")
@click.option("--threads", type=int, default=None, help="Threads of each run; default: OMP_NUM_THREADS, else 1.")
@click.option(
    "--keep-checkpoints", type=click.Choice(["last", "none"]), default="last", show_default=True,
    help="Of finished runs; without one a run cannot be made longer.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Check everything, list the runs, start nothing.")
@click.option("--quiet", is_flag=True, help="No progress.")
def sweep(grid: str, out: str | None, dry_run: bool, quiet: bool, **options) -> None:
    """Run every combination in the YAML file GRID, each as `hacpo-kit run` does.

    The same command goes on: finished runs are skipped, others continue where they stand. Ctrl-C ends the runs after
    their step. Exit status 1 if a run failed.
    """
    from hacpo_kit.experiments import grids, sweeps

    with _readable_errors():
        plan = grids.read_grid(grid)
        folder = Path(out) if out else sweeps.default_folder(plan)
        if dry_run:
            states = sweeps.standing(plan, folder)
            for name, state in states.items():
                click.echo(f"{name}: {state}")
            done = list(states.values()).count("finished")
            click.echo(f"{len(states)} runs, {done} finished, in {folder}; nothing was started")
            return
        table = sweeps.sweep(grid, folder, progress="off" if quiet else "auto", **options)
    for name, run in table[table["status"] == "failed"].iterrows():
        click.echo(f"failed  {name}: {run['error']} ({folder / name}.error.txt)", err=True)
    counts = ", ".join(f"{count} {status}" for status, count in table["status"].value_counts().items())
    click.echo(f"{plan.name}: {counts}; hk.read_runs({str(folder)!r}) reads them")
    if open_ := table["status"].isin(["stopped", "waiting"]).sum():
        click.echo(f"hacpo-kit: stopped with {open_} runs to do; the same command goes on", err=True)
        sys.exit(130)
    sys.exit(int((table["status"] == "failed").any()))


@main.command("eval")
@click.argument("agents", nargs=-1, required=True, metavar="AGENT…")
@click.option("--on", "sets", multiple=True, required=True, metavar="SET,…", help="Test sets, separated by commas.")
@click.option("--k", type=int, default=None, help="best@k; default: as each set has it (1; AIME 2025: 30).")
@click.option("--samples", type=int, default=None, help="Answers to each problem; default: k.")
@click.option("--temperature", type=float, default=None, help="Default: 0 (greedy) for one answer, 1 for more.")
@click.option("--max-new-tokens", type=int, default=None, help="Default: 32 for arithmetic sets, 4096 for others.")
@click.option("--batch", default=128, show_default=True, help="Answers sampled at once.")
@click.option("--limit", type=int, default=None, help="Only the first problems of each set.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", default=None, help="Folder; default: in reports/runs/, named after the settings.")
@click.option("--dtype", default="float32", show_default=True, help="Of the weights: float32, bfloat16, float16.")
@click.option("--device", default=None, help="Default: a GPU if there is one; the CPU for built-in agents.")
@click.option("--engine", default="transformers", show_default=True, help="What samples: transformers or vllm.")
def evaluate(
    agents, sets, k, samples, temperature, max_new_tokens, batch, limit, seed, out, dtype, device, engine
) -> None:
    """Evaluate agents on test sets and print a table.

    AGENT: a built-in agent or set, a folder, a hub id; NAME=AGENT renames it. SET: arithmetic, sums, differences, larger,
    mixed, math500, math, gsm8k, aime25, amc23, minerva_math, olympiadbench, a file with columns prompt and gold, or
    gsm8k=FILE for a file in that benchmark's form. Stopped, the same command goes on.

    Example: hacpo-kit eval tiny-model-pair after=path/to/agents/qwen3-sums --on sums,differences,larger
    """
    with _readable_errors("where it stopped"):
        from hacpo_kit.runs.scoreboard import evaluate_sets

        names = [name for given in sets for part in given.split(",") if (name := part.strip())]
        how = {"k": k, "samples": samples, "temperature": temperature, "max_new_tokens": max_new_tokens, "limit": limit}
        if out is None:
            asked = (agents, names, how, batch, seed, dtype, device, *([] if engine == "transformers" else [engine]))
            mark = hashlib.sha256(repr(asked).encode()).hexdigest()[:6]
            told = re.sub(r"[^\w.=+-]+", "+", f"eval-{'+'.join(names)}")[:80]
            out = f"reports/runs/{told}-{mark}"
        load = {"dtype": dtype, "device": device, "engine": engine}
        board = evaluate_sets(agents, names, out, **how, batch_size=batch, seed=seed, loading=load)
    click.echo(f"\n{board.to_markdown()}\n{out}: eval.json, eval.md, eval.csv, answers/")


@main.group()
def export() -> None:
    """Export a run for other programs."""


@export.command("verl")
@click.argument("out", type=click.Path(file_okay=False))
@_pairs("parameters", "A parameter of `run`, or a setting of Config.")
@click.option("--run", "folder", default=None, metavar="FOLDER", help="Export this run; -p overrides its settings.")
@click.option("--pair", default=None, help="The paper's settings for this pair of models; -p overrides them.")
@click.option(
    "--template", default="{}", metavar="JSON", help="Keywords for chat templates: '{\"enable_thinking\": false}'."
)
@click.option("--gpus", default=8, show_default=True, help="GPUs per node.")
@click.option("--nodes", default=1, show_default=True, help="Nodes.")
@click.option(
    "--max-prompt-tokens", type=int, default=None, help="Default: the longest prompt, if it can be measured here."
)
def export_verl(out, parameters, folder, pair, template, gpus, nodes, max_prompt_tokens) -> None:
    """Write the folder OUT, with which the authors' HACPO recipe on verl runs this training.

    OUT/launch.sh starts it there. OUT/mapping.md lists the name of every setting in the recipe.

    Example: hacpo-kit export verl for-verl --pair "qwen3-1.7b-base + qwen3-4b-base" -p problems math.jsonl -p steps 58
    -p agents Qwen/Qwen3-1.7B-Base,Qwen/Qwen3-4B-Base
    """
    with _readable_errors():
        from hacpo_kit.config import coerce
        from hacpo_kit.export import sources, verl

        if folder is not None and pair is not None:
            raise ValueError("--run and --pair: give one of them")
        options = {"gpus": gpus, "nodes": nodes, "max_prompt_tokens": max_prompt_tokens}
        options["template"] = coerce("template", template, dict)
        values = dict(parameters)
        if folder is not None:
            arguments = sources.from_run(folder, values, **options)
        else:
            arguments = sources.from_parameters(values, pair, **options)
        notes = verl.export_verl(out=out, **arguments)
    click.echo(
        "".join(f"note      {note}\n" for note in notes) + f"launch    {out}/launch.sh\nmapping   {out}/mapping.md"
    )


@main.command()
@click.argument("agents", nargs=-1, metavar="[AGENT…]")
@_pairs("settings", "Any setting of Config, or method.")
@click.option("--pair", default=None, help="The paper's settings for one of its model pairs.")
@click.option("--prompt-tokens", default=256, show_default=True, help="Length of the longest prompt.")
@click.option("--dtype", default="float32", show_default=True, help="What the agents compute in: float32, bfloat16.")
@click.option("--gradient-checkpointing", is_flag=True, help="Compute activations twice and keep fewer.")
@click.option("--lora", is_flag=True, help="Only LoRA adapters learn.")
@click.option("--offload", is_flag=True, help="Idle parts rest in host memory.")
@click.option("--device", default=None, help="Default: a GPU if there is one.")
@click.option("--engine", type=click.Choice(["transformers", "vllm"]), default="transformers", help="What samples.")
@click.option("--device-memory", type=float, default=None, metavar="GIB", help="Default: that of the device.")
@click.option("--out", default="reports/runs", show_default=True, help="Where runs are written.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (bytes).")
def doctor(agents, settings, pair, device_memory, out, as_json, **options) -> None:
    """Report versions, devices, extras and disk, and whether AGENTs fit on the device, phase by phase.

    AGENT: a built-in agent or set, a folder, a hub id. Only their configurations are read.

    Example: hacpo-kit doctor Qwen/Qwen3-1.7B-Base Qwen/Qwen3-4B-Base --dtype bfloat16 -p max_new_tokens 2048
    """
    from hacpo_kit.config import Config, settings_from_text

    with _readable_errors():
        given = dict(settings)
        config = Config.preset(given.pop("method", "hacpo"), pair=pair, **settings_from_text(given))
        from hacpo_kit.runs.doctor import examine, told

        memory = {} if device_memory is None else {"device_memory": int(device_memory * 2**30)}
        report = examine(agents, config, folder=out, **memory, **options)
    click.echo(json.dumps(report, indent=2) if as_json else told(report))
    sys.exit(0 if report.get("estimate", {}).get("fits", True) else 1)


class _readable_errors:
    """What the user can mend is one line on stderr and exit status 2; faults of the program keep their traceback."""

    def __init__(self, where: str = "from the last checkpoint"):
        self.where = where

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if isinstance(error, KeyboardInterrupt):
            click.echo(f"hacpo-kit: stopped; the same command goes on {self.where}", err=True)
            sys.exit(130)
        extra = isinstance(error, ModuleNotFoundError) and "pip install" in str(error)
        if extra or isinstance(error, ValueError | OSError | MemoryError):
            click.echo(f"hacpo-kit: {error}", err=True)
            sys.exit(2)
        if type(error).__name__ == "PapermillExecutionError":
            click.echo(f"hacpo-kit: the notebook failed: {error.ename}: {error.evalue}", err=True)
            sys.exit(1)
