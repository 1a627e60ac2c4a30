"""Prompts and peer responses in the tokens of an agent."""

import re

import pytest
import torch

import hacpo_kit as hk

PROBLEM = hk.Problem("p", "1+1=", "2")
MESSAGES = [{"role": "user", "content": "1+1="}]
BARE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
WITH_BOS = "{{ bos_token }}" + BARE
THINKING = BARE + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"


@pytest.fixture
def with_bos(tokenizers):
    """A tokenizer with a BOS, which it puts in front of every text unless prefix=""."""

    def make(prefix="<s>", **options):
        return tokenizers.bytes(specials=("<s>", "<end>"), bos_token="<s>", prefix=prefix, **options)

    return make


@pytest.mark.parametrize("template", [None, BARE, WITH_BOS])
@pytest.mark.parametrize("prompt", ["1+1=", "<s>1+1="])
def test_encode_prompt_has_exactly_one_bos(tiny_agent, with_bos, template, prompt):
    agent = tiny_agent(with_bos(chat_template=template))
    ids = agent.encode_prompt(prompt)
    bos = agent.tokenizer.bos_token_id
    assert ids[0] == bos and ids[:2].count(bos) == 1
    shown = prompt if template is None else f"<s>[user]{prompt}[me]"
    assert agent.decode(ids) == "<s>" + shown.removeprefix("<s>")


@pytest.mark.parametrize(
    ("template", "text"), [(None, "1+1="), (BARE, "[user]1+1=[me]"), (WITH_BOS, "<s>[user]1+1=[me]")]
)
def test_encode_prompt_adds_no_bos_that_the_tokenizer_does_not_add(tiny_agent, with_bos, template, text):
    agent = tiny_agent(with_bos(prefix="", chat_template=template))
    assert agent.decode(agent.encode_prompt("1+1=")) == text


def test_encode_prompt_of_built_in_agents_begins_as_their_tokenizers_do(qwen, llama):
    assert qwen.decode(qwen.encode_prompt("1+1=")) == "1+1="
    assert llama.decode(llama.encode_prompt("1+1=")) == "<s>1+1="
    assert llama.view(PROBLEM, "2", ended=False)[0] == llama.encode_prompt("1+1=")
    assert llama.decode(llama.view(PROBLEM, "2", ended=False)[1]) == "2"  # no BOS in front of a reply


def test_encode_prompt_removes_an_end_token_that_the_tokenizer_appends(tiny_agent, tokenizers):
    agent = tiny_agent(tokenizers.bytes(suffix="<end>"))
    assert agent.tokenizer("1+1=")["input_ids"][-1] == agent.tokenizer.eos_token_id
    assert agent.decode(agent.encode_prompt("1+1=")) == "1+1="
    assert agent.decode(agent.view(PROBLEM, "2", ended=True)[1]) == "2<end>"
    assert agent.decode(agent.view(PROBLEM, "2", ended=False)[1]) == "2"


@pytest.mark.parametrize("wrap", [lambda ids: ids, lambda ids: {"input_ids": ids}, lambda ids: torch.tensor([ids])])
def test_encode_prompt_accepts_every_return_type_of_apply_chat_template(tiny_agent, tokenizers, wrap, monkeypatch):
    agent = tiny_agent(tokenizers.bytes(chat_template=BARE))
    expected = agent.encode_prompt("1+1=")
    apply = agent.tokenizer.apply_chat_template

    def by_version(*args, tokenize=True, **kwargs):
        text = apply(*args, **kwargs, tokenize=False)
        return wrap(agent.tokenizer(text, add_special_tokens=False)["input_ids"]) if tokenize else text

    monkeypatch.setattr(agent.tokenizer, "apply_chat_template", by_version)
    assert agent.encode_prompt("1+1=") == expected
    assert all(type(i) is int for i in expected) and agent.decode(expected) == "[user]1+1=[me]"


def test_encode_prompt_takes_text_and_messages(tiny_agent, tokenizers):
    agent = tiny_agent(tokenizers.bytes(chat_template=BARE))
    assert agent.encode_prompt("1+1=") == agent.encode_prompt(MESSAGES)
    longer = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert agent.decode(agent.encode_prompt(longer)) == "[system]Be brief.[user]1+1=[me]"
    assert agent.decode(tiny_agent(agent.tokenizer, prompt_format="plain").encode_prompt("1+1=")) == "1+1="


def test_view_and_rollout_use_the_same_template_options(tiny_agent, tokenizers, say):
    """enable_thinking=False adds an empty think block: without it the learner would read another prompt."""
    silent = tiny_agent(tokenizers.bytes(chat_template=THINKING), name="silent", template={"enable_thinking": False})
    loud = tiny_agent(tokenizers.bytes(chat_template=THINKING), name="loud", seed=1)
    for agent in (silent, loud):
        say(agent, ["2"])
    pool = hk.rollout([silent, loud], [PROBLEM], n=2, progress=False)
    pool = pool.with_rewards([1.0, 0.0, 1.0, 0.0], ["correct", "wrong"] * 2)
    for agent, block in ((silent, "<think>\n\n</think>\n\n"), (loud, "")):
        batch = hk.advantage(pool, agent, hk.Capability().observe(pool), hk.Config())
        assert {agent.decode(ids) for ids in batch.prompt_ids} == {f"[user]1+1=[me]{block}"}
        assert {r.prompt_ids for r in pool.by_source[agent.name]} == set(batch.prompt_ids)


def test_encode_prompt_refuses_messages_without_template_and_empty_prompts(tiny_agent):
    with pytest.raises(ValueError, match="agent 'tiny' has no chat template, but the prompt is a list of messages"):
        tiny_agent().encode_prompt(MESSAGES)
    with pytest.raises(ValueError, match="a prompt of agent 'tiny' has no tokens"):
        tiny_agent().encode_prompt("")


def test_agent_refuses_a_tokenizer_without_end_token_or_template(tiny_agent, tokenizers):
    with pytest.raises(ValueError, match="prompt_format='chatty': use 'auto', 'chat' or 'plain'"):
        tiny_agent(prompt_format="chatty")
    with pytest.raises(ValueError, match="agent 'tiny' has no chat template: use prompt_format='plain'"):
        tiny_agent(prompt_format="chat")
    with pytest.raises(ValueError, match="agent 'tiny' has no end token"):
        tiny_agent(tokenizers.bytes(eos_token=None))


def test_view_returns_tokens_or_the_reason_of_exclusion(tiny_agent, tokenizers):
    agent = tiny_agent(tokenizers.words(["1+1=", "2", " "]), positions=4)
    one, two, end = agent.tokenizer.convert_tokens_to_ids(["1+1=", "2", "<end>"])
    assert agent.view(PROBLEM, "2", ended=True) == ((one,), (two, end))
    assert agent.view(PROBLEM, "2", ended=False) == ((one,), (two,))
    assert agent.view(PROBLEM, "", ended=True) == ((one,), (end,))
    assert agent.view(PROBLEM, "", ended=False) == "empty"
    assert agent.view(PROBLEM, "2 3", ended=True) == "lossy_reencoding"  # 3 is <unk> here
    assert agent.view(PROBLEM, "<unk>", ended=True) == "control_token"
    assert agent.view(PROBLEM, "2<end>", ended=True) == "control_token"
    assert agent.view(PROBLEM, "2 2", ended=False) == ((one,), (two, two + 1, two))
    assert agent.view(PROBLEM, "2 2", ended=True) == "too_long"


def test_view_makes_no_merge_across_prompt_and_response(tiny_agent, tokenizers):
    agent = tiny_agent(tokenizers.bytes(merges=["=2"]))
    prompt, reply = agent.view(PROBLEM, "2", ended=False)
    assert (prompt, agent.decode(reply)) == (agent.encode_prompt("1+1="), "2")


def test_agent_pads_with_the_end_token_without_a_padding_token(tiny_agent, tokenizers):
    agent = tiny_agent()
    assert agent.tokenizer.pad_token_id is None and agent.pad_id == agent.tokenizer.eos_token_id
    assert tiny_agent(tokenizers.bytes(specials=("<end>", "<pad>"), pad_token="<pad>")).pad_id == 257
    assert tiny_agent(positions=99).max_length == 99


def test_agent_repr_has_class_sizes_and_updates(qwen):
    qwen.updates = 3
    assert re.fullmatch(
        r"Agent\('qwen3-sums': Qwen3ForCausalLM, [\d,]+ parameters, 258 tokens, 3 updates\)", repr(qwen)
    )
