"""Notebooks under papermill, the command line, and the frame around the package."""

import contextlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import hacpo_kit as hk
from hacpo_kit.cli import main
from hacpo_kit.common.files import read_lines
from hacpo_kit.experiments.notebooks import (
    Experiment,
    check_parameters,
    find_notebook,
    notebook_parameters,
    run_notebook,
)
from hacpo_kit.runs.checkpoints import checkpoints

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "steps": "2",
    "prompts_per_step": "4",
    "n": "2",
    "test_size": "6",
    "eval_every": "1",
    "save_every": "1",
    "minibatch": "8",
}


def command(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def as_options(parameters):
    return [x for name, value in parameters.items() for x in ("-p", name, value)]


# ── parameters ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_notebook_and_the_dataclass_have_the_same_parameters():
    from dataclasses import asdict

    assert notebook_parameters(find_notebook("06_experiment")) == asdict(Experiment())


def test_text_from_papermill_becomes_what_the_parameter_takes():
    e = check_parameters(
        {"lr": "1e-6", "seed": "007", "alpha": "2", "delta": "None", "steps": 3.0, "method": "gspo", "n": 4}
    )
    assert (e.lr, e.seed, e.alpha, e.delta, e.steps, e.n) == (1e-6, 7, 2.0, None, 3, 4)
    assert e.config().sources == "own" and e.config().alpha == 2.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alhpa": 2}, "unknown parameter 'alhpa'; did you mean 'alpha'?"),
        ({"steps": "many"}, "steps='many'"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"seed": True}, "seed=True"),
        ({"method": "hcapo"}, "unknown method 'hcapo'; did you mean 'hacpo'?"),
        ({"alpha": -1}, "alpha=-1"),
        ({"delta": 2}, "delta=2"),
        ({"steps": 0}, "steps=0: it must be at least 1"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"dtype": "float16"}, "dtype='float16': a model trains in one of float32, bfloat16, float64"),
        ({"engine": "vlm"}, "unknown engine 'vlm'; did you mean 'vllm'?; there are transformers and vllm"),
    ],
)
def test_wrong_parameters_are_named(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_parameters(given)


def test_a_notebook_run_again_does_not_take_its_own_variables_for_parameters():
    assert check_parameters({"In": ["x"], "Out": {}, "_i1": "text", "run": object(), "columns": ["a"]}) == Experiment()


def test_own_variables_do_not_stop_a_second_run_of_the_check():
    first = check_parameters({"steps": 3})
    assert check_parameters({"steps": 4, "k": 5, "experiment": first}) == Experiment(steps=4)


def test_a_method_keeps_what_defines_it():
    with pytest.raises(ValueError, match=re.escape("method 'alpha=0' is defined by alpha=0.0")):
        check_parameters({"method": "alpha=0", "alpha": 2})


def test_an_ablation_keeps_its_setting_and_none_keeps_the_method_s():
    assert Experiment(method="alpha=0").config().alpha == 0.0
    assert Experiment(method="no_clip").config().delta == 1.0
    assert Experiment(method="hacpo", alpha=3.0).config().alpha == 3.0


def test_equal_parameters_share_a_folder_and_others_do_not():
    folders = {Experiment(seed=s, lr=lr).folder for s in (0, 1) for lr in (1e-4, 2e-4)}
    assert len(folders) == 4 and Experiment().folder == Experiment(steps=99).folder
    assert Experiment(agents="some/folder, other").folder.parent.name == "runs"


def test_runs_lie_where_the_environment_says(tmp_path, monkeypatch):
    usual = Experiment().folder
    monkeypatch.setenv("HACPO_KIT_RUNS", str(tmp_path))
    assert Experiment().folder == tmp_path / usual.name
    assert Experiment(out="elsewhere").folder.name == "elsewhere"


# ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One small run from the command line."""
    out = tmp_path_factory.mktemp("runs")
    result = command("run", *as_options(SMALL), "-p", "alpha", "2", "--name", "small", "--out", out, "--quiet")
    assert result.exit_code == 0, result.output
    return out, result.output


def test_run_leaves_notebook_html_and_run_folder(finished):
    out, printed = finished
    assert all(str(out / name) in printed for name in ("small.ipynb", "small.html", "small"))
    assert json.loads((out / "small" / "config.json").read_text())["alpha"] == 2.0
    assert [line["step"] for line in read_lines(out / "small" / "metrics.jsonl")] == [0, 1, 2]
    notebook = nbformat.read(out / "small.ipynb", as_version=4)
    texts = [o.get("text", "") for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    assert any("step 2/2: mean reward" in t for t in texts)  # plain lines, no bar
    assert not any("%|" in t for t in texts)


def test_the_html_stands_alone_and_shows_the_plots(finished):
    html = (finished[0] / "small.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") >= 4
    loaded = re.findall(r"""(?:<script[^>]*\ssrc|<link[^>]*\shref)\s*=\s*["']([^"']+)""", html)
    assert not [address for address in loaded if not address.startswith("data:")]
    assert len(html) < 6e6


def test_the_same_command_goes_on_and_a_longer_one_too(finished):
    out, _ = finished
    before = read_lines(out / "small" / "metrics.jsonl")
    settings = {**SMALL, "alpha": "2"}
    assert command("run", *as_options(settings), "--name", "small", "--out", out, "--quiet").exit_code == 0
    assert read_lines(out / "small" / "metrics.jsonl") == before
    result = command("resume", out / "small", "--steps", "3")
    assert result.exit_code == 0 and "3 steps done" in result.output
    assert read_lines(out / "small" / "metrics.jsonl")[:3] == before
    assert checkpoints(out / "small")[-1].name == "step-000003"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "alhpa", "2"], "unknown parameter 'alhpa'; did you mean 'alpha'?"),
        (["-p", "steps", "many"], "steps='many'"),
        (["-p", "method", "nonsense"], "unknown method 'nonsense'"),
        (["nowhere"], "no notebook nowhere"),
        (["00_quickstart", "-p", "alpha", "2"], "00_quickstart.ipynb has no parameter 'alpha'"),
        (["00_quickstart", "-p", "steps", "few"], "steps='few'"),
        (["--name", "a/b"], "use letters, digits"),
    ],
)
def test_wrong_commands_are_one_line_and_start_nothing(arguments, message, tmp_path):
    result = command("run", *arguments, "--out", tmp_path)
    assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_a_failing_notebook_says_where_and_keeps_its_traces(tmp_path):
    result = command("run", "-p", "agents", "no-such-set,", "--name", "bad", "--out", tmp_path, "--quiet")
    assert result.exit_code == 1 and "the notebook failed: OSError" in result.output, result.output
    assert "no-such-set" in (tmp_path / "bad.html").read_text()


def test_any_value_makes_a_name(tmp_path, monkeypatch):
    """Agents separated by commas, and paths, stand in the default name of a run, which is a file name."""
    names = []

    def stop(papermill, source, executed, *_):
        names.append(executed.name)
        raise ValueError("far enough")

    monkeypatch.setattr("hacpo_kit.experiments.notebooks._execute", stop)
    for agents in ("qwen3-sums, llama-differences", "../my models/a"):
        assert "far enough" in command("run", "-p", "agents", agents, "--out", tmp_path).output
    assert names == [f"06_experiment-agents={x}.ipynb" for x in ("qwen3-sums+llama-differences", "..+my+models+a")]


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "../a",
        "/a",
        "a\\b",
        ".hidden",
        "-a",
        "a b",
        "a\n",
        "a\x00",
        "~",
        "a:b",
        "a" * 201,
        "é" * 101,
    ],
)
def test_a_name_that_leads_elsewhere_is_refused_before_anything_is_written(name, tmp_path):
    out = tmp_path / "runs"
    with pytest.raises(ValueError, match=r"name '.*(use letters, digits|a file name may have 200)"):
        run_notebook("06_experiment", {}, name=name, out=out)
    assert not out.exists()


def test_names_with_dots_keep_them(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "hacpo_kit.experiments.notebooks._execute",
        lambda _, source, executed, *__: executed.write_bytes(source.read_bytes()),
    )
    executed, html = run_notebook("06_experiment", {}, name="lr=1e-4.v1.5", out=tmp_path)
    assert (executed.name, html.name) == ("lr=1e-4.v1.5.ipynb", "lr=1e-4.v1.5.html") and html.exists()


def test_papermill_itself_cannot_smuggle_a_misspelt_parameter(tmp_path):
    import papermill
    from papermill.exceptions import PapermillExecutionError

    with pytest.raises(PapermillExecutionError, match="unknown parameter 'alhpa'; did you mean 'alpha'"):
        papermill.execute_notebook(
            str(find_notebook("06")), str(tmp_path / "o.ipynb"), parameters={"alhpa": 2, "out": str(tmp_path / "o")},
            progress_bar=False, kernel_name="python3",
        )  # fmt: skip
    assert not (tmp_path / "o").exists()


def test_a_notebook_without_parameters_cell_is_refused(tmp_path):
    path = tmp_path / "plain.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1")]), path)
    with pytest.raises(ValueError, match="no cell tagged 'parameters'"):
        run_notebook(path, {}, name="plain", out=tmp_path)


def test_a_taken_port_is_tried_again(tmp_path, monkeypatch):
    import papermill

    calls = []

    def clash_once(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("zmq.error.ZMQError: Address already in use")
        nbformat.write(nbformat.v4.new_notebook(), args[1])

    monkeypatch.setattr(papermill, "execute_notebook", clash_once)
    run_notebook("06", {}, name="x", out=tmp_path, progress=False)
    assert len(calls) == 2 and (tmp_path / "x.html").exists()


def test_quickstart_runs_with_other_parameters(tmp_path):
    small = {"steps": "2", "prompts_per_step": "4", "n": "2", "test_size": "10"}
    result = command("run", "00_quickstart", *as_options(small), "--name", "q", "--out", tmp_path, "--quiet")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "q.html").read_text(encoding="utf-8").count("data:image/png;base64,") >= 5


def test_the_command_is_installed():
    out = subprocess.run(
        [Path(sys.executable).with_name("hacpo-kit"), "--help"], capture_output=True, text=True, check=True
    )
    assert "run" in out.stdout and "resume" in out.stdout


# ── the frame ────────────────────────────────────────────────────────────────────────────────────────────────────

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_environment_yml_installs_this_package_with_the_same_python():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python = next(d for d in environment["dependencies"] if str(d).startswith("python="))
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.removeprefix("python="))
    pip = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert pip == ["-c constraints.txt", "-e .[test]"]


def pins(file="constraints.txt"):
    """The versions of a constraints file by name, as names are compared."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_constraints_fit_pyproject():
    pinned = pins()
    for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]):
        requirement = Requirement(text)
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(Version(version)), f"{text} is pinned to {version}"


def test_every_pin_installs_on_the_oldest_python_that_is_promised():
    """One that wanted 3.11.5 once kept everybody out whose system has 3.11.2, such as Debian 12."""
    oldest = Version(next(s.version for s in SpecifierSet(PROJECT["requires-python"]) if s.operator == ">="))
    for name in pins():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # one for another platform or extra
            wanted = importlib.metadata.metadata(name)["Requires-Python"] or ""
            assert SpecifierSet(wanted).contains(oldest), f"{name} wants Python {wanted}"


def test_constraints_pin_every_package_that_is_installed_and_no_other():
    """What the requirements require, and so on: a package without a pin is another one next month."""
    linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}  # what CI and the pins are for
    found: dict[str, set[str]] = {}
    absent: list[str] = []
    waiting = [Requirement(text) for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"])]
    while waiting:
        wanted = waiting.pop()
        name, extras = canonicalize_name(wanted.name), {"", *wanted.extras}
        if name in found and extras <= found[name]:
            continue
        extras = found[name] = extras | found.get(name, set())
        try:
            texts = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # an extra: what it needs is not known here
            absent.append(name)
            continue
        for needed in map(Requirement, texts):
            if needed.marker is None or any(needed.marker.evaluate({**linux, "extra": extra}) for extra in extras):
                waiting.append(needed)
    # PyTorch's build for CUDA names the exact versions of NVIDIA's packages itself
    loose = {name for name in set(found) - set(pins()) if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert not loose, f"without a pin: {', '.join(sorted(loose))}"
    idle = set() if absent else set(pins()) - set(found)
    assert not idle, f"pinned, but nobody needs it: {', '.join(sorted(idle))}"


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-vllm.txt"])
def test_pins_are_exact(file):
    assert len(pins(file)) > 100
    assert all(str(Version(version)) == version and "*" not in version for version in pins(file).values())


def test_importing_the_package_loads_nothing_that_takes_long():
    """Nor does using a name: notebooks, commands and workers pay for what they use. benchmarks/imports.py has the times."""
    heavy = [
        "transformers",
        "vllm",
        "plotly",
        "ipywidgets",
        "datasets",
        "pandas",
        "matplotlib",
        "scipy",
        "sympy",
        "peft",
        "ray",
    ]
    code = (
        "import sys, hacpo_kit as hk\n"
        f"loaded = lambda: [m for m in {['torch', *heavy]} if m in sys.modules]\n"
        "print(loaded())\n"
        "[getattr(hk, name) for name in hk.__all__ if name not in hk._MODULES]\n"
        "print(loaded())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines() == ["[]", "['torch']"], result.stderr


def test_public_names_exist():
    assert all(getattr(hk, name) is not None for name in hk.__all__)
    assert hk.__version__ == PROJECT["version"]


def test_further_test_sets_of_an_experiment(tmp_path, fresh_agent):
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "1+1=", "gold": "2"}\n')
    settings = {
        "agents": "llama-differences",
        "test_size": 3,
        "steps": 1,
        "prompts_per_step": 2,
        "n": 2,
        "minibatch": 4,
    }
    one = Experiment(tests=f"sums, larger,{own}", out=str(tmp_path / "run"), **settings)
    run = one.run(progress="off")
    metrics = set(run.history[-1]["agents"]["llama-differences"])
    assert {"avg@1", "avg@1/sums", "avg@1/larger", "avg@1/own"} <= metrics
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {name: p["count"] for name, p in record["tests"].items()} == {"sums": 3, "larger": 3, "own": 1}
    with pytest.raises(ValueError, match="two sets have the same name"):
        Experiment(tests=f"sums,{tmp_path / 'sums.jsonl'}", out=str(tmp_path / "other"), **settings).run()
    with pytest.raises(ValueError, match="made for testing only"):
        Experiment(problems="larger", out=str(tmp_path / "other"), **settings).run()
    assert one.folder != Experiment(**settings).folder
