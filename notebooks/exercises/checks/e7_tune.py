"""E7: repair a failing run. The check trains with the learner's settings and explains the result."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from judge import Verdict, wrap

import hacpo_kit as hk
from checks.catalogue import MESSAGES

# the exercise keeps the method and the number of answers; all other settings may change
FIXED = {
    "method", "share", "seed", "prompts_per_step", "n", "oversample", "temperature", "max_new_tokens", "ratio", "peer",
}  # fmt: skip


@dataclass(frozen=True)
class Tuning:
    """A failing run and the accuracy that a learner should reach by changing its settings."""

    label: str
    agents: str
    failing: Mapping[str, Any]
    steps: int
    goal: float  # mean avg@1 of the agents after the last step
    test_size: int = 100

    def __call__(self, answer: Callable, *, details: bool = False) -> None:
        """Train with the settings that `answer` returns and print the verdict; with `details` also the failing settings."""
        print(self.judge(answer))
        if details:
            print("settings of the failing run:", dict(self.failing))

    def config(self, settings: Mapping[str, Any]) -> hk.Config:
        """Return the settings of the failing run with changes."""
        return hk.Config.preset("hacpo", **{**self.failing, **settings})

    def run(self, settings: Mapping[str, Any]) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Train and return one row per step and agent, and one row per update with its clipping range."""
        updates = []

        def record(result) -> None:
            for name, stats in result.stats.items():
                for mb in stats.minibatches:
                    clipped = float(mb.clipped[~mb.own].mean()) if (~mb.own).any() else float("nan")
                    updates.append({"agent": name, "m": mb.updates_made, "lower": mb.lower, "peer clipped": clipped})

        test = hk.load_problems("arithmetic", split="test", size=self.test_size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the two tables show the problems of the run
            result = hk.train(
                hk.load_agents(self.agents), hk.load_problems("arithmetic", split="train"), self.config(settings), self.steps,
                test=test, eval_every=self.steps, callbacks=[record], progress="off",
            )  # fmt: skip
        return result.to_frame(), pd.DataFrame(updates)

    def judge(self, answer: Callable) -> Verdict:
        """Check the settings that `answer` returns, train with them and explain the result."""
        if not callable(answer):
            return self._failed("not_a_function")
        try:
            settings = answer()
            if not isinstance(settings, Mapping):
                return self._failed("type", type=type(settings).__name__)
            if fixed := FIXED.intersection(settings):
                return self._failed("fixed_setting", fixed=", ".join(sorted(fixed)))
            if self.config(settings) == self.config({}):
                return self._failed("unchanged")
        except NotImplementedError:
            return Verdict(False, "", f"… {self.label}: not solved yet.")
        except (TypeError, ValueError) as error:
            return self._failed("invalid_setting", error=error)
        history, updates = self.run(settings)
        return self._diagnose(history, float((updates["lower"] >= 1).mean()))

    def _diagnose(self, history: pd.DataFrame, closed: float) -> Verdict:
        """Explain a run; `closed` is the share of updates with a closed clipping range."""
        accuracy = history.groupby("step")["avg@1"].mean().dropna()
        start, end = accuracy.iloc[0], accuracy.iloc[-1]
        rewards = history.pivot(index="step", columns="agent", values="reward").dropna()
        means = ", ".join(f"{r:.2f}" for r in rewards.mean(axis=1))
        measured = f"Accuracy {start:.2f} → {end:.2f} (goal {self.goal:.2f}), mean reward per step {means}."
        fall = rewards.max() - rewards.iloc[-1]
        agent = fall.idxmax()
        if end >= self.goal and not closed:
            return Verdict(True, "", wrap(f"✓ {self.label}: {measured} {MESSAGES[self.label]['summary']}"))
        if end >= self.goal:
            return self._failed("range_closed", measured, closed=closed)
        if fall.max() > 0.15:  # with 128 answers per step, chance explains at most 0.1
            best, last = rewards[agent].max(), rewards[agent].iloc[-1]
            return self._failed(
                "reward_falls", measured, agent=agent, best=best, step=rewards[agent].idxmax(), last=last
            )
        return self._failed("no_progress" if end - start < 0.1 else "too_slow", measured)

    def _failed(self, name: str, measured: str = "", **values: Any) -> Verdict:
        words = MESSAGES[self.label]["mistakes"][name]
        lines = [words["message"].format(**values), f"Hint: {words['hint']}", measured]
        text = "\n".join([f"✗ {self.label}: not correct yet ({name}).", *(wrap(line) for line in lines if line)])
        return Verdict(False, name, text)


tuning = Tuning(
    "E7",
    "tiny-model-pair",
    {"prompts_per_step": 16, "lr": 1e-3, "warmup": 0, "delta_step": 0.2, "seed": 0},
    steps=6,
    goal=0.8,
)
