"""Chat templates: the token that ends a response, for the families of chat models; dates and roles."""

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

    def make(family, *, ends=None, template=None, options=None, prompt_format="auto"):
        specials, message, opening, eos, stored, _ = FAMILIES[family]
        template = template or (
            "{% for m in messages %}" + message + "{% endfor %}{% if add_generation_prompt %}" + opening + "{% endif %}"
        )
        tokenizer = tokenizers.bytes(specials=specials, eos_token=eos, chat_template=template)
        model = tiny_agent(tokenizer).model
        ids = [tokenizer.convert_tokens_to_ids(t) for t in (stored if ends is None else ends)]
        model.generation_config = GenerationConfig(eos_token_id=ids or None)
        return hk.Agent(model, tokenizer, name=family, template=options, prompt_format=prompt_format)

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


# ── dates and roles ──────────────────────────────────────────────────────────────────────────────────────────────

TODAY = "Today is {{ strftime_now('%d %b %Y') }}. {{ messages[0].content }}"


def test_encode_prompt_uses_the_same_date_every_day(chat_agent):
    agent = chat_agent("llama-3", template=TODAY)
    assert agent.decode(agent.encode_prompt("1+1=")) == "Today is 26 Jul 2024. 1+1="
    assert agent.template == {"strftime_now": "2024-07-26"}  # what a run stores and loads again
    chosen = chat_agent("llama-3", template=TODAY, options={"strftime_now": "2026-01-31"})
    assert chosen.decode(chosen.encode_prompt("1+1=")) == "Today is 31 Jan 2026. 1+1="


def test_agent_template_has_no_date_where_none_is_needed(chat_agent):
    assert chat_agent("qwen").template == chat_agent("qwen", template=TODAY, prompt_format="plain").template == {}


@pytest.mark.parametrize("date", ["31 Jan 2026", "today", 2026])
def test_agent_refuses_a_date_that_is_none(chat_agent, date):
    with pytest.raises(ValueError, match=f"strftime_now.*{date}.*2024-07-26"):
        chat_agent("llama-3", template=TODAY, options={"strftime_now": date})


def test_resume_keeps_the_date_of_the_run(chat_agent, tmp_path):
    agent = chat_agent("llama-3", template=TODAY, options={"strftime_now": "2026-01-31"})
    agent = hk.load_agent(agent.save(tmp_path / "agent"), device="cpu", template={"strftime_now": "2026-01-31"})
    config = hk.Config.preset("gspo", prompts_per_step=2, n=2, max_new_tokens=4)
    problems = hk.load_problems("arithmetic", split="train", size=10)
    hk.train(agent, problems, config, 1, out=tmp_path / "run", progress="off")
    run = hk.resume(tmp_path / "run", steps=2, progress="off")
    assert run.agents[0].template == {"strftime_now": "2026-01-31"}
    assert "Today is 31 Jan 2026." in run.agents[0].decode(run.agents[0].encode_prompt("1+1="))


def test_encode_prompt_warns_about_a_last_message_of_the_assistant(chat_agent):
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    with pytest.warns(UserWarning, match="agent 'qwen'.*assistant"):
        chat_agent("qwen").encode_prompt(messages)


def test_rollout_names_agent_and_problem_of_a_refused_system_message(chat_agent):
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TODAY
    agent = chat_agent("gemma", template=refuses)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]
    problem = hk.Problem("p7", messages, "2")
    for call in (
        lambda: hk.rollout(agent, [problem], n=1, progress=False),
        lambda: agent.view(problem, "2", ended=True),
    ):
        with pytest.raises(
            ValueError, match=r"problem 'p7'.*agent 'gemma'.*system, user \(no system role\).*first message"
        ):
            call()
