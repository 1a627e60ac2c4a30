"""Parameters of an experiment: conversion, checks, run folder."""

import datetime
import json
import re
from pathlib import Path

import numpy as np
import pytest

from hacpo_kit.config import Config
from hacpo_kit.experiments import NOTEBOOKS
from hacpo_kit.experiments.notebooks import notebook_parameters
from hacpo_kit.experiments.parameters import Experiment, check_parameters


def test_check_parameters_of_the_notebook_are_the_defaults():
    defaults = notebook_parameters(NOTEBOOKS / "06_experiment.ipynb")
    assert check_parameters(defaults).parameters == Experiment().parameters
    assert set(Experiment.__dataclass_fields__) <= set(defaults)


def test_check_parameters_converts_text():
    values = {"lr": "1e-6", "seed": "007", "alpha": "2", "delta": "None", "steps": 3.0, "method": "gspo", "n": 4}
    experiment = check_parameters(values)
    config = experiment.config()
    assert (config.lr, config.seed, config.alpha, config.delta, experiment.steps, config.n) == (1e-6, 7, 2.0, 0.2, 3, 4)
    assert config.share == "none"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"alhpa": 2}, "unknown parameter 'alhpa'; did you mean 'alpha'?"),
        ({"steps": "many"}, "steps='many'"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"steps": 0}, "steps=0"),
        ({"seed": True}, "seed=True"),
        ({"method": "hcapo"}, "unknown method 'hcapo'; did you mean 'hacpo'?"),
        ({"method": "alpha=0", "alpha": 2}, "'alpha=0' is defined by alpha=0.0"),
        ({"alpha": -1}, "alpha=-1"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"peer_update": "hapco"}, "peer_update='hapco'"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"engine": "vlm"}, "engine='vlm'"),
        ({"settings": {"betta": 1}}, "unknown parameter 'betta'; did you mean 'beta'?"),
        ({"settings": {"beta": 1}, "beta": 2}, "beta is given twice"),
        ({"settings": "beta"}, "settings='beta'"),
        ({"agnets": ["a", "b"]}, "unknown parameter 'agnets'; did you mean 'agents'?"),
        ({"agents": [1]}, "agents=[1]"),
        ({"agents": "[a,b]"}, "quote the items"),
        ({"agents": '["a,b"]'}, "'a,b' is not a name"),
        ({"agents": [datetime.date(2026, 1, 2)]}, "agents=datetime.date(2026, 1, 2)"),
        ({"problems": ("a", "b")}, "problems=['a', 'b']"),
        ({"steps": datetime.date(2026, 1, 2)}, "steps=datetime.date(2026, 1, 2)"),
        ({"steps": object}, "steps=<class 'object'>"),
        ({"steps": np.float32(2.5)}, "steps=2.5"),
        ({"settings": {1: 2}}, "settings={1: 2}"),
    ],
)
def test_check_parameters_names_wrong_values(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_parameters(values)


def test_check_parameters_converts_lists_paths_and_numbers_of_numpy():
    values = {"agents": ["a", "b"], "tests": ("sums", "own.jsonl"), "problems": Path("x.jsonl"), "steps": np.int64(3)}
    values |= {"lr": np.float32(0.5), "settings": {"seed": np.int64(7)}}
    experiment = check_parameters(values)
    assert (experiment.agents, experiment.tests, experiment.problems) == ("a,b", "sums,own.jsonl", "x.jsonl")
    assert experiment.steps == 3 and (experiment.config().lr, experiment.config().seed) == (0.5, 7)
    assert check_parameters({"agents": '["a", "b"]'}).agents == "a,b"
    json.dumps(experiment.given)


def test_check_parameters_ignores_other_variables_of_a_notebook():
    variables = {"In": ["x"], "Out": {}, "_i1": "text", "run": object(), "json": json}
    assert check_parameters(variables) == Experiment()
    first = check_parameters({"steps": 3})
    assert check_parameters({"steps": 4, "k": 5, "experiment": first}) == Experiment(steps=4)  # the cell runs again


def test_check_parameters_takes_every_setting_by_its_name_or_in_settings():
    for values in ({"beta": "0.001"}, {"settings": {"beta": 0.001}}, {"settings": '{"beta": "0.001"}'}):
        experiment = check_parameters(values)
        assert experiment.settings == {"beta": 0.001} and experiment.config().beta == 0.001
        assert experiment.folder != Experiment().folder
    assert set(Config.model_fields) <= set(Experiment().parameters)


def test_experiment_keeps_the_setting_of_an_ablation():
    assert check_parameters({"method": "alpha=0", "alpha": None}).config().alpha == 0.0
    assert check_parameters({"method": "no_clip"}).config().delta == 1.0


def test_experiment_folder_is_the_same_for_the_same_parameters_only():
    folders = {check_parameters({"seed": s, "lr": lr}).folder for s in (0, 1) for lr in (1e-4, 2e-4)}
    assert len(folders) == 4
    assert Experiment().folder == Experiment(steps=99).folder == check_parameters({"lr": 1e-4}).folder
    assert Experiment(agents="some/folder, other").folder.parent.name == "runs"


def test_experiment_folder_lies_where_the_environment_says(tmp_path, monkeypatch):
    default = Experiment().folder
    monkeypatch.setenv("HACPO_KIT_RUNS", str(tmp_path))
    assert Experiment().folder == tmp_path / default.name
    assert Experiment(out="elsewhere").folder.name == "elsewhere"


def test_experiment_run_evaluates_on_further_test_sets(tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "1+1=", "gold": "2"}\n')
    settings = {"prompts_per_step": 2, "n": 2, "minibatch": 4}
    values = {"agents": "llama-differences", "test_size": 3, "steps": 1, "settings": settings}
    experiment = Experiment(tests=f"sums, larger,{own}", out=str(tmp_path / "run"), **values)
    metrics = set(experiment.run(progress="off").history[-1]["agents"]["llama-differences"])
    assert {"avg@1", "avg@1/sums", "avg@1/larger", "avg@1/own"} <= metrics
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {name: p["count"] for name, p in record["tests"].items()} == {"sums": 3, "larger": 3, "own": 1}
    with pytest.raises(ValueError, match="same name"):
        Experiment(tests=f"sums,{tmp_path / 'sums.jsonl'}", out=str(tmp_path / "other"), **values).run()
    with pytest.raises(ValueError, match="larger"):  # a set for tests only
        Experiment(problems="larger", out=str(tmp_path / "other"), **values).run()
