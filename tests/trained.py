"""Short training runs for tests, and ways to compare them."""

import contextlib
import resource

import torch

import hacpo_kit as hk

CONFIG = hk.Config(prompts_per_step=4, n=4, minibatch=16)
OPTIONS = {"eval_every": 2, "save_every": 2, "progress": "off"}


def agents():
    return hk.load_agents("tiny-model-pair", device="cpu")


def problems(split, size):
    return hk.load_problems("arithmetic", split=split, size=size)


def weights(agents):
    return {f"{a.name}.{k}": v for a in agents for k, v in a.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def without_times(lines):
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]


def generous(response, gold):
    return 1.0


@contextlib.contextmanager
def full_disk(after):
    """No file may become longer than `after` bytes: a write stops in its middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def change_settings(result):
    """A callback: a lower rate and a wider clipping range after step 2, a shorter window and fewer prompts after step 3."""
    if result.metrics["step"] == 2:
        return result.config.replace(lr=3e-5, delta=0.5)
    if result.metrics["step"] == 3:
        return result.config.replace(window=3, prompts_per_step=3, temperature=0.9)
    return None


def stop_after(step):
    return lambda result: result.metrics["step"] == step
