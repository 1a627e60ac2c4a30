"""A number that is not finite ends a run, and its rollouts are kept."""

import json

import pytest
from trained import CONFIG, agents, full_disk, problems

import hacpo_kit as hk
from hacpo_kit.common.files import read_lines
from hacpo_kit.runs.checkpoints import checkpoints


def with_nan_gradient(agent):
    """From the agent's third update on, the gradient of one of its weights is NaN."""
    updates, prepare = [], agent.prepare_update

    def counted(config):
        updates.append(1)
        return prepare(config)

    agent.prepare_update = counted
    weight = next(agent.model.parameters())
    weight.register_hook(lambda gradient: gradient * float("nan") if len(updates) > 2 else gradient)


def with_nan_weights(agent):
    agent.model.get_input_embeddings().weight.data[:] = float("nan")


@pytest.mark.parametrize("kind", ["reward", "log-prob", "gradient"])
def test_keep_faults_writes_the_rollouts_of_a_number_that_is_not_finite(tmp_path, kind):
    folder, pair, calls = tmp_path / "run", agents(), []

    def reward(response, gold):
        calls.append(response)
        return float("nan") if len(calls) == 40 else 1.0 * ("1" in response)

    options = {"save_first": True, "save_every": 1, "progress": "off"}
    error, message = FloatingPointError, "agent 'llama-differences'"
    if kind == "reward":
        options["reward_function"], error, message = reward, ValueError, r"agent '.*', .* by .* #\d+"
    elif kind == "gradient":
        with_nan_gradient(pair[1])
    else:
        options |= {"callbacks": [lambda result: with_nan_weights(pair[1])], "save_every": 2}
    with pytest.raises(error, match=rf"{message}.*faults/step-000002-.*\.json") as caught:
        hk.train(pair, problems("train", 50), CONFIG, 6, out=folder, **options)
    (path,) = (folder / "faults").iterdir()
    kept = json.loads(path.read_text())
    assert str(path) in str(caught.value) and path.name == f"step-000002-{kept['agent']}.json"
    assert kept["step"] == 2 == len(read_lines(folder / "metrics.jsonl")) and kept["rollouts"]
    for r in kept["rollouts"]:
        assert {"prompt", "text", "prompt_ids", "token_ids", "logps", "reward"} <= r.keys()
        assert "NaN" in r["logps"] if kind == "log-prob" else len(r["logps"]) == len(r["token_ids"])
    assert ("advantage" in kept["rollouts"][0]) == (kind == "gradient")
    assert checkpoints(folder)[-1].name == ("step-000000" if kind == "log-prob" else "step-000001")
    if kind == "gradient":  # without the fault, the run resumes
        assert hk.resume(folder, steps=2, progress="off").state.step == 2


def test_keep_faults_covers_evaluations(fresh_agent, tmp_path):
    agent, test = fresh_agent("qwen3-sums"), problems("test", 6)
    with_nan_weights(agent)
    with pytest.raises(FloatingPointError, match=r"'qwen3-sums'.* of 6 rollouts are not finite"):
        hk.evaluate(agent, test, progress=False)
    with pytest.raises(FloatingPointError, match=r"faults/step-000000-qwen3-sums\.json"):
        hk.train(agent, problems("train", 50), CONFIG, 1, test=test, out=tmp_path / "run", progress="off")


def test_keep_faults_reports_the_number_also_if_the_disk_is_full(fresh_agent, tmp_path):
    agent = fresh_agent("qwen3-sums")
    with_nan_weights(agent)
    with full_disk(3000), pytest.raises(FloatingPointError, match=r"not finite.*could not be saved"):
        hk.train(agent, problems("train", 50), CONFIG.replace(n=8), 1, out=tmp_path / "run", progress="off")
    assert not list((tmp_path / "run" / "faults").iterdir())
