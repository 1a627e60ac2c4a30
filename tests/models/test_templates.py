"""Chat templates: the token that ends a response, for the families of chat models."""

import pytest
from transformers import GenerationConfig

import hacpo_kit as hk

PROBLEM = hk.Problem("p", "1+1=", "2")
# special tokens, template of one message, what opens a response, the tokenizer's eos_token, end tokens of the generation
# settings, and the token that ends a turn
FAMILIES = {
    "qwen": (
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n",
        "<|im_start|>assistant\n", "<|endoftext|>", ("<|endoftext|>", "<|im_end|>"), "<|im_end|>",
    ),
    "llama-3": (
        ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|end_of_text|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "<|eot_id|>",
    ),
    "gemma": (
        ("<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n",
        "<start_of_turn>model\n", "<eos>", ("<eos>", "<end_of_turn>"), "<end_of_turn>",
    ),
    "phi": (
        ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"), "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n",
        "<|assistant|>\n", "<|endoftext|>", ("<|endoftext|>", "<|assistant|>", "<|end|>"), "<|end|>",
    ),
    "mistral": (
        ("</s>",), "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}",
        "", "</s>", ("</s>",), "</s>",
    ),
}  # fmt: skip


@pytest.fixture
def chat_agent(tiny_agent, tokenizers):
    """chat_agent(family): a small agent with the special tokens, template and end tokens of a family."""

    def make(family, *, ends=None, template=None, **options):
        specials, message, opening, eos, stored, _ = FAMILIES[family]
        template = template or (
            "{% for m in messages %}" + message + "{% endfor %}{% if add_generation_prompt %}" + opening + "{% endif %}"
        )
        tokenizer = tokenizers.bytes(specials=specials, eos_token=eos, chat_template=template)
        model = tiny_agent(tokenizer).model
        ids = [tokenizer.convert_tokens_to_ids(t) for t in (stored if ends is None else ends)]
        model.generation_config = GenerationConfig(eos_token_id=ids or None)
        return hk.Agent(model, tokenizer, name=family, **options)

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_view_ends_with_the_token_that_closes_a_turn_of_the_family(chat_agent, family):
    agent, end = chat_agent(family), FAMILIES[family][-1]
    prompt, response = agent.view(PROBLEM, "2", ended=True)
    assert agent.decode(response) == f"2{end}" and agent.end_id in agent.end_ids
    assert agent.decode(prompt + response).count(end) == (1 if family == "mistral" else 2)  # of the user and the agent
    assert agent.decode(agent.view(PROBLEM, "2", ended=False)[1]) == "2"


def test_end_of_turn_of_a_plain_agent_is_the_first_stored_end_token(chat_agent):
    assert chat_agent("llama-3", prompt_format="plain").end_id == 256
    assert chat_agent("qwen", ends=["<|im_end|>", "<|endoftext|>"], prompt_format="plain").end_id == 258
    assert chat_agent("gemma", ends=[], prompt_format="plain").end_id == 256


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no assistant') }}",  # refuses the message
        "{% for m in messages %}{{ m.content }}{% endfor %}",  # ends no turn
        "{{ messages[0].content }}<end_of_turn>",  # shows no response
    ],
)
def test_end_of_turn_falls_back_to_the_stored_end_token(chat_agent, template):
    assert chat_agent("gemma", template=template).end_id == 256


def test_end_of_turn_takes_the_longest_of_tokens_with_the_same_beginning(chat_agent):
    agent = chat_agent("phi", ends=["<|end|>"])
    agent.tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>\n"]})
    longer = agent.tokenizer.convert_tokens_to_ids("<|end|>\n")
    agent.model.generation_config.eos_token_id = [257, longer]
    assert hk.Agent(agent.model, agent.tokenizer, name="longer").end_id == longer


def test_end_id_of_built_in_agents_is_their_end_token(qwen, llama):
    assert all(agent.end_id == agent.tokenizer.eos_token_id for agent in (qwen, llama))
