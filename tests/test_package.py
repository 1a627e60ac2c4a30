"""The package as a whole: pins, imports, public names."""

import contextlib
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import hacpo_kit as hk

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIRED = [*PROJECT["dependencies"], *EXTRAS["test"], *EXTRAS["docs"]]


def test_environment_yml_has_the_same_python():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python = next(d for d in environment["dependencies"] if str(d).startswith("python="))
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.removeprefix("python="))
    pip = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert pip == ["-c constraints.txt", "-e .[test]"]


def pins(file="constraints.txt"):
    """Return the pinned version by canonical name."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_constraints_fit_pyproject():
    pinned = pins()
    for text in REQUIRED:
        requirement = Requirement(text)
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(Version(version)), f"{text} is pinned to {version}"


def test_constraints_install_on_the_oldest_supported_python():
    oldest = Version(next(s.version for s in SpecifierSet(PROJECT["requires-python"]) if s.operator == ">="))
    for name in pins():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of another platform or extra
            wanted = importlib.metadata.metadata(name)["Requires-Python"] or ""
            assert SpecifierSet(wanted).contains(oldest), f"{name} wants Python {wanted}"


def test_constraints_pin_every_required_package_and_no_other():
    linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}  # the platform of CI and the pins
    found: dict[str, set[str]] = {}
    absent: list[str] = []
    waiting = [Requirement(text) for text in REQUIRED]
    while waiting:
        wanted = waiting.pop()
        name, extras = canonicalize_name(wanted.name), {"", *wanted.extras}
        if name in found and extras <= found[name]:
            continue
        extras = found[name] = extras | found.get(name, set())
        try:
            texts = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of an extra that is not installed
            absent.append(name)
            continue
        for needed in map(Requirement, texts):
            if needed.marker is None or any(needed.marker.evaluate({**linux, "extra": extra}) for extra in extras):
                waiting.append(needed)
    # PyTorch's CUDA build requires exact versions of NVIDIA's packages itself
    loose = {name for name in set(found) - set(pins()) if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert not loose, f"without a pin: {', '.join(sorted(loose))}"
    idle = set() if absent else set(pins()) - set(found)
    assert not idle, f"pinned, but not required: {', '.join(sorted(idle))}"


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-vllm.txt"])
def test_constraints_are_exact(file):
    assert len(pins(file)) > 100
    assert all(str(Version(version)) == version and "*" not in version for version in pins(file).values())


def test_package_and_its_names_import_no_slow_library():
    """benchmarks/imports.py measures the times."""
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


def test_package_has_its_public_names():
    assert all(getattr(hk, name) is not None for name in hk.__all__)
    assert hk.__version__ == PROJECT["version"]


@pytest.mark.parametrize(
    ("environment", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")]
)
def test_import_lets_waiting_threads_sleep_unless_the_environment_decides(environment, spins):
    code = "import hacpo_kit, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    inherited = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    result = subprocess.run(
        [sys.executable, "-c", code], env={**inherited, **environment}, capture_output=True, text=True
    )
    assert result.stdout.strip() == spins
