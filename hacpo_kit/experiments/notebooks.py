"""A notebook that papermill runs with checked parameters; it leaves notebook, HTML page and run folder."""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hacpo_kit.common.files import check_name, locked, write_json
from hacpo_kit.config import check, coerce, did_you_mean
from hacpo_kit.experiments.pages import write_html
from hacpo_kit.experiments.parameters import Experiment, from_json, plain_value
from hacpo_kit.experiments.paths import find_notebook

# a kernel chooses its ports before it binds them, so two kernels that start at once can choose the same ones
START_FAILURES = ("already in use", "Kernel died before replying", "Kernel didn't respond in")


def run_notebook(
    notebook: str | Path,
    parameters: Mapping[str, Any],
    *,
    name: str,
    out: str | Path = "reports/runs",
    progress: bool = True,
    tries: int = 3,
    code: bool = True,
    time_limit: float | None = None,
) -> tuple[Path, Path]:
    """Run a notebook and return the paths of the executed notebook `out/name.ipynb` and its page `out/name.html`.

    A notebook that trains also writes the run folder `out/name`. A kernel that cannot start is tried `tries` times.
    `code=False` hides the code in the HTML page. A notebook that takes longer than `time_limit` (s) is ended.

    Raises FileNotFoundError for a missing notebook, ValueError for a wrong name or parameter and for a notebook without
    parameters, ChildProcessError if the kernel dies, TimeoutError after `time_limit`, papermill's error if a cell fails.
    """
    from papermill.exceptions import PapermillExecutionError

    check("time_limit", time_limit, Annotated[float, Field(gt=0)] | None)
    source = find_notebook(notebook)
    parameters = checked_values(source, parameters)
    check_name(name, "a file name")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    executed, html = out / f"{name}.ipynb", out / f"{name}.html"
    if "out" in notebook_parameters(source):
        parameters.setdefault("out", str((out / name).resolve()))
    with locked(out / f".{name}.lock", what=f"notebook {executed}"):
        html.unlink(missing_ok=True)  # a page always shows the notebook beside it
        try:
            _execute(source, executed, tries, time_limit, parameters=parameters, progress_bar=progress)
        except (PapermillExecutionError, TimeoutError):
            write_html(executed, html)  # with the code, to show the cell that failed
            raise
        # JSON has no infinity and no NaN, which parameters may have: they become "inf" and "nan"
        content = json.loads(executed.read_text(encoding="utf-8"), parse_constant=lambda name: str(float(name)))
        # papermill records absolute paths, which do not belong in a notebook that is passed on
        content["metadata"]["papermill"] |= {"input_path": source.name, "output_path": executed.name}
        write_json(executed, content)
        write_html(executed, html, code=code)
    return executed, html


def _execute(source: Path, executed: Path, tries: int, time_limit: float | None, **options: Any) -> None:
    """Call papermill, again if the kernel cannot start."""
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    end = time.monotonic() + (time_limit or 0)
    if time_limit is not None:
        options["timeout_func"] = lambda cell: max(end - time.monotonic(), 0.1)  # of each cell
    for attempt in range(1, tries + 1):
        try:
            papermill.execute_notebook(
                str(source), str(executed), kernel_name="python3", autosave_cell_every=10,
                extra_arguments=["--IPKernelApp.log_level=ERROR"],  # the kernel warns of unencrypted local sockets
                **options,
            )  # fmt: skip
            return
        except DeadKernelError:
            raise ChildProcessError(
                f"the kernel of {executed.name} has died (was it killed, or out of memory?); the same command resumes from "
                "the last checkpoint"
            ) from None
        except CellTimeoutError:
            raise TimeoutError(
                f"notebook {executed.stem} did not end within {time_limit:g} s and was ended; {executed} has its output. A "
                "longer time limit resumes from the last checkpoint"
            ) from None
        except Exception as error:
            failed_cell = isinstance(error, papermill.PapermillExecutionError)
            if failed_cell or attempt == tries or not any(text in str(error) for text in START_FAILURES):
                raise
            time.sleep(attempt)


def checked_values(notebook: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that differ from the notebook's defaults, converted to their types.

    In an experiment notebook every setting of `Config` can be given by its name. Elsewhere a parameter has the type of
    its default, and one whose default is None takes any value. Raises ValueError for an unknown name or a wrong value.
    """
    known = notebook_parameters(notebook)
    if "settings" in known:
        given = Experiment.from_parameters({**known, **parameters}).given
        values = {name: value for name, value in given.items() if name in known and value != known[name]}
        return values | {"settings": {name: value for name, value in given.items() if name not in known}}
    for name in parameters:
        if name not in known:
            near = did_you_mean(name, known)
            raise ValueError(f"{notebook.name} has no parameter {name!r}{near}; it has {', '.join(known)}")
    return {name: _converted(name, value, known[name]) for name, value in parameters.items()}


def _converted(name: str, value: Any, default: Any) -> Any:
    """Return the value of a parameter in the type of its default."""
    value = plain_value(name, value)
    takes_lists = name == "agents" or default is None or isinstance(default, list | dict)
    if takes_lists and isinstance(value, str) and value.strip().startswith(("[", "{")):
        value = from_json(name, value)
    return value if default is None else coerce(name, value, type(default))


def notebook_parameters(notebook: Path) -> dict[str, Any]:
    """Return names and defaults of a notebook's parameters; raises ValueError without a cell tagged `parameters`."""
    cells = json.loads(Path(notebook).read_text(encoding="utf-8")).get("cells", [])
    tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    if not tagged:
        raise ValueError(f"{notebook} has no cell tagged 'parameters', so it takes no parameters")
    # papermill.inspect_notebook misses a line whose comment has an equals sign, and takes a second to import
    defaults: dict[str, Any] = {}
    for statement in ast.parse("".join(tagged[0]["source"])).body:
        if isinstance(statement, ast.Assign):
            target, value = statement.targets[0], ast.literal_eval(statement.value)
            several = isinstance(target, ast.Tuple)  # a, b = 1, 2
            defaults |= zip([t.id for t in target.elts], value, strict=True) if several else {target.id: value}
    return defaults
