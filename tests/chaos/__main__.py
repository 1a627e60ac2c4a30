"""Kill training runs and their helpers, resume them, and compare the end with undisturbed runs.

    make chaos                            # 50 runs, then kernel, sweep, verifier and Ray worker; writes reports/chaos.json
    python tests/chaos --kills 3 --others

Every run of the built-in pair is killed (SIGKILL) while it samples, scores, verifies, updates, evaluates, or writes lines, a
step's experience or a checkpoint, at a moment drawn from a seed. Exit status 1 if one does not end as the undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")  # before torch: sums in one order, and no threads to fork

from chaos_others import OTHERS
from chaos_runs import trials

from hacpo_kit.common.files import write_json
from hacpo_kit.runs.record import versions

ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> int:
    """Kill the runs, print a line for each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="runs to kill")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--others", nargs="*", choices=OTHERS, default=list(OTHERS), help="what else is killed")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "chaos.json")
    args = parser.parse_args()
    report = {
        "machine": platform.machine(), "cores": os.cpu_count(), "load_average": [round(x, 1) for x in os.getloadavg()],
        "versions": versions(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        runs, others = (Path(folder) / name for name in ("runs", "others"))
        runs.mkdir()
        others.mkdir()
        report["runs"] = trials(args.kills, runs, args.seed) if args.kills else {"trials": []}
        for name in args.others:
            started = time.perf_counter()
            try:
                about = OTHERS[name](others)
            except (
                RuntimeError
            ) as fault:  # it could not be killed, or the undisturbed run failed; continue with the others
                about = {"faults": [str(fault)]}
            report[name] = {**about, "seconds": round(time.perf_counter() - started, 1)}
            print(f"{name}: {about.get('skipped') or '; '.join(about['faults']) or 'the same end'}", flush=True)
    write_json(args.out, report)
    bad = [row for row in (*report["runs"]["trials"], *(report[name] for name in args.others)) if row["faults"]]
    print(f"{args.out}: {len(bad)} of {args.kills + len(args.others)} did not end as an undisturbed run")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
