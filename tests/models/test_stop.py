"""Stop strings, which end a response as end tokens do."""

import numpy as np
import pytest

import hacpo_kit as hk

SETTINGS = {"n": 4, "max_new_tokens": 32, "progress": False}


@pytest.fixture
def stopped(problems):
    """stopped(agent, stop): pairs of rollouts with the same seed, without and with the stop strings."""

    def make(agent, *stop):
        before = hk.rollout(agent, problems[:6], **SETTINGS)
        agent.stop = stop
        return list(zip(before, hk.rollout(agent, problems[:6], **SETTINGS), strict=True))

    return make


@pytest.mark.parametrize(("name", "tokens"), [("qwen3-sums", 6), ("llama-differences", 1)])
def test_rollout_ends_after_the_stop_string(fresh_agent, stopped, name, tokens):
    """In one tokenizer the string has six tokens, in the other it is a part of one, whose other part stays in the text."""
    pairs = stopped(fresh_agent(name), "boxed{", "never")
    changed = [(whole, short) for whole, short in pairs if "boxed{" in whole.text]
    assert len(changed) > 10
    for whole, short in changed:
        assert short.text == whole.text[: whole.text.index("boxed{")] and short.text.endswith("\\")
        assert short.ended and short.end_length == tokens
        assert short.token_ids == whole.token_ids[: len(short.token_ids)] and short.token_ids != whole.token_ids
        np.testing.assert_allclose(short.logps, whole.logps[: len(short.logps)], atol=1e-5)
    for whole, short in pairs:
        if "boxed{" not in whole.text:
            assert short.token_ids == whole.token_ids and short.text == whole.text and short.end_length in (0, 1)


def test_mean_logp_without_the_end_leaves_out_all_tokens_of_the_stop_string(qwen, stopped):
    short = next(short for _, short in stopped(qwen, "boxed{") if short.end_length == 6)
    assert short.mean_logp(count_eos=False) == pytest.approx(short.logps[:-6].mean(), abs=1e-6)
    assert short.mean_logp() == pytest.approx(short.logps.mean(), abs=1e-6)


def test_view_ends_with_the_learners_own_stop_string(qwen, llama, problems):
    qwen.stop = ("\n\n", "Problem:")
    assert qwen.decode(qwen.view(problems[0], "2", ended=True)[1]) == "2\n\n"
    assert qwen.decode(qwen.view(problems[0], "2", ended=False)[1]) == "2"
    assert llama.decode(llama.view(problems[0], "2", ended=True)[1]) == "2</s>"


def test_step_learns_from_a_peer_with_stop_strings(pair, problems):
    pair[0].stop = (";",)
    config = hk.Config.preset("hacpo", prompts_per_step=4, n=4, max_new_tokens=32)
    result = hk.step(pair, problems[:4], hk.Capability(), config)
    batch = result.batches[pair[1].name]
    of_peer = [ids for ids, own in zip(batch.response_ids, batch.own.tolist(), strict=True) if not own]
    assert of_peer and all(";" not in pair[1].decode(ids) for ids in of_peer)
    ratios = np.concatenate([m.ratio[m.own] for m in result.stats[pair[0].name].minibatches[:1]])
    assert ratios == pytest.approx(1, abs=2e-5)  # own rollouts keep the sampled tokens


def test_load_agent_takes_and_records_stop_strings(tmp_path, problems):
    agent = hk.load_agent("qwen3-sums", device="cpu", stop=";")
    assert agent.stop == (";",) and agent.loading["stop"] == [";"]
    config = hk.Config.preset("gspo", prompts_per_step=2, n=2, max_new_tokens=16)
    hk.train(agent, hk.load_problems("arithmetic", split="train", size=10), config, 1, out=tmp_path, progress="off")
    assert hk.resume(tmp_path, steps=1, progress="off").agents[0].stop == (";",)
    with pytest.raises(ValueError, match="stop of qwen3-sums"):
        hk.resume(tmp_path, agents=[hk.load_agent("qwen3-sums", device="cpu", stop="\n")], steps=2, progress="off")


@pytest.mark.parametrize("stop", ["", ["a", ""], [1]])
def test_load_agent_refuses_stop_strings_that_are_none(stop):
    with pytest.raises(ValueError, match="stop="):
        hk.load_agent("qwen3-sums", device="cpu", stop=stop)
