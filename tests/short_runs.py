"""Six short training runs whose every metric and final weights are stored in short_runs.json.

    python tests/short_runs.py             run them all, compare with the stored values
    python tests/short_runs.py --write     store them (after a deliberate change of results)

The values are bit-identical only on machines with the same numerics (tests/numerics.py); `make` sets the environment.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import hacpo_kit as hk

STORED = Path(__file__).resolve().parent / "short_runs.json"
STEPS = 3
SETTINGS = {"prompts_per_step": 8, "n": 4, "minibatch": 16, "max_new_tokens": 24}
# name → agents, method, settings, step after which the run is stopped and resumed, workers
RUNS: dict[str, dict[str, Any]] = {
    "hacpo pair": {"agents": "tiny-model-pair", "method": "hacpo"},
    "gspo pair": {"agents": "tiny-model-pair", "method": "gspo", "beta": 0.01},
    "grpo pair": {"agents": "tiny-skill-gap-pair", "method": "grpo"},
    "naive trio": {"agents": "tiny-trio", "method": "naive"},
    "hacpo trio, resumed": {"agents": "tiny-trio", "method": "hacpo", "minibatch_order": "own_first", "stop": 2},
    "hacpo pair, Ray": {"agents": "tiny-model-pair", "method": "hacpo", "workers": "ray"},
}


def result_of(agents: str, method: str, stop: int | None = None, workers: str | None = None, **settings: Any) -> dict:
    """Every metric that does not depend on the clock, and a hash of each agent's weights."""
    config = hk.Config.preset(method, **{**SETTINGS, **settings})
    problems = hk.load_problems("arithmetic", split="train", size=64)
    test = hk.load_problems("arithmetic", split="test", size=16)
    loading = {"workers": workers, "threads": 1} if workers else {"device": "cpu"}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"out": Path(folder) / "run", "test": test, "eval_every": 2, "save_every": 1, "progress": "off"}
        trained = hk.load_agents(agents, **loading)
        if stop is not None:
            hk.train(trained, problems, config, STEPS, **options, callbacks=[lambda r: r.metrics["step"] == stop])
            trained = hk.load_agents(agents, **loading)
        run = hk.train(trained, problems, config, STEPS, **options)
        weights = {agent.name: _digest(agent.save(Path(folder) / agent.name)) for agent in run.agents}
    return {"metrics": [_without_time(line) for line in run.history], "weights": weights}


def _without_time(line: dict[str, Any]) -> dict[str, Any]:
    """One line of metrics without seconds; floats as text, so that every bit counts."""
    out: dict[str, Any] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            out[name] = _without_time(value)
        elif "seconds" not in name:
            out[name] = float(value).hex() if isinstance(value, float) else value
    return out


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def differences(name: str, found: dict, stored: dict) -> list[str]:
    """One line for each value that differs from the stored one."""
    flat_found, flat_stored = _flat(found), _flat(stored)
    keys = sorted({*flat_found, *flat_stored})
    return [
        f"{name}: {key}: {flat_stored.get(key)} stored, {flat_found.get(key)} now"
        for key in keys
        if flat_found.get(key) != flat_stored.get(key)
    ]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for name, part in value.items() for k, v in _flat(part, f"{path}/{name}").items()}
    if isinstance(value, list):
        return {k: v for i, part in enumerate(value) for k, v in _flat(part, f"{path}/{i}").items()}
    return {path: value}


def ray_installed() -> bool:
    """Whether the run on Ray workers can be made here."""
    import importlib.util

    return importlib.util.find_spec("ray") is not None


def same_numerics() -> bool:
    """Whether sums are rounded here as on the machine that stored the values."""
    from numerics import MARK, mark

    return json.loads(MARK.read_text(encoding="utf-8"))["weights"] == mark()


if __name__ == "__main__":
    if "--write" not in sys.argv and not same_numerics():
        print("numerics differ from the machine that stored the values: not compared")
        sys.exit(0)
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    bad: list[str] = []
    for name, run in RUNS.items():
        if run.get("workers") and not ray_installed():
            print(f"{name}: Ray is not installed here, not run")
            continue
        found = result_of(**run)
        if "--write" in sys.argv:
            stored[name] = found
        bad += differences(name, found, stored.get(name, {}))
        print(f"{name}: {'stored' if '--write' in sys.argv else 'compared'}", flush=True)
    if "--write" in sys.argv:
        STORED.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print("\n".join(bad) or "all values are bit-identical")
    sys.exit(bool(bad))
