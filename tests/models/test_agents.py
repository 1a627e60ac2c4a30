"""The optimiser of an agent, and the folder that `save` writes."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hacpo_kit as hk


def test_prepare_update_sets_warm_up_and_settings(tiny_agent):
    agent = tiny_agent()
    config = hk.Config(lr=0.8, warmup=4, beta1=0.5, beta2=0.6, adam_eps=1e-3, weight_decay=0.1)
    rates = []
    agent.updates = 50  # warm-up counts steps, so that more updates a step do not shorten it
    for agent.steps in range(6):
        group = agent.prepare_update(config).param_groups[0]
        rates.append(group["lr"])
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.6), 1e-3, 0.1)
    assert agent.prepare_update(config.replace(warmup=0)).param_groups[0]["lr"] == 0.8


def test_prepare_update_copies_the_kl_reference_before_the_first_update_only(tiny_agent):
    agent = tiny_agent()
    agent.prepare_update(hk.Config(beta=0.1))
    agent.model.lm_head.weight.data += 1.0
    assert not torch.equal(agent.reference.lm_head.weight, agent.model.lm_head.weight)
    assert not any(p.requires_grad for p in agent.reference.parameters())
    late = tiny_agent()
    late.updates = 1
    with pytest.raises(ValueError, match="agent 'tiny' has made 1 updates with beta=0"):
        late.prepare_update(hk.Config(beta=0.1))


@pytest.mark.parametrize("name", ["qwen3-sums", "llama-differences"])
def test_save_writes_a_hugging_face_folder_with_equal_and_tied_weights(fresh_agent, tmp_path, name):
    agent = fresh_agent(name)
    with torch.no_grad():
        for p in agent.model.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    folder = agent.save(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(folder)
    own, loaded = agent.model.state_dict(), model.state_dict()
    assert own.keys() == loaded.keys() and all(torch.equal(own[k], loaded[k]) for k in own)
    tied = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert tied is (name == "qwen3-sums") is model.config.tie_word_embeddings
    model.get_input_embeddings().weight.data[0, 0] = 123.0
    assert (model.get_output_embeddings().weight[0, 0].item() == 123.0) is tied
    assert not list(folder.glob("*.bin")) and list(folder.glob("*.safetensors"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(r"\boxed{1}")["input_ids"] == agent.tokenizer(r"\boxed{1}")["input_ids"]


def test_save_and_load_agent_give_the_same_rollouts(qwen, problems, tmp_path):
    again = hk.load_agent(qwen.save(tmp_path / "saved"), name=qwen.name, device="cpu")
    assert again.end_ids == qwen.end_ids
    pools = [hk.rollout(a, problems[:3], n=2, progress=False) for a in (qwen, again)]
    assert [r.token_ids for r in pools[0]] == [r.token_ids for r in pools[1]]


def test_save_keeps_generation_settings_that_transformers_refuses(tiny_agent, tmp_path):
    first = tiny_agent()
    stored = GenerationConfig(eos_token_id=[256, 9], temperature=0.1, top_k=1, repetition_penalty=5.0)  # no do_sample
    agent = hk.Agent(first.model, first.tokenizer, name="tiny")
    first.model.generation_config = stored
    agent = hk.Agent(first.model, first.tokenizer, name="tiny")
    agent.save(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert {k: written[k] for k in ("eos_token_id", "temperature", "top_k", "repetition_penalty")} == {
        "eos_token_id": [256, 9],
        "temperature": 0.1,
        "top_k": 1,
        "repetition_penalty": 5.0,
    }
    again = hk.load_agent(tmp_path / "saved", device="cpu")
    assert again.end_ids == {256, 9}
    # neither agent samples with them
    assert again.model.generation_config.temperature is agent.model.generation_config.temperature is None
