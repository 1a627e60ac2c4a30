"""Grids: which runs they have, their names, and faults."""

import re
from pathlib import Path

import pytest
import yaml

from hacpo_kit.experiments.grids import read_grid

ROOT = Path(__file__).resolve().parents[2]
STUDY = """
name: study
common: {steps: 20, test_size: 200}
seeds: 2
grids:
  - method: [gspo, hacpo]
    agents: [tiny-state-pair, tiny-model-pair]
  - method: [hacpo, alpha=0]     # hacpo is in the first block too
    agents: tiny-model-pair
  - {method: hacpo, lr: [1e-4, 2e-4], temperature: 0.8, agents: "qwen3-sums, llama-differences", seed: 7}
"""


def names(*grids, **content):
    return list(read_grid({"grids": list(grids), **content}).runs)


def test_read_grid_adds_blocks_and_counts_identical_runs_once(tmp_path):
    (tmp_path / "a.yaml").write_text(STUDY)
    grid = read_grid(tmp_path / "a.yaml")
    assert (grid.name, grid.notebook.stem) == ("study", "06_experiment")
    first = [name for name in grid.runs if name.endswith("seed0")]
    assert first == [
        "gspo-tiny-state-pair-seed0", "gspo-tiny-model-pair-seed0", "hacpo-tiny-state-pair-seed0",
        "hacpo-tiny-model-pair-seed0", "alpha=0-tiny-model-pair-seed0",
    ]  # fmt: skip
    assert len(grid.runs) == 2 * 5 + 2 and list(grid.runs)[:5] == first  # one seed after the other
    last = list(grid.runs.values())[-1]
    config = last.config()
    assert (config.lr, config.seed, config.temperature, last.steps) == (2e-4, 7, 0.8, 20)


def test_read_grid_names_do_not_change_when_the_grid_grows():
    small = set(names({"lr": ["1e-4", "3e-4"]}))
    assert small == {"hacpo-tiny-model-pair-seed0", "hacpo-tiny-model-pair-lr=0.0003-seed0"}
    large = names({"lr": ["1e-4", "3e-4"], "beta": [0, 0.001]}, seeds=[0, 3])
    assert small < set(large) and "hacpo-tiny-model-pair-beta=0.001-lr=0.0003-seed3" in large


def test_read_grid_tells_apart_agents_with_similar_names():
    assert len(names({"agents": ["qwen3-sums, llama-differences", "qwen3-sums,llama-differences"]})) == 2


def test_read_grid_counts_a_setting_at_its_default_once():
    assert len(names({"method": "hacpo"}, {"method": "hacpo", "beta": [0, 0.001]})) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: []", "unknown key 'grid'; did you mean 'grids'?"),
        ("grids: [{methods: hacpo}]", "block 1 of grids: unknown parameter 'methods'; did you mean 'method'?"),
        ("grids: [{method: [hacpo, gsop]}]", "unknown method 'gsop'; did you mean 'gspo'?"),
        ("grids: [{agents: tiny-modl-pair}]", "'tiny-modl-pair'; did you mean 'tiny-model-pair'?"),
        ("common: {steps: 2}\nseeds: 2\ncommon: {steps: 3}", "'common' is given twice"),
        ("grids: [{lr: 1e-4, lr: 2e-4}]", "line 1: 'lr' is given twice"),
        ("grids: [{lr: []}]", "lr has no values"),
        ("grids: [{lr: }]", "lr=''"),
        ("grids: [{lr: fast}]", "lr='fast'"),
        ("grids: [{lr: [[1, 2]]}]", "lr=['1', '2']"),
        ("common: {lr: [1, 2]}", "lr=['1', '2']"),
        ("grids: [{method: gspo, share: all}]", "method 'gspo' is defined by share=none"),
        ("grids: []", "grids=[]"),
        ("grids: [hacpo]", "block 1 of grids: 'hacpo'"),
        ("grids: [{seeds: 3}]", "seeds cannot be set here"),
        ("grids: [{out: x}]", "out cannot be set here"),
        ("common: {seed: 1}\nseeds: 2", "seed in common and seeds"),
        ("seeds: 0", "seeds='0'"),
        ("name: a/b", "name 'a/b'"),
        ("notebook: 99", "no notebook 99"),
        ("notebook: 00_quickstart", "00_quickstart.ipynb is not an experiment"),
        ("common: {test: nowhere.jsonl}", "'nowhere.jsonl' is neither a file nor one of arithmetic"),
        ("common: {tests: 'sums,nonsense'}", "'nonsense' is neither"),
        ("grids: [{agents: }", "is not valid YAML"),
        ("- a", "has no keys"),
    ],
)
def test_read_grid_names_the_fault(text, message, tmp_path):
    (tmp_path / "g.yaml").write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        read_grid(tmp_path / "g.yaml")


def test_read_grid_converts_text_by_the_parameter(tmp_path):
    """YAML itself reads 1e-4 as text, 010 as eight, and no as false."""
    text = "grids: [{lr: 1e-4, n: 010, count_eos: no, eps_high: inf, alpha: none, seed: 007}]"
    (tmp_path / "g.yaml").write_text(text)
    (run,) = read_grid(tmp_path / "g.yaml").runs.values()
    config = run.config()
    assert (config.lr, config.n, config.alpha, config.seed) == (1e-4, 10, 1.0, 7)
    assert (config.count_eos, config.eps_high) == (False, float("inf"))


def test_read_grid_reads_the_grids_of_the_project():
    text = (ROOT / "docs" / "how-to" / "sweeps.md").read_text(encoding="utf-8")
    assert len(read_grid(yaml.safe_load(text.split("```yaml")[1].split("```")[0])).runs) == 5 * (4 * 4 + 2)
    for path in (ROOT / "reports" / "study").glob("*.yaml"):
        assert read_grid(path).runs
