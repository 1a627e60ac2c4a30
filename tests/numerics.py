"""Whether this machine calculates like the one whose outputs are stored in the notebooks, to the last bit.

    python tests/numerics.py           prints how nbval should run here
    python tests/numerics.py --write   keeps the mark of this machine; `make notebooks` does so after executing them

A processor may round a sum in another order, a sampled token then differs now and then, and soon every figure does:
nothing is wrong, but nothing can be compared either. There nbval only checks that every cell runs and that every
assertion of a notebook holds.
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
    """A hash of two agents' weights after one step together."""
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
        print("other arithmetic than where the notebooks were stored: their figures are not compared", file=sys.stderr)
        print("--nbval-lax")
