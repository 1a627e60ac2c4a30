"""Trackers: a callback that sends the metrics of every step to TensorBoard, trackio or Weights & Biases."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hacpo_kit.config import did_you_mean
from hacpo_kit.records import StepResult

TRACKERS = ("tensorboard", "trackio", "wandb")


def track(tracker: str, name: str = "run", *, folder: str | Path = "reports/tensorboard", **options: Any):
    """Return a callback for `train(callbacks=[…])` that logs all metrics of a step, with the settings at the first one.

    Metrics of an agent have its name before them: "qwen3-sums/reward". TensorBoard writes to `folder`/`name`. `options` are
    those of `trackio.init` and `wandb.init`, such as project (default: "hacpo_kit"); trackio writes its last values when the
    process ends or `trackio.finish()` is called.

    Raises ValueError for an unknown tracker, ModuleNotFoundError if it is not installed.
    """
    if tracker not in TRACKERS:
        raise ValueError(
            f"unknown tracker {tracker!r}{did_you_mean(tracker, TRACKERS)}; there are {', '.join(TRACKERS)}"
        )
    try:
        module = importlib.import_module("torch.utils.tensorboard" if tracker == "tensorboard" else tracker)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"tracker {tracker!r} needs its package: pip install {tracker}") from error
    log: Callable[[dict[str, float], int], Any] | None = None

    def callback(result: StepResult) -> None:
        nonlocal log
        if log is None:
            log = _start(tracker, module, name, Path(folder), result.config.to_dict(), options)
        log(dict(_flat(result.metrics)), result.metrics["step"])

    return callback


def _start(
    tracker: str, module: Any, name: str, folder: Path, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> Callable[[dict[str, float], int], Any]:
    """Start the tracker's run; return the function that logs the values of a step."""
    if tracker != "tensorboard":
        run = module.init(**{"project": "hacpo_kit", "name": name, "config": dict(settings), **options})
        return lambda values, step: run.log(values, step=step)
    writer = module.SummaryWriter(folder / name)
    writer.add_text("settings", "\n".join(f"    {key}: {value}" for key, value in settings.items()))

    def log(values: dict[str, float], step: int) -> None:
        for metric, value in values.items():
            writer.add_scalar(metric, value, step)
        writer.flush()

    return log


def _flat(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the metrics of a step by name; those of an agent have its name before them."""
    for name, value in metrics.items():
        if name == "agents":
            for agent, values in value.items():
                yield from ((f"{agent}/{metric}", number) for metric, number in values.items())
        elif name == "omega":
            yield from ((f"{k}/omega/{j}", ratio) for k, ratios in value.items() for j, ratio in ratios.items())
        else:
            yield name, value
