"""How much slower a command becomes when other processes use the cores: `make demo` and every notebook.

    python benchmarks/other_load.py [NOTEBOOK …]

Each notebook runs idle and beside one busy process per core, with the default threads. Measured ones are skipped, so the
same command resumes. The result is reports/other_load.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import surroundings

from hacpo_kit.common.files import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "reports" / "other_load.json"


def spin() -> None:
    """Use one core until the process is terminated."""
    while True:
        pass


def seconds(notebook: Path) -> float:
    """Execute a notebook in a new run folder; return the wall time (s)."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "notebook", "--execute", str(notebook)]
        command += ["--output-dir", folder]
        start = time.perf_counter()
        environment |= {"HACPO_KIT_RUNS": folder, "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, env=environment, check=True, capture_output=True, cwd=ROOT)
        return time.perf_counter() - start


def beside_load(notebook: Path) -> float:
    """Return the wall time (s) beside one busy process per core."""
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(os.cpu_count())]
    for process in busy:
        process.start()
    try:
        return seconds(notebook)
    finally:
        for process in busy:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "notebooks", nargs="*", help="names such as 00_quickstart, which `make demo` runs; default: all"
    )
    names = parser.parse_args().notebooks
    found = sorted(ROOT.glob("notebooks/*.ipynb")) + sorted(ROOT.glob("notebooks/exercises/*.ipynb"))
    report = read_json(REPORT) if REPORT.exists() else {"notebooks": {}}
    for notebook in (path for path in found if not names or path.stem in names):
        if notebook.stem in report["notebooks"]:
            continue
        idle, loaded = seconds(notebook), beside_load(notebook)
        report["notebooks"][notebook.stem] = {"idle_s": round(idle, 1), "loaded_s": round(loaded, 1)}
        report |= {"worst_ratio": max(t["loaded_s"] / t["idle_s"] for t in report["notebooks"].values())}
        write_json(REPORT, {**report, **surroundings()})
        print(notebook.stem, json.dumps(report["notebooks"][notebook.stem]), f"{loaded / idle:.2f}", flush=True)


if __name__ == "__main__":
    main()
