"""The command `hacpo-kit`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

Pairs = tuple[tuple[str, str], ...]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Train several language models on each other's verified responses."""
    os.environ.setdefault("HACPO_KIT_PROGRESS", "lines")  # in the kernels that a command starts


def _pairs(argument: str, help: str):
    """Return the option -p NAME VALUE, which can be given several times."""
    return click.option("-p", argument, nargs=2, multiple=True, metavar="NAME VALUE", help=help)


def _time_limit(process: str):
    """Return the option --time-limit SECONDS."""
    help = f"{process} that takes longer is ended; the same command resumes it. Default: no limit."
    return click.option("--time-limit", type=float, default=None, metavar="SECONDS", help=help)


@contextlib.contextmanager
def _errors(resumes: str = "resumes from the last checkpoint") -> Iterator[None]:
    """Print an error that the user can correct as one line and exit with status 2; other errors keep their traceback."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"hacpo-kit: stopped; the same command {resumes}", err=True)
        sys.exit(130)
    except Exception as error:
        missing_extra = isinstance(error, ModuleNotFoundError) and "pip install" in str(error)
        if missing_extra or isinstance(error, ValueError | OSError | MemoryError):
            click.echo(f"hacpo-kit: {error}", err=True)
            sys.exit(2)
        if type(error).__name__ == "PapermillExecutionError":
            click.echo(f"hacpo-kit: the notebook failed: {error.ename}: {error.evalue}", err=True)
            sys.exit(1)
        raise


@main.command()
@click.argument("notebook", default="06_experiment")
@_pairs("parameters", "A parameter of the notebook, or any setting of Config.")
@click.option("--name", default=None, help="Name of the run; default: notebook and parameters.")
@click.option("--out", default="reports/runs", show_default=True, help="Folder for notebook, HTML page and run folder.")
@_time_limit("A notebook")
@click.option("--quiet", is_flag=True, help="Show no progress bar.")
def run(notebook: str, parameters: Pairs, name: str | None, out: str, time_limit: float | None, quiet: bool) -> None:
    """Run NOTEBOOK (default: 06_experiment) and write the executed notebook, an HTML page, and the run folder.

    The same command resumes a stopped run.

    Example: hacpo-kit run -p method gspo -p steps 20 -p seed 1
    """
    with _errors():
        from hacpo_kit.experiments import notebooks, paths

        source = paths.find_notebook(notebook)
        values = notebooks.checked_values(source, dict(parameters))
        named = {**values, **values.get("settings", {})}
        marks = [f"{key}={value}" for key, value in named.items() if key not in ("out", "settings")]
        name = name or paths.file_name("-".join([source.stem, *marks]), longest=100)
        executed, html = notebooks.run_notebook(
            source, values, name=name, out=out, progress=not quiet, time_limit=time_limit
        )
    click.echo(f"notebook  {executed}\nreport    {html}")
    if (executed.with_suffix("") / "run.json").exists():
        click.echo(f"run       {executed.with_suffix('')}")


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
@click.option("--steps", type=int, default=None, help="New number of steps; default: that of the run.")
@_pairs("changes", "A setting that changes from the next step on.")
def resume(folder: str, steps: int | None, changes: Pairs) -> None:
    """Resume the run in FOLDER from its last checkpoint.

    Example, after running out of memory: hacpo-kit resume FOLDER -p microbatch_tokens 4096
    """
    with _errors():
        from hacpo_kit import training
        from hacpo_kit.config import settings_from_text

        result = training.resume(folder, steps=steps, changes=settings_from_text(dict(changes)))
    click.echo(f"{folder}: {result.state.step} steps done; `hacpo-kit run` updates notebook and HTML page")


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
@click.argument("step", type=int)
@click.argument("out")
@_pairs("changes", "A setting of the new run.")
def fork(folder: str, step: int, out: str, changes: Pairs) -> None:
    """Write the run OUT, which starts from the checkpoint after STEP of the run in FOLDER with other settings.

    Example: hacpo-kit fork reports/runs/demo 8 reports/runs/wider -p delta 0.8, then hacpo-kit resume reports/runs/wider
    """
    with _errors():
        from hacpo_kit.config import settings_from_text
        from hacpo_kit.runs.fork import fork

        folder = fork(folder, step, out, **settings_from_text(dict(changes)))
    click.echo(f"{folder}: `hacpo-kit resume {folder}` trains it")


@main.command()
@click.argument("folder", type=click.Path(exists=True))
@_pairs("parameters", "A parameter of 07_compare.")
@click.option("--out", default=None, metavar="FILE", help="The HTML page; default: report.html in FOLDER.")
@click.option("--quiet", is_flag=True, help="Show no progress bar.")
def report(folder: str, parameters: Pairs, out: str | None, quiet: bool) -> None:
    """Compare the methods of the runs in FOLDER, which can also be a Parquet table of runs.

    Writes an HTML page without code, the executed notebook, and the table of runs, side by side.

    Example: hacpo-kit report reports/runs --out reports/mine.html
    """
    from hacpo_kit.common.files import replacing
    from hacpo_kit.experiments import compare, notebooks, paths

    source = Path(folder)
    page = Path(out) if out else source / "report.html" if source.is_dir() else source.with_suffix(".html")
    with _errors():
        if page.suffix != ".html":
            raise ValueError(f"--out {out}: give the name of an HTML page, such as report.html")
        frame = compare.load(source)
        _, notes = compare.usable(frame)  # raises before the notebook starts
        page.parent.mkdir(parents=True, exist_ok=True)
        table = page.with_suffix(".parquet").resolve()
        if table != source.resolve():
            with replacing(table) as temporary:
                frame.to_parquet(temporary, index=False)
        # a path relative to the project does not depend on this machine
        runs = table.relative_to(paths.PROJECT) if table.is_relative_to(paths.PROJECT) else table
        values = {**dict(parameters), "runs": str(runs)}
        notebooks.run_notebook("07_compare", values, name=page.stem, out=page.parent, progress=not quiet, code=False)
    click.echo("".join(f"note      {note}\n" for note in notes) + f"report    {page}")
    click.echo(f"notebook  {page.with_suffix('.ipynb')}\ntable     {page.with_suffix('.parquet')}")


@main.command()
@click.argument("grid", type=click.Path(dir_okay=False))
@click.option("--out", default=None, help="Folder for all runs; default: reports/runs/ and the name of the grid.")
@click.option("--jobs", default=1, show_default=True, help="Number of runs at once.")
@click.option("--retries", default=2, show_default=True, help="New tries if a kernel cannot start.")
@click.option("--threads", type=int, default=None, help="Threads per run; default: OMP_NUM_THREADS, else 1.")
@click.option("--keep-checkpoints", type=click.Choice(["last", "none"]), default="last", help="Of finished runs.")
@_time_limit("A run")
@click.option("--dry-run", is_flag=True, help="Check the grid and list the runs; start nothing.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def sweep(grid: str, out: str | None, dry_run: bool, **options) -> None:
    """Run every combination in the YAML file GRID, each in the same way as `hacpo-kit run`.

    The same command resumes a stopped sweep and skips finished runs. Ctrl-C ends the runs after their current step. Exit
    status 1 if a run failed.
    """
    with _errors():
        from hacpo_kit.experiments import grids, sweeps

        plan = grids.read_grid(grid)
        folder = Path(out) if out else sweeps.default_folder(plan)
        if dry_run:
            states = sweeps.run_states(plan, folder)
            click.echo(
                "".join(f"{name}: {state}\n" for name, state in states.items()) + f"{len(states)} runs in {folder}"
            )
            return
        table = sweeps.sweep(grid, folder, **options)
    for name, error in table.loc[table["status"] == "failed", "error"].items():
        click.echo(f"failed  {name}: {error} ({folder / name}.error.txt)", err=True)
    counts = ", ".join(f"{count} {status}" for status, count in table["status"].value_counts().items())
    click.echo(f"{plan.name}: {counts}; hk.read_runs({str(folder)!r}) returns the table of all runs")
    if unfinished := table["status"].isin(["stopped", "waiting"]).sum():
        click.echo(f"hacpo-kit: stopped with {unfinished} unfinished runs; the same command resumes them", err=True)
        sys.exit(130)
    sys.exit(int((table["status"] == "failed").any()))


@main.command("eval")
@click.argument("agents", nargs=-1, required=True, metavar="AGENT…")
@click.option("--on", "sets", multiple=True, required=True, metavar="SET,…", help="Test sets, separated by commas.")
@click.option("--k", type=int, default=None, help="best@k; default: that of each set (1; AIME 2025: 30).")
@click.option("--samples", type=int, default=None, help="Responses per problem; default: k.")
@click.option("--temperature", type=float, default=None, help="Default: 0 (greedy) for one response, 1 for more.")
@click.option("--max-new-tokens", type=int, default=None, help="Default: 32 for arithmetic sets, 4096 for others.")
@click.option("--batch", "batch_size", default=128, show_default=True, help="Responses sampled at once.")
@click.option("--limit", type=int, default=None, help="Use only the first problems of each set.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", default=None, help="Folder; default: a folder in reports/runs/ named after the settings.")
@click.option("--dtype", default="float32", show_default=True, help="Of the weights: float32, bfloat16, float16.")
@click.option("--device", default=None, help="Default: a GPU if there is one; the CPU for built-in agents.")
@click.option("--engine", default="transformers", show_default=True, help="Sampling engine: transformers or vllm.")
def evaluate(agents: tuple[str, ...], sets: tuple[str, ...], out: str | None, **options) -> None:
    """Evaluate agents on test sets and print a table.

    AGENT: a built-in agent or set, a folder, or a hub id; NAME=AGENT renames it. SET: arithmetic, sums, differences, larger,
    mixed, math500, math, gsm8k, aime25, amc23, minerva_math, olympiadbench, a file with columns prompt and gold, or
    gsm8k=FILE for a file in the format of that benchmark. The same command resumes a stopped evaluation.

    Example: hacpo-kit eval tiny-model-pair after=path/to/agents/qwen3-sums --on sums,differences,larger
    """
    with _errors("resumes the evaluation"):
        from hacpo_kit.experiments.paths import file_name
        from hacpo_kit.runs.scoreboard import evaluate_sets

        names = [name for part in ",".join(sets).split(",") if (name := part.strip())]
        if out is None:
            out = f"reports/runs/{file_name('-'.join(['eval', *names, *agents, str(options)]))}"
        loading = {name: options.pop(name) for name in ("dtype", "device", "engine")}
        board = evaluate_sets(agents, names, out, loading=loading, **options)
    click.echo(f"\n{board.to_markdown()}\n{out}: eval.json, eval.md, eval.csv, answers/")


@main.command()
@click.argument("agents", nargs=-1, metavar="[AGENT…]")
@_pairs("settings", "Any setting of Config, or method.")
@click.option("--pair", default=None, help="Use the paper's settings for one of its pairs of models.")
@click.option("--prompt-tokens", default=256, show_default=True, help="Length of the longest prompt.")
@click.option("--dtype", default="float32", show_default=True, help="Of the computation: float32 or bfloat16.")
@click.option("--gradient-checkpointing", is_flag=True, help="Compute activations twice to store fewer.")
@click.option("--lora", is_flag=True, help="Train LoRA adapters only.")
@click.option("--offload", is_flag=True, help="Move idle weights and optimiser states to host memory.")
@click.option("--device", default=None, help="Default: a GPU if there is one.")
@click.option("--engine", type=click.Choice(["transformers", "vllm"]), default="transformers", help="Sampling engine.")
@click.option("--device-memory", type=float, default=None, metavar="GIB", help="Default: that of the device.")
@click.option("--out", default="reports/runs", show_default=True, help="Folder of the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with sizes in bytes.")
def doctor(agents: tuple[str, ...], settings: Pairs, pair, device_memory, out, as_json, **options) -> None:
    """Report versions, devices, extras and disk space, and whether AGENTs fit in the device's memory in each phase.

    AGENT: a built-in agent or set, a folder, or a hub id. Only their configurations are read.

    Example: hacpo-kit doctor Qwen/Qwen3-1.7B-Base Qwen/Qwen3-4B-Base --dtype bfloat16 -p max_new_tokens 2048
    """
    with _errors():
        from hacpo_kit.config import Config, settings_from_text
        from hacpo_kit.runs.doctor import examine, to_text

        values = dict(settings)
        config = Config.preset(values.pop("method", "hacpo"), pair=pair, **settings_from_text(values))
        if device_memory is not None:
            options["device_memory"] = int(device_memory * 2**30)
        found = examine(agents, config, folder=out, **options)
    click.echo(json.dumps(found, indent=2) if as_json else to_text(found))
    sys.exit(0 if found.get("estimate", {}).get("fits", True) else 1)


@main.group()
def export() -> None:
    """Export a run for other programs."""


@export.command("verl")
@click.argument("out", type=click.Path(file_okay=False))
@_pairs("parameters", "A parameter of `run`, or a setting of Config.")
@click.option("--run", "folder", default=None, metavar="FOLDER", help="Export this run; -p overrides its settings.")
@click.option("--pair", default=None, help="The paper's settings for this pair of models; -p overrides them.")
@click.option("--template", default="{}", metavar="JSON", help="For chat templates: '{\"enable_thinking\": false}'.")
@click.option("--gpus", default=8, show_default=True, help="GPUs per node.")
@click.option("--nodes", default=1, show_default=True, help="Nodes.")
@click.option("--max-prompt-tokens", default=1024, show_default=True, help="verl excludes longer prompts.")
def export_verl(out: str, parameters: Pairs, folder: str | None, pair: str | None, template: str, **options) -> None:
    """Write the folder OUT, with which the authors' HACPO recipe on verl runs this training.

    OUT/launch.sh starts it there. OUT/mapping.md lists the name of every setting in the recipe.

    Example: hacpo-kit export verl for-verl --pair "qwen3-1.7b-base + qwen3-4b-base" -p problems math.jsonl -p steps 58
    -p agents Qwen/Qwen3-1.7B-Base,Qwen/Qwen3-4B-Base
    """
    with _errors():
        from hacpo_kit.config import coerce
        from hacpo_kit.export import sources, verl

        if folder is not None and pair is not None:
            raise ValueError("--run and --pair: give one of them")
        values, options["template"] = dict(parameters), coerce("template", template, dict)
        if folder is not None:
            arguments = sources.from_run(folder, values, **options)
        else:
            arguments = sources.from_parameters(values, pair, **options)
        notes = verl.export_verl(out=out, **arguments)
    click.echo("".join(f"note      {note}\n" for note in notes) + f"launch    {out}/launch.sh")
    click.echo(f"mapping   {out}/mapping.md")
