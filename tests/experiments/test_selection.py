"""Which runs can be compared."""

import pytest
from made_runs import line, run, together

from hacpo_kit.experiments.compare import accuracy_curves, final_table
from hacpo_kit.experiments.selection import usable
from hacpo_kit.experiments.statistics import MEAN


def test_usable_excludes_unfinished_runs_and_repeats_and_names_them():
    again = run("gspo", 0, line(0, 0.9)).assign(run="z-again")
    frame = together(run("gspo", 0, line(0, 0.5)), again, run("hacpo", 3, line(0, 0.1), finished=False))
    kept, notes = usable(frame)
    assert set(kept["run"].astype(str)) == {"pair-gspo-0-"} and list(kept["method"].cat.categories) == ["gspo"]
    assert len(notes) == 2 and "pair-hacpo-3-" in notes[0] and "z-again" in notes[1]
    assert usable(kept)[1] == []
    with pytest.raises(ValueError, match="1 unfinished"):
        usable(frame[frame["method"] == "hacpo"])
    with pytest.raises(ValueError, match="'finished'"):
        usable(frame.drop(columns="finished"))


def test_usable_does_not_pool_different_settings():
    frame = together(*(run("hacpo", s, line(0, a / 10), alpha=a) for s in (0, 1) for a in (1.0, 3.0)))
    frame = together(frame, run("hacpo", 0, line(0, 0.7, 0.7, 0.7), steps=3))
    kept, notes = usable(frame)
    assert list(kept["method"].cat.categories) == ["hacpo", "hacpo · alpha=3.0 · steps=1", "hacpo · steps=1"]
    assert "several values of alpha, steps" in notes[0]
    ends = final_table(frame).set_index(["agent", "method"])["mean"]
    assert ends[(MEAN, "hacpo · alpha=3.0 · steps=1")] == pytest.approx(0.3)


def test_usable_does_not_pool_runs_whose_settings_changed():
    changed = run("gspo", 7, line(0.0, 0.5)).assign(changed="lr=1e-05 from step 1")
    same_seed = run("gspo", 0, line(0.0, 0.5)).assign(changed="lr=1e-05 from step 1", run="other")
    for frame in (together(changed, same_seed), together(changed, same_seed, run("gspo", 0, line(0.0, 0.4)))):
        kept, notes = usable(frame)
        renamed = kept[kept["method"] == "gspo · lr=1e-05 from step 1"]
        assert set(renamed["run"]) == {"other", changed["run"][0]} and kept["run"].nunique() == frame["run"].nunique()
        assert "2 runs" in notes[0] and "other" in notes[0]
        again, more = usable(kept)
        assert again.equals(kept) and not more
        assert not accuracy_curves(frame).empty


def test_usable_keeps_own_method_names_and_notes_unequal_settings():
    own = run("hacpo", 0, line(0, 1), lr=3e-4).assign(method="mine", run="mine")
    kept, notes = usable(together(own, run("hacpo", 0, line(0, 1), lr=3e-4), run("gspo", 0, line(0, 1))))
    assert list(kept["method"].cat.categories) == ["hacpo", "gspo", "mine"]
    assert len(notes) == 1 and "lr (mine: 0.0003; hacpo: 0.0003" in notes[0]
