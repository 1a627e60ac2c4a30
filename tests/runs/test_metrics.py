"""The glossary of metrics."""

from trained import CONFIG, problems

import hacpo_kit as hk
from hacpo_kit.models.offload import Offload
from hacpo_kit.runs.metrics import METRICS

EXTREMES = {"clip_own_high": "clip_own_low", "clip_peer_high": "clip_peer_low"}
PATTERNS = {"status_": "status_*", "excluded_": "excluded_*", "avg@": "avg@k", "best@": "best@k"}


def entry(metric):
    """The entry of the glossary that describes a metric."""
    for suffix in ("_min", "_max"):
        metric = metric.removesuffix(suffix) + "_mean" if metric.endswith(suffix) else metric
    if metric.startswith(("rescuable/", "effective_sample_share/", "k3/", "chi2/")):
        return metric.split("/")[0] + "/*"
    for prefix, pattern in PATTERNS.items():
        if metric.startswith(prefix):
            return pattern + ("/*" if "/" in metric else "")
    return EXTREMES.get(metric, metric)


def test_metrics_describes_every_metric_and_no_other(whole_run, fresh_agent, reporting_engine):
    """A second run has a KL, an exclusion, an engine that reports log-probabilities and offloading."""
    pair = [fresh_agent("qwen3-sums"), fresh_agent("llama-differences")]
    pair[0].engine, pair[0].offload = reporting_engine(0), Offload("cpu")
    config = CONFIG.replace(beta=0.1, exclude_solved=True)
    tests = {"sums": hk.load_problems("sums", split="test", size=2)}
    run = hk.train(
        pair, problems("train", 20), config, 1, test=problems("test", 3), tests=tests, eval_k=2, progress="off"
    )
    rescue = hk.train(
        pair,
        problems("train", 20),
        hk.Config.preset("graft", prompts_per_step=4, n=2, dynamic_sampling=True),
        1,
        progress="off",
    )
    found = set()
    for line in (*whole_run.history, *run.history, *rescue.history):
        found |= set(line) - {"agents"}
        for values in line["agents"].values():
            found |= set(values)
    assert {entry(metric) for metric in found} | {"excluded_*"} == set(METRICS)
