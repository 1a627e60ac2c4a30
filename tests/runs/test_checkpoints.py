"""Checkpoints: complete or absent, checked when they are read, and restored bit-identically."""

import random
import shutil

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from trained import CONFIG, agents, full_disk, problems, same, stop_after, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

import hacpo_kit as hk
from hacpo_kit.runs.checkpoints import checkpoints, restore_newest, save_checkpoint

pytestmark = pytest.mark.slow

LAST = "checkpoints/step-000006"


def flip(path, where=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 1
    path.write_bytes(content)


def test_save_writes_agents_that_plain_transformers_load(whole_run):
    folder = checkpoints(whole_run.folder)[-1] / "agents"
    for agent in whole_run.agents:
        model = AutoModelForCausalLM.from_pretrained(folder / agent.name)
        assert same(model.state_dict(), agent.model.state_dict())
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert tied == agent.model.config.tie_word_embeddings
        tokens = AutoTokenizer.from_pretrained(folder / agent.name)("37+58=").input_ids
        assert tokens == agent.tokenizer("37+58=").input_ids
        loaded = hk.load_agent(folder / agent.name)
        assert loaded.name == agent.name and loaded.end_ids == agent.end_ids


def test_restore_returns_weights_optimiser_reference_and_random_generators(fresh_agent, tmp_path):
    agent, other = fresh_agent("qwen3-sums"), fresh_agent("qwen3-sums")
    config, stream = CONFIG.replace(beta=0.01), problems("train", 50)
    first = hk.step([agent], stream.batch(0, 4), hk.Capability(window=3), config)
    state = hk.State(step=1, capability=first.capability, position=4)
    hk.save(tmp_path / "point", [agent], state)
    expected = (torch.rand(3), np.random.rand(3), random.random())  # noqa: NPY002
    hk.step([agent], stream.batch(4, 4), first.capability, config)
    restored = hk.restore(tmp_path / "point", [other])
    assert restored == state
    drawn = (torch.rand(3), np.random.rand(3), random.random())  # noqa: NPY002
    assert torch.equal(drawn[0], expected[0]) and (drawn[1] == expected[1]).all() and drawn[2] == expected[2]
    hk.step([other], stream.batch(restored.position, 4), restored.capability, config)
    assert same(agent.model.state_dict(), other.model.state_dict())
    assert same(agent.reference.state_dict(), other.reference.state_dict())
    slots, restored_slots = (a.optimizer.state_dict()["state"] for a in (agent, other))
    assert slots.keys() == restored_slots.keys() and all(same(slots[i], restored_slots[i]) for i in slots)


def test_restore_keeps_the_reference_exact_in_half_precision(tmp_path):
    """Buffers that no file holds, such as rotary frequencies, stay in float32."""
    agent = hk.load_agent("qwen3-sums", device="cpu", dtype="bfloat16")
    hk.step([agent], problems("train", 4), hk.Capability(window=3), CONFIG.replace(beta=0.01))
    ids = [agent.encode_prompt("37+58=")], [(5, 6, 7)]
    before = agent.reference_logprobs(*ids)
    assert not torch.equal(before, agent.logprobs(*ids)[0])
    hk.save(tmp_path / "point", [agent], hk.State(capability=hk.Capability(window=3)))
    hk.restore(tmp_path / "point", [agent])
    assert torch.equal(agent.reference_logprobs(*ids), before)


def test_restore_refuses_other_folders_and_agents(fresh_agent, tmp_path):
    agent = fresh_agent("qwen3-sums")
    with pytest.raises(FileNotFoundError, match=r"state\.json is missing"):
        hk.restore(tmp_path, [agent])
    hk.save(tmp_path / "point", [agent], hk.State())
    with pytest.raises(ValueError, match="llama-differences"):
        hk.restore(tmp_path / "point", [fresh_agent("llama-differences")])


def test_save_that_fails_leaves_the_old_checkpoint(fresh_agent, tmp_path):
    agent = fresh_agent("qwen3-sums")
    hk.save(tmp_path / "point", [agent], hk.State(step=1))
    with full_disk(100_000), pytest.raises(SafetensorError, match="File too large"):
        hk.save(tmp_path / "point", [agent], hk.State(step=2))
    assert [p.name for p in tmp_path.iterdir()] == ["point"]
    assert hk.restore(tmp_path / "point", [agent]).step == 1
    hk.save(tmp_path / "point", [agent], hk.State(step=3))
    assert [p.name for p in tmp_path.iterdir()] == ["point"]
    assert hk.restore(tmp_path / "point", [agent]).step == 3


def test_save_never_removes_other_files(fresh_agent, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match="not a checkpoint"):
        hk.save(tmp_path / "mine", [fresh_agent("qwen3-sums")], hk.State())
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"


def test_save_refuses_weights_that_are_not_finite(copied_run):
    def spoil(result):
        pair[0].model.get_input_embeddings().weight.data[0, 0] = float("nan")

    pair = agents()
    with pytest.raises(FloatingPointError, match=r"'qwen3-sums' has weights that are not finite"):
        hk.resume(copied_run, steps=7, agents=pair, callbacks=[spoil], progress="off")
    assert checkpoints(copied_run)[-1].name == "step-000006"


FILES = ("agents/qwen3-sums/config.json", "agents/qwen3-sums/model.safetensors", "agents/llama-differences/tokenizer.json",
         "optimizers/qwen3-sums.safetensors", "state.json")  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_restore_newest_finds_a_flipped_bit_and_uses_the_checkpoint_before(copied_run, name):
    for where in (0.0, 0.5, 0.999):
        flip(copied_run / LAST / name, where)
        with pytest.warns(UserWarning, match=f"step-000006 .*{name} is damaged.*step-000004"):
            assert restore_newest(copied_run, agents()).step == 4
        flip(copied_run / LAST / name, where)
    assert restore_newest(copied_run, agents()).step == 6


@pytest.mark.parametrize(
    "damage",
    [
        lambda at: (at / "optimizers" / "qwen3-sums.safetensors").unlink(),
        lambda at: (at / "state.json").write_text((at / "state.json").read_text().replace('"sha256"', '"sha257"')),
        lambda at: (at / "state.json").write_bytes(b"\xff\xfe"),
        lambda at: (at / "state.json").write_text("[]"),
    ],
    ids=["missing file", "no digest", "no text", "no object"],
)
def test_restore_checks_everything_before_it_changes_an_agent(copied_run, pair, damage):
    before = {name: value.clone() for name, value in weights(pair).items()}
    damage(copied_run / LAST)
    with pytest.raises(OSError, match=r"No such file|is damaged"):
        hk.restore(copied_run / LAST, pair)
    assert same(weights(pair), before)


@pytest.mark.parametrize("damage", ["cut model", "empty optimizer", "cut state", "no model", "no state"])
def test_resume_repeats_the_steps_of_a_damaged_checkpoint(whole_run, copied_run, damage):
    (copied_run / "checkpoints" / "step-best").mkdir()  # not one of ours
    victim = copied_run / LAST / {
        "cut model": "agents/qwen3-sums/model.safetensors", "empty optimizer": "optimizers/qwen3-sums.safetensors",
        "cut state": "state.json", "no model": "agents/llama-differences/model.safetensors", "no state": "state.json",
    }[damage]  # fmt: skip
    content = victim.read_bytes()
    if damage.startswith("no"):
        victim.unlink()
    else:
        victim.write_bytes(b"" if damage.startswith("empty") else content[: len(content) // 2])
    with pytest.warns(UserWarning, match="step-000006 cannot be read"):
        again = hk.resume(copied_run, progress="off")
    assert again.state.step == 6 and same(weights(again.agents), weights(whole_run.agents))
    assert restore_newest(copied_run, agents()).step == 6


def test_save_checkpoint_removes_a_damaged_later_one(copied_run):
    flip(copied_run / LAST / "optimizers" / "qwen3-sums.safetensors")
    with pytest.warns(UserWarning, match="step-000004"):
        hk.resume(copied_run, callbacks=[stop_after(5)], progress="off")
    assert [c.name for c in checkpoints(copied_run)] == ["step-000004", "step-000005"]


def test_save_checkpoint_keeps_the_newest_two(fresh_agent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # also in a relative folder
    for step in range(4):
        save_checkpoint("run", [fresh_agent("qwen3-sums")], hk.State(step=step))
    assert [c.name for c in checkpoints("run")] == ["step-000002", "step-000003"]


def test_restore_newest_refuses_a_run_without_a_readable_checkpoint(copied_run):
    for checkpoint in checkpoints(copied_run):
        (checkpoint / "state.json").write_text("{")
    before = (copied_run / "metrics.jsonl").read_bytes()
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(ValueError, match="new run in another folder"),
    ):
        hk.resume(copied_run, progress="off")
    assert (copied_run / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(copied_run / "checkpoints")
    assert restore_newest(copied_run, agents()) is None
