"""HACPO, step by step: prompts go in, every agent answers, a verifier pays, each learner weighs everybody's answers.

① rollout  →  ② reward  →  ③ advantage  →  ④ update
"""

from importlib import import_module

from hacpo_kit.advantages import Capability, advantage
from hacpo_kit.agents import Agent, load_agent, load_agents
from hacpo_kit.config import Config
from hacpo_kit.evaluation import evaluate
from hacpo_kit.problems import Problem, load_problems
from hacpo_kit.records import Pool
from hacpo_kit.rewards import boxed_math, reward
from hacpo_kit.rollouts import rollout
from hacpo_kit.saving import State, restore, save
from hacpo_kit.scoreboard import evaluate_sets
from hacpo_kit.training import resume, step, train
from hacpo_kit.updates import update

__version__ = "0.1.0"
__all__ = [
    "Agent", "Capability", "Config", "Pool", "Problem", "State", "advantage", "boxed_math", "evaluate", "evaluate_sets",
    "experiments", "load_agent", "load_agents", "load_problems", "plots", "restore", "resume", "reward", "rollout", "save",
    "step", "train", "update",
]  # fmt: skip


def __getattr__(name: str):
    # plotly and papermill load when they are first used
    if name in ("plots", "experiments"):
        return import_module(f"hacpo_kit.{name}")
    raise AttributeError(f"module 'hacpo_kit' has no attribute {name!r}")
