"""Measure the memory of page and kernel while the monitor runs in JupyterLab: reports/monitor.json.

    python benchmarks/monitor.py [--steps 300]

Steps are as small as possible, so growth of the monitor is visible beside that of the training. Needs Chromium.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from scipy.stats import linregress

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import jupyter  # noqa: E402

from hacpo_kit.common.files import write_json  # noqa: E402

SETUP = """
import torch
import hacpo_kit as hk
torch.set_num_threads(1)
config = hk.Config(prompts_per_step=2, n=2, minibatch=8, max_new_tokens=16)
train, test = (hk.load_problems("arithmetic", split=s, size=k) for s, k in (("train", 50), ("test", 4)))
agents = hk.load_agents("tiny-model-pair", device="cpu")
options = dict(test=test, eval_every=10, save_every=50, record_every=0)
"""
CELL = f"""{SETUP}
monitor = hk.widgets.monitor(agents, train, config, 100_000, out="run", **options)
monitor
"""
# the same training, not monitored, in a process of its own
ALONE = f"""{SETUP}
import sys, psutil
def print_memory(result):
    step = result.metrics["step"]
    if step % int(sys.argv[3]) == 0:
        print(step, psutil.Process().memory_info().rss / 2**20, flush=True)
hk.train(agents, train, config, int(sys.argv[2]), out=sys.argv[1], callbacks=[print_memory], progress="off", **options)
"""
STEP = "document.querySelector('.hacpo-status')?.textContent.match(/step (\\d+) of/)?.[1]"


def measure(steps: int, every: int) -> list[dict[str, float]]:
    """Return the memory of page and kernel at regular steps of one monitored training."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        with jupyter.server(home / "lab") as lab, jupyter.browser(home / "browser") as context:
            page = jupyter.open_notebook(context, lab, jupyter.notebook("soak.ipynb", [CELL], lab))
            jupyter.run_all(page)
            page.locator(".hacpo-start").click()
            begun = time.perf_counter()
            for wanted in range(every, steps + 1, every):
                page.wait_for_function(f"Number({STEP}) >= {wanted}", timeout=600_000)
                row = {"step": int(page.evaluate(STEP)), "seconds": round(time.perf_counter() - begun, 1)}
                row |= {k: round(v, 2) for k, v in jupyter.page_memory(page).items()}
                rows.append({**row, "kernel_mib": round(lab.kernel_memory(), 1)})
                print(rows[-1], flush=True)
            page.locator(".hacpo-stop").click()
            jupyter.wait_text(page, "hacpo-status", "stopped, saved")
            jupyter.no_errors(page)
    return rows


def measure_alone(steps: int, every: int) -> list[dict[str, float]]:
    """Return the memory of a process that calls `train` with the same settings, without a notebook."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", ALONE, str(Path(folder) / "run"), str(steps), str(every)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    pairs = [line.split() for line in done.stdout.splitlines()]
    return [{"step": int(step), "process_mib": round(float(mib), 1)} for step, mib in pairs]


def trend(rows: list[dict[str, float]], name: str) -> dict[str, float]:
    """Return the growth per 100 steps with its 95 % interval, over the second half of the steps."""
    later = rows[len(rows) // 2 :]
    x, y = (np.array([row[k] for row in later], float) for k in ("step", name))
    slope, half = 0.0, 0.0  # of a constant, for which the fit has no answer
    if np.ptp(y):
        fit = linregress(x, y)
        slope, half = fit.slope, 1.96 * fit.stderr
    return {
        "per_100_steps": round(100 * slope, 3), "low": round(100 * (slope - half), 3),
        "high": round(100 * (slope + half), 3), "mean": round(float(y.mean()), 2), "scatter": round(float(y.std()), 2),
    }  # fmt: skip


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args()
    rows = measure(options.steps, options.every)
    names = ("heap_mib", "nodes", "listeners", "kernel_mib")
    trends = {name: trend(rows, name) for name in names}
    alone = measure_alone(options.steps, options.every)
    trends["process_mib"] = trend(alone, "process_mib")
    about = {"python": platform.python_version(), "machine": platform.machine(), "steps": options.steps}
    write_json(ROOT / "reports" / "monitor.json", {"about": about, "second_half": trends, "rows": rows, "alone": alone})
    print(json.dumps(trends, indent=2))


if __name__ == "__main__":
    main()
