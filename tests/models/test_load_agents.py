"""Loading agents: names, options, and what is refused."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

import hacpo_kit as hk


def test_load_agents_loads_a_built_in_set_in_order():
    agents = hk.load_agents("tiny-model-pair", device="cpu")
    assert [a.name for a in agents] == ["qwen3-sums", "llama-differences"]
    assert [a.origin for a in agents] == ["qwen3-sums", "llama-differences"]
    assert all(p.dtype == torch.float32 for a in agents for p in a.model.parameters())
    assert not any(a.model.training for a in agents)


def test_load_agents_refuses_an_unknown_set():
    with pytest.raises(ValueError, match="unknown set of agents 'tiny-modle-pair'; did you mean 'tiny-model-pair'"):
        hk.load_agents("tiny-modle-pair")
    with pytest.raises(ValueError, match=r"'qwen3-sums'.*use a list for other agents"):
        hk.load_agents("qwen3-sums")
    with pytest.raises(ValueError, match="no agents to load"):
        hk.load_agents([])


def test_load_agents_numbers_equal_names(tiny_agent):
    agents = [tiny_agent(name=n) for n in ("a", "a", "b", "a#2", "a")]
    assert [a.name for a in hk.load_agents(agents)] == ["a", "a#2", "b", "a#2#2", "a#3"]
    twins = hk.load_agents(["qwen3-sums", "qwen3-sums"], device="cpu")
    assert [a.name for a in twins] == ["qwen3-sums", "qwen3-sums#2"] and twins[0].model is not twins[1].model


def test_load_agents_refuses_the_same_agent_twice(tiny_agent):
    agent, other = tiny_agent(name="a"), tiny_agent(name="a")
    with pytest.raises(ValueError, match="agent 'a' is listed twice"):
        hk.load_agents([agent, agent])
    with pytest.raises(ValueError, match="agent 'a#2' is listed twice"):
        hk.load_agents([agent, other, other])


def test_load_agent_refuses_a_tokenizer_with_more_tokens_than_embeddings(llama, tmp_path):
    llama.tokenizer.add_tokens(["<one>", "<two>"])
    folder = llama.save(tmp_path / "grown")
    with pytest.raises(
        ValueError, match=r"tokenizer has 273 tokens, but the model has 271 embeddings.*resize_token_embeddings"
    ):
        hk.load_agent(folder, device="cpu")


def test_load_agent_takes_a_model_with_more_embeddings_than_tokens(qwen, problems, tmp_path):
    """Padded vocabularies are common; the rows without a token take part in the softmax, on both sides."""
    size = len(qwen.tokenizer)
    with torch.random.fork_rng([]):
        qwen.model.resize_token_embeddings(size + 6, mean_resizing=False)
    agent = hk.load_agent(qwen.save(tmp_path / "padded"), device="cpu")
    assert agent.model.get_input_embeddings().num_embeddings == size + 6 and len(agent.tokenizer) == size
    result = hk.step(agent, problems[:2], hk.Capability(), hk.Config(n=2, max_new_tokens=8, minibatch=4))
    stats = result.stats[agent.name].minibatches[0]
    assert agent.updates == 1 and stats.ratio == pytest.approx(1, abs=2e-5)


def test_load_agent_refuses_an_unusable_tokenizer_before_reading_weights(qwen, llama, tmp_path, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("read the weights"))
    qwen.tokenizer.eos_token = None
    with pytest.raises(
        ValueError, match=r"agent 'endless' has no end token, so no response could end: set tokenizer\.eos_token"
    ):
        hk.load_agent(qwen.save(tmp_path / "endless"), device="cpu")
    llama.tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"agent 'plain' has no chat template: use prompt_format='plain', or set"):
        hk.load_agent(llama.save(tmp_path / "plain"), device="cpu", prompt_format="chat")


def test_load_agent_in_half_precision_computes_softmax_in_float32(qwen):
    agent = hk.load_agent("qwen3-sums", dtype="bfloat16", device="cpu", name="half")
    assert agent.model.dtype == torch.bfloat16 and agent.name == "half" and agent.origin == "qwen3-sums"
    assert agent.half_precision and not qwen.half_precision and agent.loading["dtype"] == "bfloat16"
    logps, _ = agent.logprobs([[1, 2]], [[3]])
    assert logps.dtype == torch.float32  # the softmax is not taken in bfloat16


def test_prepare_update_refuses_float16():
    agent = hk.load_agent("qwen3-sums", dtype="float16", device="cpu")
    with pytest.raises(ValueError, match=r"'qwen3-sums' computes in float16.*dtype='bfloat16'"):
        agent.prepare_update(hk.Config())


def test_load_agent_keeps_built_in_agents_on_the_cpu(monkeypatch):
    """The course gives the same results on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert hk.load_agent("qwen3-sums").device.type == "cpu"


def test_load_agent_shows_no_progress_bar(capfd):
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    hk.load_agent("qwen3-sums", device="cpu")
    assert "it/s" not in capfd.readouterr().err and logging.is_progress_bar_enabled() == before


@pytest.mark.parametrize("formats", [["plain", "chat"], {"a": "plain", "b": "chat"}, {"a": "plain"}])
def test_load_agents_takes_a_prompt_format_for_each_agent(tiny_agent, tokenizers, tmp_path, formats):
    chat = tokenizers.bytes(chat_template="[{{ messages[0].content }}]")
    folders = [tiny_agent(chat, name=name).save(tmp_path / name) for name in ("a", "b")]
    if isinstance(formats, dict):
        formats = {str(tmp_path / name): value for name, value in formats.items()}
    agents = hk.load_agents(folders, device="cpu", prompt_format=formats)
    assert [agent.chat for agent in agents] == [False, True]


def test_load_agents_refuses_prompt_formats_of_other_agents():
    with pytest.raises(ValueError, match="prompt_format has 1 entries for 2 agents"):
        hk.load_agents("tiny-model-pair", prompt_format=["plain"])
    with pytest.raises(ValueError, match=r"prompt_format names \['qwen'\].*'qwen3-sums'"):
        hk.load_agents("tiny-model-pair", prompt_format={"qwen": "plain"})


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"bos_token": "<s>"}, True),
        ({"bos_token": "<s>", "prefix": "<s>"}, False),
        ({"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}, False),
        ({"bos_token": "<s>", "chat_template": "{{ messages[0].content }}"}, True),
        ({"bos_token": "<end>"}, False),
        ({}, False),
    ],
)
def test_load_agent_warns_about_a_bos_that_prompts_lack(tiny_agent, tokenizers, tmp_path, options, warned):
    folder = tiny_agent(tokenizers.bytes(specials=("<s>", "<end>"), **options)).save(tmp_path / "agent")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hk.load_agent(folder, device="cpu")
    assert ["BOS token '<s>'" in str(w.message) for w in caught if w.category is UserWarning] == [True] * warned
