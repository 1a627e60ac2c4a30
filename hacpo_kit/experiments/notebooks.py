"""Experiments: a notebook run by papermill with checked parameters, which leaves notebook, HTML and run folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from html import escape as html_escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo_kit.common.files import check_name, locked, write_json, write_text
from hacpo_kit.config import METHODS, Config, coerce, did_you_mean
from hacpo_kit.models.engines.base import ENGINES
from hacpo_kit.tasks.arithmetic import ARITHMETIC_SETS
from hacpo_kit.tasks.loading import load_problems

if TYPE_CHECKING:
    from hacpo_kit.runs.run import Run
    from hacpo_kit.tasks.problems import Problems

PROJECT = Path(__file__).resolve().parents[2]
NOTEBOOKS = PROJECT / "notebooks"
TRAINED_IN = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class Experiment:
    """The parameters of `06_experiment.ipynb`; None means: as the method has it."""

    method: str = "hacpo"  # one of config.METHODS
    agents: str = "tiny-model-pair"  # a built-in set, or agents (names, folders, hub ids) separated by commas
    problems: str = "arithmetic"  # "arithmetic", or a file with columns prompt and gold
    test: str = "arithmetic"  # the same, for evaluation
    tests: str = ""  # further test sets (names or files) separated by commas, asked before training and at the end
    test_size: int = 200  # problems in an evaluation
    steps: int = 12
    prompts_per_step: int = 32
    n: int = 8  # rollouts per agent and problem
    alpha: float | None = None
    delta: float | None = None
    delta_step: float | None = None
    window: int = 5
    lr: float = 1e-4
    minibatch: int = 128  # rollouts in one optimiser update
    max_new_tokens: int = 32
    dtype: str = "float32"  # what the models compute in: "float32", or "bfloat16" with float32 master weights
    engine: str = "transformers"  # what samples: "transformers" or "vllm"
    seed: int = 0
    eval_every: int = 4
    eval_k: int = 1
    save_every: int = 5
    workers: str = ""  # "ray": each agent in a process of its own, on the cluster of RAY_ADDRESS or this machine
    settings: dict = field(default_factory=dict, hash=False)  # every other setting of Config: {"beta": 0.001}
    out: str = ""  # the run folder; empty: reports/runs/ and a name made of the parameters

    def config(self) -> Config:
        """The training settings of this experiment."""
        given = {f.name for f in fields(self)} & set(Config.model_fields) - {"method"}
        settings = {name: getattr(self, name) for name in given if getattr(self, name) is not None} | self.settings
        for name, fixed in METHODS.get(self.method, {}).items():
            if settings.get(name, fixed) != fixed:
                raise ValueError(
                    f"method {self.method!r} is defined by {name}={fixed}; leave {name} out, or use method hacpo"
                )
        return Config.preset(self.method, **settings)

    @property
    def folder(self) -> Path:
        """The run folder; equal parameters have the same one, so that running again goes on, and others never collide.

        Without `out` it lies in HACPO_KIT_RUNS, or in reports/runs of the clone.
        """
        if self.out:
            return Path(self.out)
        settings = {k: v for k, v in asdict(self).items() if k not in ("out", "steps", "workers") and v != {}}
        mark = hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:6]
        agents = re.sub(r"[^\w.+-]+", "+", self.agents)[-40:]
        # a notebook's working folder is notebooks/; runs of a clone lie in the clone's reports/
        runs = os.environ.get("HACPO_KIT_RUNS") or (PROJECT if NOTEBOOKS.is_dir() else Path()) / "reports" / "runs"
        return Path(runs) / f"{self.method}-{agents}-{self.seed}-{mark}"

    @property
    def parameters(self) -> dict[str, Any]:
        """All parameters, the other settings of Config among them by their own names."""
        return {**{f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}, **self.settings}

    def sources(self) -> str | list[str]:
        """The agents as `load_agents` takes them: a built-in set, or a list."""
        from hacpo_kit.models.sources import built_in_sets

        names = [name for a in self.agents.split(",") if (name := a.strip())]
        return names[0] if len(names) == 1 and names[0] in built_in_sets() else names

    def problem_set(self) -> Problems:
        """What the agents are trained on."""
        return load_problems(self.problems, split="train" if self.problems in ARITHMETIC_SETS else None)

    def test_set(self) -> Problems:
        """What they are evaluated on."""
        return _test_set(self.test, self.test_size)

    def run(self, **options: Any) -> Run:
        """Trains, or goes on where the run folder stands; `options` as in `train`."""
        from hacpo_kit.models.loading import load_agents
        from hacpo_kit.training import train

        config = self.config()  # bad settings are refused before anything is loaded
        how = {"dtype": self.dtype, "engine": self.engine, "workers": self.workers or None}
        agents = load_agents(self.sources(), **how)
        problems, test = self.problem_set(), self.test_set()
        further = [name for t in self.tests.split(",") if (name := t.strip())]
        names = [Path(t).stem for t in further]
        if len(set(names)) < len(names):
            raise ValueError(f"tests={self.tests!r}: two sets have the same name, {', '.join(names)}; rename a file")
        tests = {name: _test_set(t, self.test_size) for name, t in zip(names, further, strict=True)}
        intervals = {k: getattr(self, k) for k in ("eval_every", "eval_k", "save_every")}
        sets = {"test": test, "tests": tests}
        return train(agents, problems, config, self.steps, **sets, out=self.folder, **intervals, **options)


def _test_set(source: str, size: int) -> Problems:
    """At most `size` problems of a named set or a file."""
    if source in ARITHMETIC_SETS:
        return load_problems(source, split="test", size=size)
    return load_problems(source, limit=size)


def check_parameters(values: Mapping[str, Any]) -> Experiment:
    """The experiment that a notebook's variables describe, after papermill has put its own among them.

    Text such as "true" or "1e-6" becomes what the parameter takes; any setting of `Config` may be given by its name or in
    `settings`. Raises ValueError for a wrong type and for a variable that is no parameter: papermill itself lets a
    misspelt one pass.
    """
    kinds, others = typing.get_type_hints(Experiment), other_settings()
    given = {k: v for k, v in values.items() if not k.startswith("_") and (_is_plain(v) or k == "settings")}
    # run again in a notebook, the reader's own variables stand beside the parameters: they passed the first time
    if any(isinstance(v, Experiment) for v in values.values()):
        given = {k: v for k, v in given.items() if k in kinds or k in others}
    for name in given:
        if name not in kinds and name not in others:
            near = did_you_mean(name, [*kinds, *others])
            known = f"{', '.join(kinds)}, and the other settings of Config: {', '.join(others)}"
            raise ValueError(f"unknown parameter {name!r}{near}; there are {known}")
    checked = {name: _coerce_optional(name, value, kinds[name]) for name, value in given.items() if name in kinds}
    by_name = {name: value for name, value in given.items() if name in others}
    checked["settings"] = _check_settings(checked.get("settings", {}), by_name)
    experiment = Experiment(**checked)
    if experiment.method not in METHODS:
        raise ValueError(
            f"unknown method {experiment.method!r}{did_you_mean(experiment.method, METHODS)}; there are {', '.join(METHODS)}"
        )
    for name in ("steps", "test_size", "eval_every", "eval_k", "save_every"):
        if getattr(experiment, name) < 1:
            raise ValueError(f"{name}={getattr(experiment, name)}: it must be at least 1")
    if experiment.workers not in ("", "ray"):
        raise ValueError(f"workers={experiment.workers!r}: it takes 'ray', or nothing for agents in this process")
    if experiment.dtype not in TRAINED_IN:
        raise ValueError(f"dtype={experiment.dtype!r}: a model trains in one of {', '.join(TRAINED_IN)}")
    if experiment.engine not in ENGINES:
        near = did_you_mean(experiment.engine, ENGINES)
        raise ValueError(f"unknown engine {experiment.engine!r}{near}; there are {' and '.join(ENGINES)}")
    experiment.config()
    return experiment


def other_settings() -> dict[str, Any]:
    """The settings of Config that are no parameters of an experiment by themselves: name → type."""
    own = Experiment.__dataclass_fields__
    return {name: about.annotation for name, about in Config.model_fields.items() if name not in own}


def _check_settings(settings: Mapping[str, Any], by_name: Mapping[str, Any]) -> dict[str, Any]:
    others = other_settings()
    for name in settings:
        if name in Experiment.__dataclass_fields__:
            raise ValueError(f"settings: {name} is a parameter of its own; set {name} itself")
        if name not in others:
            raise ValueError(f"settings: unknown setting {name!r}{did_you_mean(name, others)}")
        if name in by_name:
            raise ValueError(f"{name} is given twice, by its name and in settings")
    return {name: coerce(name, value, others[name]) for name, value in {**settings, **by_name}.items()}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _coerce_optional(name: str, value: Any, kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null", "~", "")):
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    return coerce(name, value, kind)


def run_notebook(
    notebook: str | Path,
    parameters: Mapping[str, Any],
    *,
    name: str,
    out: str | Path = "reports/runs",
    progress: bool = True,
    tries: int = 3,
    code: bool = True,
) -> tuple[Path, Path]:
    """Runs a notebook with papermill and leaves `out/name.ipynb`, `out/name.html` and, if it trains, the folder `out/name`.

    `code=False` leaves the code out of the HTML. Names and types are checked first; a kernel that cannot start is tried
    `tries` times. Raises FileNotFoundError, ValueError (no `parameters` cell, bad name or type), ChildProcessError for a
    kernel that dies, or papermill's error; the executed notebook then shows where.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    source = find_notebook(notebook)
    known = notebook_parameters(source)
    if "settings" in known:  # any setting of Config may be given by its name
        by_name = {k: v for k, v in parameters.items() if k not in known and k in other_settings()}
        settings = {**coerce("settings", parameters.get("settings", {}), dict), **by_name}
        parameters = {k: v for k, v in parameters.items() if k not in by_name} | (
            {"settings": settings} if settings else {}
        )
    for key in parameters:
        if key not in known:
            raise ValueError(
                f"{source.name} has no parameter {key!r}{did_you_mean(key, known)}; it has {', '.join(known)}"
            )
    check_name(name, "a file name")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    # a parameter takes what its default is; one whose default is None takes anything
    parameters = {k: v if known[k] is None else coerce(k, v, type(known[k])) for k, v in parameters.items()}
    if "out" in known:
        parameters.setdefault("out", str((out / name).resolve()))
    executed, html = out / f"{name}.ipynb", out / f"{name}.html"
    with locked(out / f".{name}.lock", what=f"notebook {executed}"):
        html.unlink(missing_ok=True)  # an HTML page is always that of the notebook beside it, also in a copied folder
        try:
            _execute(papermill, source, executed, parameters, progress, tries)
        except PapermillExecutionError:
            write_html(executed, html)  # with the code: the page is to show where it failed
            raise
        except DeadKernelError:
            raise ChildProcessError(
                f"the kernel of {executed.name} has died (was it killed, or out of memory?); what was trained is there up "
                "to the last checkpoint, and the same command goes on from it"
            ) from None
        _forget_folders(executed, source)
        write_html(executed, html, code=code)
    return executed, html


def _forget_folders(executed: Path, source: Path) -> None:
    """papermill notes absolute paths; a notebook that is passed on should not tell of somebody's folders."""
    content = json.loads(executed.read_text(encoding="utf-8"))
    if "papermill" in content["metadata"]:
        content["metadata"]["papermill"] |= {"input_path": source.name, "output_path": executed.name}
        write_json(executed, content)


def _execute(papermill, source: Path, executed: Path, parameters: dict, progress: bool, tries: int) -> None:
    for attempt in range(tries):
        try:
            papermill.execute_notebook(
                str(source), str(executed), parameters=parameters, progress_bar=progress, kernel_name="python3",
                autosave_cell_every=10,
            )  # fmt: skip
            return
        except Exception as error:
            if not never_started(error) or attempt == tries - 1:
                raise
            time.sleep(1 + attempt)


def never_started(error: BaseException) -> bool:
    """True if a kernel could not start, which says nothing about the notebook and may go well the next time.

    Kernels choose their ports before they bind them: when two runs choose the same one, the second fails.
    """
    told = ("already in use", "Kernel died before replying", "Kernel didn't respond in")
    return type(error).__name__ != "PapermillExecutionError" and any(text in str(error) for text in told)


def notebook_parameters(notebook: Path) -> dict[str, Any]:
    """Names and default values of a notebook's parameters; raises ValueError without a cell tagged `parameters`."""
    import ast

    cells = json.loads(Path(notebook).read_text(encoding="utf-8")).get("cells", [])
    tagged = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
    if not tagged:
        raise ValueError(f"{notebook} has no cell tagged 'parameters', so nothing can be set")
    out = {}
    for node in ast.parse("".join(tagged[0]["source"])).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            out[node.targets[0].id] = ast.literal_eval(node.value)
    return out


def find_notebook(notebook: str | Path) -> Path:
    """A path, or the beginning of a name in `notebooks/` ("06" or "06_experiment"); raises FileNotFoundError."""
    path = Path(notebook)
    if path.is_file():
        return path
    found = sorted(NOTEBOOKS.glob(f"{path.name.removesuffix('.ipynb')}*.ipynb")) if path.name == str(notebook) else []
    if len(found) != 1:
        names = ", ".join(p.stem for p in sorted(NOTEBOOKS.glob("*.ipynb")))
        raise FileNotFoundError(f"no notebook {notebook!s}; there are {names or 'none'} in {NOTEBOOKS.name}/")
    return found[0]


def write_html(notebook: str | Path, html: str | Path, code: bool = True) -> None:
    """An HTML copy that stands alone: pictures and formulas inside, nothing loaded from elsewhere; with or without the code."""
    import nbformat
    from nbconvert import HTMLExporter

    notebook, html = Path(notebook), Path(html)
    content = nbformat.read(notebook, as_version=4)
    formulas: dict[str, str] = {}
    for cell in content.cells:
        if cell.cell_type == "markdown":
            cell.source = _FORMULA.sub(lambda found: _as_mathml(found, formulas), cell.source)
        for data in (output.data for output in cell.get("outputs", []) if "data" in output):
            if "text/markdown" in data:
                data["text/markdown"] = _without_html(data["text/markdown"])
    exporter = HTMLExporter(embed_images=True, mathjax_url="", require_js_url="", jquery_url="", mermaid_js_url="")
    exporter.exclude_input = exporter.exclude_input_prompt = exporter.exclude_output_prompt = not code
    body, _ = exporter.from_notebook_node(content, {"metadata": {"name": notebook.stem, "path": str(notebook.parent)}})
    write_text(html, re.sub(r"⟦formula \d+⟧", lambda mark: formulas.get(mark[0], mark[0]), body))


def _without_html(markdown: str) -> str:
    """Markdown that a cell computed, perhaps from names that somebody else chose: no HTML, and links to pages only."""
    text = markdown.replace("&", "&amp;").replace("<", "&lt;")
    text = re.sub(r"\]\((?!https?://|[\w./-]+[)#])", r"]\\(", text)  # nbconvert would keep a link to javascript:
    return re.sub(r"^(\s*)\[(?=[^\]\n]*\]:)", r"\1\\[", text, flags=re.M)


# code first: what stands between backticks is no formula
_FORMULA = re.compile(r"(?P<code>```.*?```|`[^`\n]*`)|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n]+?)\$", re.DOTALL)


def _as_mathml(found: re.Match, formulas: dict[str, str]) -> str:
    """A mark in the place of a formula, which browsers draw themselves once the mark is replaced by MathML."""
    from latex2mathml.converter import convert

    if found["code"]:
        return found[0]
    mark = f"⟦formula {len(formulas)}⟧"
    try:
        formulas[mark] = convert(found["block"] or found["inline"], display="block" if found["block"] else "inline")
    except Exception:  # whatever it cannot read is shown as it was written
        formulas[mark] = html_escape(found[0])
    return mark
