"""Whether results on this machine are bit-identical to those of the machine that stored the notebooks' outputs.

    python tests/numerics.py           prints how nbval should run here
    python tests/numerics.py --write   stores the mark of this machine; `make notebooks` does so after executing them

Another processor may add numbers in another order. Rounding then changes a sampled token now and then, and every figure
after it. On such a machine nbval only checks that every cell runs and that every assertion of a notebook holds.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from pathlib import Path

import hacpo_kit as hk
from hacpo_kit.common.files import write_json

MARK = Path(__file__).resolve().parent / "numerics.json"


def mark() -> str:
    """Return a hash of two agents' weights after one step together."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agents = hk.load_agents("tiny-model-pair", device="cpu")
        problems = hk.load_problems("arithmetic", split="train", size=64)
        hk.train(agents, problems, hk.Config.preset("hacpo", prompts_per_step=32), 1, progress="off")
    digest = hashlib.sha256()
    for agent in agents:
        for tensor in agent.model.state_dict().values():
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    found = mark()
    if "--write" in sys.argv:
        write_json(MARK, {"weights": found})
    elif json.loads(MARK.read_text(encoding="utf-8"))["weights"] == found:
        print("--nbval")
    else:
        print(
            "numerics differ from the machine that stored the notebooks: their outputs are not compared",
            file=sys.stderr,
        )
        print("--nbval-lax")
