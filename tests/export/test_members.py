"""The agents of an export."""

import pandas as pd
import pytest
from verl_recipe import export

import hacpo_kit as hk
from hacpo_kit.export.members import plain_template


def test_members_keep_chat_messages_and_template_options(tmp_path, tiny_agent):
    agent = tiny_agent(positions=400)
    agent.tokenizer.chat_template = "{{ tone }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    folder = agent.save(tmp_path / "chat")
    messages = ({"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="})
    problems = hk.load_problems([hk.Problem(str(i), messages, "2") for i in range(8)])
    config = hk.Config(prompts_per_step=8, minibatch=64)
    export(tmp_path / "out", config, problems, agents=[folder], steps=1, template={"tone": "kind"})
    assert [dict(m) for m in pd.read_parquet(tmp_path / "out" / "train.parquet")["prompt"][0]] == list(messages)
    assert "apply_chat_template_kwargs:{tone:kind}" in (tmp_path / "out" / "launch.sh").read_text()


@pytest.mark.parametrize("name", ["qwen3-sums", "llama-differences"])
def test_plain_template_gives_the_tokens_of_a_plain_prompt(fresh_agent, name):
    agent = fresh_agent(name)
    for prompt in ("37+58=", "What is 3 <b> & 'x'?\n"):
        text = agent.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            chat_template=plain_template(agent.tokenizer),
            tokenize=False,
            add_generation_prompt=True,
        )
        assert tuple(agent.tokenizer(text, add_special_tokens=False)["input_ids"]) == agent.encode_prompt(prompt)


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ([], "no agents"),
        (["qwen3-sums", "qwen3-sums"], "different names"),
        ([{"name": "mine", "origin": None}], "'mine' has no folder"),
        ([{"name": "remote", "origin": "a/far", "prompt_format": "plain"}], "'remote' uses plain prompts"),
        ([{"name": "thin", "origin": "a/b", "lora": {"r": 8}}], "'thin' has no folder, or was loaded with lora"),
        (["./nowhere"], "nowhere"),
    ],
)
def test_members_refuse_agents(tmp_path, agents, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        export(tmp_path / "out", agents=agents)
    assert not list(tmp_path.iterdir())


def test_members_refuse_messages_with_other_keys(tmp_path):
    message = {"role": "user", "content": "1+1=", "name": "me"}
    config, problems = hk.Config(prompts_per_step=1, minibatch=8), [hk.Problem("x", (message,), "2")]
    with pytest.raises(ValueError, match=r"problem 'x'.*\['name'\]"):
        export(tmp_path / "out", config, problems, agents=["a/far"])
    assert not list(tmp_path.iterdir())
