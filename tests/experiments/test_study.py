"""The committed study: that it is whole, and that the paper's headline holds in it."""

import re
from pathlib import Path

import pytest

from hacpo_kit.experiments import compare
from hacpo_kit.experiments.grids import read_grid
from hacpo_kit.experiments.tables import read_runs

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "reports" / "study"
KINDS = ("tiny-state-pair", "tiny-size-pair", "tiny-model-pair")


@pytest.fixture(scope="module")
def frame():
    return read_runs(STUDY / "study.parquet")


def test_study_has_the_runs_of_its_yaml_file(frame):
    plan = read_grid(STUDY / "study.yaml")
    assert set(map(str, frame["run"])) == set(plan.runs)
    runs = frame.drop_duplicates("run").set_index("run")
    assert runs["finished"].all() and (runs["steps"] == 12).all()
    for name, experiment in plan.runs.items():
        stored = {k: runs.at[name, k] for k in ("method", "agents", "seed", "lr", "delta")}
        config = experiment.config()
        now = {
            "method": config.method,
            "agents": experiment.agents,
            "seed": config.seed,
            "lr": config.lr,
            "delta": config.delta,
        }
        assert stored == now


def test_study_files_exist_and_are_small():
    assert (STUDY / "study.parquet").stat().st_size < 5_000_000
    assert sum(p.stat().st_size for p in (ROOT / "reports").glob("*/*") if p.parent.name != "runs") < 10_000_000
    page = (STUDY / "study.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") >= 6 and not re.search(r'<(script|img)[^>]* src="(?!data:)[^"]', page)
    assert (STUDY / "accuracy.png").exists()
    for path in (STUDY / "study.ipynb", STUDY / "study.html"):
        assert not re.search(r"/(home|root|Users|work|tmp)/", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("agents", KINDS)
def test_study_shows_sharing_ahead_early_and_with_three_quarters_of_the_rollouts(frame, agents):
    """What the paper is about, on each kind of heterogeneity: more accurate at step 4, whole interval above 0, and cheaper."""
    here = frame[frame["agents"] == agents]
    early = compare.paired_differences(here, "gspo", step=4)
    early = early[(early["method"] == "hacpo") & (early["agent"] == compare.MEAN)].iloc[0]
    assert early["low"] > 0.05 and early["seeds"] == 5
    reach = compare.rollouts_to_reach(here, compare.targets(here)).set_index("method")["median"]
    assert reach["hacpo"] < 0.75 * reach["gspo"] and reach["hacpo"] < reach["gspo_x2"]
