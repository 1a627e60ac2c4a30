r"""Measure the time of `import hacpo_kit` relative to `import torch`.

    python benchmarks/imports.py         # writes reports/imports.json

Every import runs in a separate process, all kinds alternate, medians are reported. `import hacpo_kit` alone loads nothing,
because a name is loaded when it is first used; so it is also timed with every public function and class (no widgets, no plots).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from measuring import surroundings

from hacpo_kit.common.files import write_json

ROOT = Path(__file__).resolve().parent.parent
NAMES = "import hacpo_kit as hk; [getattr(hk, name) for name in hk.__all__ if name not in hk._MODULES]"
KINDS = {"python": "pass", "torch": "import torch", "hacpo_kit": "import hacpo_kit", "every name": NAMES}
WANTED = 1.25  # times `import torch`


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "imports.json")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(args.repeats):
        for kind, code in KINDS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            seconds[kind].append(time.perf_counter() - start)
    medians = {kind: statistics.median(times) for kind, times in seconds.items()}
    to_torch = {kind: medians[kind] / medians["torch"] for kind in ("hacpo_kit", "every name")}
    print(", ".join(f"{kind} {value:.2f} s" for kind, value in medians.items()), to_torch)
    write_json(
        args.out,
        {
            "seconds": medians, "to_torch": to_torch, "wanted": WANTED, "repeats": args.repeats,
            **surroundings(),
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
