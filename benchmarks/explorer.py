"""Measure the time of a slider move in the explorer, the redraws per move, and the growth of memory.

    python benchmarks/explorer.py            # writes reports/explorer.json; needs Chromium and the extra [test]

JupyterLab runs in a headless Chromium. A move is a key press on a slider or a click on a switch; it ends with the frame
that shows the new picture, and the next press waits for it. The experience is synthetic: two agents, eight answers each to
a problem, mini-batches of 128.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import hacpo_kit as hk  # noqa: E402
from hacpo_kit.common.files import write_json  # noqa: E402
from hacpo_kit.runs.experience import COLUMNS, Experience  # noqa: E402
from hacpo_kit.views.whatif import Replay  # noqa: E402
from tests.browser import jupyter  # noqa: E402

SIZES = {2_000: 150.0, 20_000: 400.0}  # rollouts → largest median of a move (ms)
STEPS = 12  # of history, for the window
SLIDERS = ("alpha", "delta", "delta-step", "window", "m")
SWITCHES = ("capability-baseline", "discrepancy", "exponential", "clipping")
MOVES = 500  # of the memory test

# counts pictures, and takes the time from the key or the mouse to the frame that shows the last of them
WATCH = """() => {
  const plot = document.querySelector('.hk-explorer-plot .js-plotly-plot, .hk-explorer-plot.js-plotly-plot');
  const hk = window.hk = {pictures: 0, began: 0};
  hk.arm = () => { hk.shown = new Promise(resolve => { hk.resolve = resolve; }); };
  const begin = () => { hk.began = performance.now(); };
  for (const kind of ['keydown', 'click']) document.addEventListener(kind, begin, true);
  plot.on('plotly_afterplot', () => {
    hk.pictures += 1;
    requestAnimationFrame(() => setTimeout(() => hk.resolve?.(performance.now() - hk.began), 0));
  });
}"""


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=30, help="moves of each slider")
    parser.add_argument("--long", type=int, default=MOVES, help="moves of the memory test")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "explorer.json")
    args = parser.parse_args()
    report: dict = {
        "sizes": {},
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": [round(os.getloadavg()[0], 1)],
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        jupyter.server(Path(folder) / "lab") as lab,
        jupyter.browser(Path(folder) / "browser") as context,
    ):
        for size, target in SIZES.items():
            page = open_explorer(context, lab, size)
            report["sizes"][size] = measure(page, lab, args.moves, target)
            if size == max(SIZES):
                report["memory"] = memory(page, lab, args.long)
            page.close()
    report["load"].append(round(os.getloadavg()[0], 1))
    write_json(args.out, report)
    for size, found in report["sizes"].items():
        print(f"{size:,} rollouts:", {k: v for k, v in found.items() if k != "controls"})
        print("   medians (ms):", {k: v["median_ms"] for k, v in found["controls"].items()})
    print("memory:", report["memory"]["growth"], "load:", report["load"])


def open_explorer(context, lab, size: int):
    """Return a tab that shows the explorer of a synthetic step and records redraws."""
    synthetic(size).save(lab.folder / f"{size}.parquet")
    cell = (
        "import hacpo_kit as hk\nfrom hacpo_kit.runs.experience import Experience\n"
        f"hk.widgets.explorer(Experience.load('{size}.parquet'))"
    )
    page = jupyter.open_notebook(context, lab, jupyter.notebook(f"n{size}.ipynb", [cell], lab))
    jupyter.run_all(page)
    page.locator(".hk-alpha .noUi-handle").first.wait_for()
    page.locator(".hk-explorer-plot .scatterlayer path.point").first.wait_for(state="attached")
    page.wait_for_timeout(2000)
    jupyter.no_errors(page)
    page.evaluate(WATCH)
    return page


def synthetic(size: int, *, seed: int = 0) -> Experience:
    """Return a step of learner "A" with a weaker peer "B": half of the rollouts are its own."""
    rng, config = np.random.default_rng(seed), hk.Config()
    problem = np.arange(size) // 16
    own = np.arange(size) // 8 % 2 == 0
    ratio = np.where(own, 1 + 4e-4 * rng.standard_normal(size), np.exp(-0.04 + 0.12 * rng.standard_normal(size)))
    reward = (rng.random(size) < np.where(own, 0.5, 0.35)).astype(float)
    m = rng.permutation(size) % max(1, size // config.minibatch)
    columns = {
        "learner": "A", "source": np.where(own, "A", "B"), "problem": [f"made/{p}" for p in problem],
        "prompt": [f"{p % 90}+{p % 70}=" for p in problem], "gold": [str(p % 90 + p % 70) for p in problem],
        "sample": np.arange(size) % 8, "text": [f"{i % 9}+{i % 7}={i % 9 + i % 7};\\boxed{{{i % 160}}}" for i in range(size)],
        "ended": True, "reward": reward, "status": np.where(reward > 0, "correct", "wrong"), "own": own,
        "minibatch": pd.array(m, dtype="Int32"), "excluded": "", "source_mean_logp": -0.4 * rng.random(size).astype(np.float32),
        "ratio": ratio.astype(np.float32), "advantage": np.float32(0), "weight": np.float32(1), "clipped": False, "lower": 0.8,
    }  # fmt: skip
    capability = hk.Capability()
    for step in range(STEPS):
        capability = capability.with_step({"A": 0.2 + 0.03 * step, "B": 0.15 + 0.02 * step})
    raw = Experience(pd.DataFrame(columns)[list(COLUMNS)], capability, config, STEPS)
    now = Replay(raw).at()  # as training records it
    return Experience(
        raw.frame.assign(advantage=now.advantage, weight=now.weight, clipped=now.clipped, lower=now.lower),
        capability, config, STEPS,
    )  # fmt: skip


def measure(page, lab, moves: int, target: float) -> dict:
    """Measure many moves of every slider and switch."""
    before, controls, redraws, of_sliders = cpu(lab), {}, [], []
    for name in (*SLIDERS, *SWITCHES):
        press = slider(page, name) if name in SLIDERS else switch(page, name)
        done = [one_move(page, next(press)) for _ in range(moves if name in SLIDERS else 8)]
        times = [taken for taken, _ in done]
        redraws += [drawn for _, drawn in done]
        controls[name] = {**summary(times), "moves": len(times)}
        of_sliders += times if name in SLIDERS else []
    after = cpu(lab)
    return {
        **summary(of_sliders), "target_ms": target, "moves": len(of_sliders), "redraws_per_move": statistics.mean(redraws),
        "most_redraws": max(redraws),
        "cpu_ms_per_move": {k: round(1000 * (after[k] - before[k]) / len(redraws)) for k in before}, "controls": controls,
    }  # fmt: skip


def summary(times: list[float]) -> dict[str, int]:
    """Return median, 10th and 95th percentile (ms); under other load the 10th is nearest to a quiet machine."""
    low, high = np.percentile(times, (10, 95))
    return {"median_ms": round(statistics.median(times)), "p10_ms": round(float(low)), "p95_ms": round(float(high))}


def slider(page, name: str):
    """Yield key presses that move a slider to its end and back, without end."""
    handle = page.locator(f".hk-{name} .noUi-handle").first
    key = "ArrowRight"
    while True:
        low, high, now = (float(handle.get_attribute(f"aria-value{k}")) for k in ("min", "max", "now"))
        if now >= high - 1e-9:
            key = "ArrowLeft"
        elif now <= low + 1e-9:
            key = "ArrowRight"
        yield partial(handle.press, key)


def switch(page, name: str):
    """Yield clicks on a switch."""
    yield from itertools.repeat(page.locator(f".hk-{name} input").first.click)


def one_move(page, act, settle: float = 120) -> tuple[float, int]:
    """Return the time until the new picture is shown (ms), and the number of redraws."""
    drawn = page.evaluate("hk.arm(); hk.pictures")
    act()
    taken = page.evaluate("hk.shown")
    page.wait_for_timeout(settle)  # time for a second redraw
    return taken, page.evaluate("hk.pictures") - drawn


def memory(page, lab, moves: int) -> dict:
    """Measure the memory of page and kernel over many moves."""
    press, seen = slider(page, "alpha"), []
    for move in range(moves + 1):
        if move % 100 == 0:
            page.wait_for_timeout(500)
            seen.append({"moves": move, **jupyter.page_memory(page), "kernel_mib": lab.kernel_memory()})
        one_move(page, next(press), settle=0)
    first, last = seen[1 if len(seen) > 2 else 0], seen[-1]  # the first hundred moves fill caches
    return {
        "growth": {k: round(last[k] - first[k], 1) for k in first if k != "moves"},
        "over_moves": last["moves"] - first["moves"],
        "samples": [{k: round(v, 1) for k, v in one.items()} for one in seen],
    }


def cpu(lab) -> dict[str, float]:
    """Return the processor time so far (s) of the kernel and of the browser's pages."""
    chromium = [p for p in psutil.Process().children(recursive=True) if "--type=renderer" in " ".join(_words(p))]
    return {"kernel": sum(map(_time, lab.kernels())), "page": sum(map(_time, chromium))}


def _words(process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _time(process) -> float:
    try:
        return sum(process.cpu_times()[:2])
    except psutil.Error:
        return 0.0


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
