"""Recorded experience and what is recomputed from it: it has to be what training saw, and the objective's own gradient."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import hacpo_kit as hk
from hacpo_kit.advantages import Capability
from hacpo_kit.runs.experience import COLUMNS, Experience, path_of, recorded_steps
from hacpo_kit.views.whatif import Replay

pytestmark = pytest.mark.slow

SMALL = {"prompts_per_step": 6, "n": 4, "minibatch": 16, "lr": 3e-4}


def train(tmp_path, method="hacpo", steps=3, **options):
    config = hk.Config.preset(method, **{**SMALL, **options.pop("config", {})})
    problems = hk.load_problems("arithmetic", split="train", size=40)
    agents = hk.load_agents("tiny-model-pair", device="cpu")
    return hk.train(agents, problems, config, steps, out=tmp_path / "run", progress="off", **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A recorded run of each kind of method."""
    torch.set_num_threads(1)
    extra = {"hacpo": {"exclude_solved": True}, "naive": {}, "gspo": {}, "no_clip": {"cross_baseline": "source"}}
    return {
        name: train(tmp_path_factory.mktemp(name), name, config=config, steps=2 if name != "hacpo" else 4)
        for name, config in extra.items()
    }


# ── the record ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_experience_holds_what_update_used(runs):
    """Every rollout of the last step, with the ratios, mini-batches and P̂ that the step itself returned."""
    run = runs["hacpo"]
    experience = Experience.of_run(run.folder)
    for agent in run.agents:
        frame = experience.of_learner(agent.name)
        seen = run.last.stats[agent.name].to_frame()
        rollouts = [run.last.pool.rollouts[i] for i in seen["index"]]
        key = ["source", "problem", "sample"]
        seen = seen.assign(problem=[r.problem for r in rollouts], sample=[r.sample for r in rollouts])
        both = frame.merge(seen.drop(columns="learner"), on=key, suffixes=("", "_seen"), validate="one_to_one")
        assert len(both) == len(frame) == len(run.last.pool)
        for name in ("ratio", "clipped", "advantage", "weight", "lower", "own"):
            assert (both[name] == both[f"{name}_seen"]).all(), name
        assert (both["minibatch"] == both["updates_made"]).all()
        texts = {(r.source, r.problem, r.sample): r for r in run.last.pool}
        for row in frame.itertuples():
            rollout = texts[row.source, row.problem, row.sample]
            assert (row.text, row.reward, row.status) == (rollout.text, rollout.reward, rollout.status)
            assert row.source_mean_logp == pytest.approx(rollout.mean_logp(), rel=1e-6)
    assert experience.capability == run.capability  # the window, and every step's mean reward
    assert dict(experience.capability) == {
        name: run.history[-1]["agents"][name]["capability"] for name in experience.learners
    }


def test_experience_of_a_pool_equals_that_of_the_first_mini_batch(pair, problems):
    pool = hk.reward(hk.rollout(pair, problems[:6], n=4, progress=False))
    capability, config = hk.Capability().observe(pool), hk.Config(**SMALL)
    before = Experience.of_pool(pool, pair, capability, config)
    assert not before.trained and "before training" in repr(before)
    stats = hk.update(pair[0], hk.advantage(pool, pair[0], capability, config), config)
    after = Experience.of_pool(pool, pair[0], capability, config, stats)
    assert after.trained and after.learners == [pair[0].name]
    one, two = before.of_learner(pair[0].name), after.of_learner(pair[0].name)
    pd.testing.assert_series_equal(one["minibatch"], two["minibatch"])  # the plan is the one that update followed
    for name in ("advantage", "weight", "lower", "source_mean_logp"):
        pd.testing.assert_series_equal(one[name], two[name])
    first, later = (one["minibatch"] == 0).to_numpy(), (one["minibatch"] == 2).to_numpy()
    np.testing.assert_allclose(one["ratio"][first], two["ratio"][first], rtol=1e-5)
    assert (np.abs(one["ratio"][later] / two["ratio"][later] - 1) > 1e-4).any()  # by then the weights had moved
    now = Replay(before).at()
    np.testing.assert_array_equal(now.clipped, one["clipped"])
    with pytest.raises(ValueError, match=f"no stats of '{pair[1].name}'"):
        Experience.of_pool(pool, pair, capability, config, stats)


def test_experience_has_the_reason_of_each_excluded_rollout(pair, problems, say):
    from hacpo_kit.rewards import boxed_math

    say(pair[1], ["�", "\\boxed{1}", "\\boxed{2}", "\\boxed{3}"])
    pool = hk.reward(hk.rollout(pair, problems[:3], n=4, progress=False), boxed_math)
    rewards = [None if i == 0 else r.reward for i, r in enumerate(pool)]
    pool = pool.with_rewards(rewards, ["unscorable" if i == 0 else r.status for i, r in enumerate(pool)])
    capability, config = hk.Capability().observe(pool), hk.Config(**SMALL)
    batch = hk.advantage(pool, pair[0], capability, config)
    experience = Experience.of_pool(pool, pair[0], capability, config)
    frame = experience.frame
    counted = frame["excluded"][frame["excluded"] != ""].value_counts().to_dict()
    assert counted == dict(batch.excluded) and counted["unscorable"] == 1 and len(counted) > 1
    gone = frame[frame["excluded"] != ""]
    assert gone["minibatch"].isna().all() and gone["ratio"].isna().all() and gone["advantage"].isna().all()
    now = Replay(experience).at()
    assert len(now.row) == len(batch)
    # those left out still count in the baseline of their prompt
    order = [batch.index.index(i) for i in _pool_index(pool, frame.iloc[now.row])]
    np.testing.assert_array_equal(now.advantage, batch.advantages.numpy()[order])


def _pool_index(pool, rows):
    where = {(r.source, r.problem, r.sample): i for i, r in enumerate(pool)}
    return [where[key] for key in zip(rows["source"], rows["problem"], rows["sample"], strict=True)]


def test_experience_is_read_back_unchanged(tmp_path, runs):
    experience = Experience.of_run(runs["hacpo"].folder, 2)
    experience.frame.loc[0, "text"] = "<script>alert(1)</script> $x$ \x00 \ud83d".encode("utf-8", "replace").decode()
    path = experience.save(tmp_path / "a" / "b.parquet")
    again = Experience.load(path)
    pd.testing.assert_frame_equal(again.frame, experience.frame)
    assert (again.config, again.capability, again.step) == (experience.config, experience.capability, 2)
    assert [p.name for p in path.parent.iterdir()] == ["b.parquet"]
    assert list(again.frame) == list(COLUMNS)


def test_experience_keeps_the_rewards_of_the_last_hundred_steps(tmp_path, experience_of):
    capability = Capability()
    for step in range(150):
        capability = capability.with_step({"A": step / 150, "B": 0.5})
    experience = experience_of([1.0, 0.9], [True, False])
    long = Experience(experience.frame, capability, experience.config, 150)
    again = Experience.load(long.save(tmp_path / "x.parquet"))
    assert len(again.capability.history["A"]) == 100 and again.capability["A"] == capability["A"]


@pytest.mark.parametrize("bad", ["text", "parquet", "version", "columns"])
def test_experience_refuses_another_file_by_name(tmp_path, bad, experience_of):
    path = tmp_path / "step-000001.parquet"
    if bad == "text":
        path.write_text("no Parquet")
    elif bad == "parquet":
        pd.DataFrame({"a": [1]}).to_parquet(path)
    else:
        import pyarrow.parquet as pq

        table = pq.read_table(experience_of([1.0], [True]).save(path))
        about = {
            **json.loads(table.schema.metadata[b"hacpo_kit"]),
            **({"config": {"version": 1}} if bad == "version" else {}),
        }
        table = table.drop_columns(["ratio"]) if bad == "columns" else table
        pq.write_table(table.replace_schema_metadata({"hacpo_kit": json.dumps(about)}), path)
    with pytest.raises(ValueError, match=r"step-000001\.parquet"):
        Experience.load(path)


def test_experience_never_reads_a_damaged_file(tmp_path, experience_of):
    """Bytes that changed, anywhere, and cuts: refused with the file's name, or read as it was written."""
    experience = experience_of(np.linspace(0.5, 1.5, 40), np.arange(40) % 2 == 0)
    path = experience.save(tmp_path / "step-000001.parquet")
    whole, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    for i in range(200):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged if i % 4 else whole[: rng.integers(len(whole))])
        again, why = _loaded(path)
        if again is None:
            assert "step-000001.parquet" in why
            refused += 1
        else:
            pd.testing.assert_frame_equal(again.frame, experience.frame)
    assert refused > 100


def _loaded(path):
    """The experience in a file, or why it was refused."""
    try:
        return Experience.load(path), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize(
    "about",
    ["[]", "1", "{}", {"config": None}, {"config": {"unknown": 1}}, {"config": {"lr": -1}}, {"capability": {"window": 5}},
     {"capability": {"window": 0, "history": {}}}, {"capability": {"window": 5, "history": [1]}}],
    ids=str,
)  # fmt: skip
def test_experience_refuses_a_file_with_other_metadata(tmp_path, about, experience_of):
    import pyarrow.parquet as pq

    path = experience_of([1.0], [True]).save(tmp_path / "step-000001.parquet")
    table = pq.read_table(path)
    if isinstance(about, dict):
        about = json.dumps({**json.loads(table.schema.metadata[b"hacpo_kit"]), **about})
    pq.write_table(table.replace_schema_metadata({"hacpo_kit": about}), path)
    with pytest.raises(ValueError, match=r"step-000001\.parquet is not readable as experience"):
        Experience.load(path)


def test_experience_on_a_full_disk_names_the_file_and_leaves_none(tmp_path, experience_of):
    import resource
    import signal

    experience, limits = experience_of([1.0], [True]), resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing beyond the limit is an error instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large"):
            experience.save(tmp_path / "step-000001.parquet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not list(tmp_path.iterdir())


def test_experience_names_a_step_that_was_not_recorded(tmp_path, runs):
    with pytest.raises(FileNotFoundError, match="record_every=1"):
        Experience.of_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"step 9 .*recorded steps: "):
        Experience.of_run(runs["hacpo"].folder, 9)
    with pytest.raises(FileNotFoundError):
        Experience.load(tmp_path / "nothing.parquet")


def test_record_every_selects_the_steps(tmp_path):
    run = train(tmp_path, steps=4, record_every=2)
    assert recorded_steps(run.folder) == [2, 4]
    assert json.loads((run.folder / "run.json").read_text())["record_every"] == 2
    more = hk.resume(
        run.folder, steps=6, problems=hk.load_problems("arithmetic", split="train", size=40), progress="off"
    )
    assert recorded_steps(more.folder) == [2, 4, 6]
    with pytest.raises(ValueError, match="record_every=-1"):
        train(tmp_path / "x", record_every=-1)


def test_record_every_zero_records_nothing(tmp_path):
    assert recorded_steps(train(tmp_path, steps=1, record_every=0).folder) == []
    assert not (tmp_path / "run" / "experience").exists()


def test_recorded_steps_after_the_checkpoint_are_removed(tmp_path):
    """Steps beyond the restored checkpoint are removed, half-written files too, and made again the same."""
    whole = train(tmp_path / "whole", steps=4, save_every=2)
    folder = train(tmp_path, steps=2, save_every=2).folder
    later = path_of(folder, 3)
    later.write_bytes(path_of(whole.folder, 3).read_bytes())
    (folder / "experience" / ".step-000003.parquet.0123abcd.tmp").write_bytes(b"half")
    later.write_bytes(b"of a run that was stopped")
    hk.resume(folder, steps=4, problems=hk.load_problems("arithmetic", split="train", size=40), progress="off")
    for step in (3, 4):
        one, two = (Experience.of_run(f, step).frame for f in (folder, whole.folder))
        pd.testing.assert_frame_equal(one, two)


def test_experience_of_a_step_without_rewards(tmp_path, problems):
    config = hk.Config(**SMALL)
    agents = hk.load_agents("tiny-model-pair", device="cpu")
    unknown = hk.load_problems([{"prompt": p.prompt, "gold": ""} for p in problems[:8]])
    with pytest.warns(UserWarning, match="no rollouts to train on"):
        run = hk.train(agents, unknown, config, 1, out=tmp_path / "run", progress="off")
    experience = Experience.of_run(run.folder)
    assert set(experience.frame["excluded"]) == {"unscorable"} and experience.frame["reward"].isna().all()
    with pytest.raises(ValueError, match="used none of the 48 rollouts"):
        Replay(experience)


def test_experience_files_are_small(runs):
    sizes = [path_of(runs["hacpo"].folder, s).stat().st_size for s in recorded_steps(runs["hacpo"].folder)]
    assert max(sizes) < 20_000  # 96 rows
    assert all(Path(p).suffix == ".parquet" for p in (runs["hacpo"].folder / "experience").iterdir())
