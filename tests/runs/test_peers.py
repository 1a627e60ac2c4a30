"""Stored peers: a run learns from recorded rollouts as from those of a peer that samples now."""

import json
import warnings

import pytest
import torch
from trained import CONFIG, problems

import hacpo_kit as hk

TRAIN = problems("train", 20)
OPTIONS = {"progress": "off", "save_every": 1}


def weights(agent):
    return torch.cat([p.detach().flatten() for p in agent.model.parameters()])


def train(agent, out, steps=2, config=CONFIG, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hk.train([agent], TRAIN, config, steps, out=out, **OPTIONS, **options)


@pytest.fixture
def partner(fresh_agent, tmp_path):
    """The folder of a run of one agent that learns alone."""
    return train(fresh_agent("llama-differences"), tmp_path / "partner", config=CONFIG.replace(share="none")).folder


def test_stored_peers_of_the_first_step_give_the_same_batch_as_the_peer_itself(partner, fresh_agent, tmp_path):
    stored = train(fresh_agent("qwen3-sums"), tmp_path / "stored", steps=1, peers=partner)
    agents = [fresh_agent("qwen3-sums"), fresh_agent("llama-differences")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        online = hk.train(agents, TRAIN, CONFIG, 1, progress="off")
    batches = [run.last.batches["qwen3-sums"] for run in (stored, online)]
    assert batches[0].response_ids == batches[1].response_ids
    for name in ("source_mean_logp", "advantages", "weights", "own"):
        torch.testing.assert_close(getattr(batches[0], name), getattr(batches[1], name))
    assert torch.equal(weights(stored.agents[0]), weights(agents[0]))
    assert 2 * stored.state.rollouts == online.state.rollouts  # stored ones were not sampled


def test_run_with_stored_peers_resumes_bit_identically(partner, fresh_agent, tmp_path):
    whole = train(fresh_agent("qwen3-sums"), tmp_path / "whole", peers=partner)
    train(fresh_agent("qwen3-sums"), tmp_path / "half", steps=1, peers=partner)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed = hk.resume(tmp_path / "half", steps=2, progress="off")
    assert torch.equal(weights(whole.agents[0]), weights(resumed.agents[0]))
    with pytest.raises(ValueError, match="peers"):
        train(fresh_agent("qwen3-sums"), tmp_path / "half", steps=2)


def test_stored_peers_refuse_other_problems_and_steps_that_are_not_recorded(partner, fresh_agent, tmp_path):
    with pytest.raises(ValueError, match="other problems in step 1"):
        train(fresh_agent("qwen3-sums"), tmp_path / "a", config=CONFIG.replace(seed=7), peers=partner)
    with pytest.raises(ValueError, match="no record of step 3"):
        train(fresh_agent("qwen3-sums"), tmp_path / "b", steps=3, peers=partner)
    with pytest.raises(ValueError, match="no rollouts of other agents"):
        train(fresh_agent("llama-differences"), tmp_path / "c", peers=partner)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        train(fresh_agent("qwen3-sums"), tmp_path / "d", peers=tmp_path / "nowhere")


@pytest.fixture
def file(tmp_path):
    """Rollouts without log-probabilities: one right and one wrong answer to every problem, the wrong one with reward 1."""
    path = tmp_path / "teacher.jsonl"
    rows = [
        {"prompt": p.prompt_text, "text": text, "reward": reward}
        for p in TRAIN
        for text, reward in ((rf"\boxed{{{p.gold}}}", 0.0), (r"\boxed{-1}", 1.0))
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_file_of_rollouts_is_verified_again_unless_told_otherwise(file, fresh_agent, tmp_path):
    config = hk.Config.preset("sgt", prompts_per_step=4, n=2, max_new_tokens=8, minibatch=8)
    for verify, right in ((True, True), (False, False)):
        peers = hk.StoredPeers(file, verify=verify)
        run = train(fresh_agent("qwen3-sums"), tmp_path / str(verify), steps=1, config=config, peers=peers)
        texts = {r.text for r, own in zip(*of_batch(run), strict=True) if not own}
        assert texts and all((text == r"\boxed{-1}") != right for text in texts)


def of_batch(run):
    batch = run.last.batches["qwen3-sums"]
    return batch.rollouts, batch.own.tolist()


def test_file_without_log_probabilities_is_refused_by_methods_that_need_them(file, fresh_agent, tmp_path):
    with pytest.raises(ValueError, match="sgt"):
        train(fresh_agent("qwen3-sums"), tmp_path / "run", peers=file)
    file.write_text('{"prompt": "1+1="}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="no column text"):
        hk.StoredPeers(file)
