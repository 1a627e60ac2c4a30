"""HACPO, step by step: all agents sample rollouts for the same prompts, a verifier scores them, each agent learns from all.

① rollout  →  ② reward  →  ③ advantage  →  ④ update
"""

import os
from importlib import import_module

# Threads that spin while they wait for each other block the cores that another busy process shares; a step then takes
# several times as long. With fewer spins they sleep earlier.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is imported

__version__ = "0.1.0"

# A name is imported when it is first used, because importing torch takes seconds.
_NAMES = {
    "advantages": "Capability advantage",
    "config": "Config",
    "experiments.sweeps": "sweep",
    "experiments.tables": "read_runs",
    "export.verl": "export_verl",
    "models.agents": "Agent",
    "models.loading": "load_agent load_agents",
    "records": "Pool",
    "rewards": "boxed_math reward",
    "rollouts": "rollout",
    "runs.checkpoints": "restore save",
    "runs.evaluation": "evaluate",
    "runs.fork": "fork",
    "runs.peers": "StoredPeers",
    "runs.run": "State",
    "runs.scoreboard": "evaluate_sets",
    "runs.track": "track",
    "tasks.loading": "load_problems",
    "tasks.problems": "Problem",
    "training": "resume step train",
    "updates": "update",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = {
    "compare": "experiments.compare",
    "experiments": "experiments",
    "plots": "views.plots",
    "widgets": "views.widgets",
}
__all__ = sorted([*_MODULE_OF, *_MODULES])


def __getattr__(name: str):
    if name in _MODULES:
        return import_module(f"hacpo_kit.{_MODULES[name]}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hacpo_kit' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"hacpo_kit.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
