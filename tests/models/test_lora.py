"""LoRA adapters: training, KL reference, files and resume."""

import sys

import pytest
import torch

import hacpo_kit as hk
from hacpo_kit.models import offload
from hacpo_kit.models.measure import kept_bytes, meta_agent

CONFIG = hk.Config(n=4, minibatch=8, prompts_per_step=2, max_new_tokens=12, lr=1e-2, warmup=0, delta=1, delta_step=0)


@pytest.fixture
def adapted():
    """adapted("qwen3-sums"): a built-in agent with adapters; only their output side starts at zero."""
    pytest.importorskip("peft", reason="needs the extra lora")
    return lambda source="qwen3-sums", **how: hk.load_agent(source, device="cpu", **{"lora": {"r": 4}, **how})


def base(agent):
    return {n: p.detach().clone() for n, p in agent.model.named_parameters() if not p.requires_grad}


def adapters(agent):
    return {n: p.detach().clone() for n, p in agent.model.named_parameters() if p.requires_grad}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def learn(agents, problems, config=CONFIG, steps=2):
    """Train some steps in which rewards differ within every problem."""
    stats = []
    for k in range(steps):
        pool = hk.rollout(agents, problems[2 * k : 2 * k + 2], n=4, max_new_tokens=12, seed=k, progress=False)
        pool = pool.with_rewards([float(i % 2) for i in range(len(pool))], ["correct"] * len(pool))
        capability = hk.Capability().observe(pool)
        stats += [hk.update(a, hk.advantage(pool, a, capability, config), config) for a in agents]
    return stats


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_update_changes_adapters_and_no_base_weight(adapted, problems, dtype):
    agent = adapted(dtype=dtype)
    before, first = base(agent), adapters(agent)
    layers = agent.model.config.num_hidden_layers
    assert len(first) == 2 * 7 * layers and all(
        p.dtype == torch.float32 for p in first.values()
    )  # A and B of 7 linear maps
    learn([agent], problems)
    moved = adapters(agent)
    assert same(base(agent), before) and not any(torch.equal(first[n], moved[n]) for n in first)
    assert all(m is p for m, p in zip(agent.optimizer.masters, agent.optimizer.parameters, strict=True))
    assert len(agent.optimizer.parameters) == len(first)


def test_add_adapter_starts_as_the_base_model(adapted, qwen, problems):
    pools = [hk.rollout(a, problems[:3], n=2, max_new_tokens=12, progress=False) for a in (adapted(), qwen)]
    assert [r.token_ids for r in pools[0]] == [r.token_ids for r in pools[1]]
    assert adapted().end_ids == qwen.end_ids and adapted().max_length == qwen.max_length


def test_add_adapter_derives_initial_values_from_the_name(adapted):
    first = adapters(adapted())
    torch.manual_seed(7)
    state = torch.get_rng_state()
    assert same(adapters(adapted()), first) and torch.equal(torch.get_rng_state(), state)
    assert not same(adapters(adapted(name="other")), first)


def test_reference_logprobs_of_adapters_are_those_of_the_base(adapted, problems):
    agent = adapted()
    config = CONFIG.replace(beta=0.1)
    first, second = (s.minibatches for s in learn([agent], problems, config))
    assert first[0].kl == pytest.approx(0, abs=1e-7) and second[-1].kl > 1e-4
    assert agent.reference is None
    late = adapted()
    learn([late], problems, CONFIG, steps=1)
    stats = learn([late], problems, config, steps=1)  # the base has not gone: a KL may begin at any time
    assert stats[0].minibatches[0].kl > 1e-5


def test_save_merges_adapters_into_a_plain_folder(adapted, problems, tmp_path):
    agent = adapted("llama-differences")
    learn([agent], problems)
    weights, own = base(agent), adapters(agent)
    folder = agent.save(tmp_path / "saved")
    assert not list(folder.glob("adapter*")) and same(base(agent), weights) and same(adapters(agent), own)
    plain = hk.load_agent(folder, device="cpu", name=agent.name)
    assert not any("lora" in name for name, _ in plain.model.named_parameters())
    answers = [hk.evaluate(a, problems[:8], max_new_tokens=12, progress=False).answers for a in (agent, plain)]
    assert [r.text for r in answers[0]] == [r.text for r in answers[1]]
    ids = [[list(r.prompt_ids) for r in answers[0]], [list(r.token_ids) for r in answers[0]]]
    with torch.no_grad():
        torch.testing.assert_close(plain.logprobs(*ids)[0], agent.logprobs(*ids)[0], rtol=1e-4, atol=1e-4)


def test_resume_with_adapters_is_bit_identical(adapted, problems, tmp_path):
    ends = []
    for stops in ([3], [2, 3]):
        for stop in stops:
            agent = adapted()
            hk.train(agent, problems, CONFIG.replace(beta=0.01), stop, out=tmp_path / str(len(stops)), progress="off")
        ends.append({**adapters(agent), **agent.optimizer.tensors()})
    assert same(*ends)
    run = hk.resume(tmp_path / "2", problems=problems, steps=3, progress="off")  # the folder knows of the adapters
    assert same(adapters(run.agents[0]), {n: ends[0][n] for n in adapters(run.agents[0])})
    with pytest.raises(ValueError, match=r"lora of qwen3-sums: \{'r': 4\} → None"):
        hk.train(
            hk.load_agent("qwen3-sums", device="cpu"),
            problems,
            CONFIG.replace(beta=0.01),
            4,
            out=tmp_path / "2",
            progress="off",
        )


def test_offload_moves_adapters_and_their_optimiser(adapted, problems):
    agent = adapted(offload=True)
    learn([agent], problems, steps=1)
    assert offload.size(agent, "weights") == sum(p.nbytes for p in agent.model.parameters()) + sum(
        b.nbytes for b in agent.model.buffers()
    )
    assert offload.size(agent, "optimizer") == 2 * sum(p.nbytes for p in adapters(agent).values())
    meta = meta_agent(agent.model.config, lora={"r": 4})
    assert kept_bytes(meta, CONFIG) == {
        part: offload.size(agent, part) for part in ("weights", "optimizer", "reference")
    }


def test_gradient_checkpointing_works_with_adapters(adapted, problems):
    ends = []
    for checkpointing in (False, True):
        agent = adapted(gradient_checkpointing=checkpointing)
        learn([agent], problems, steps=1)
        ends.append(adapters(agent))
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-4, atol=1e-6)


def test_load_agent_refuses_settings_that_peft_refuses(adapted):
    for settings, message in (
        ({"rank": 4}, "rank"),
        ({"target_modules": ["no_such"]}, "no_such"),
        ({"lora_dropout": 0.1}, "set it to 0"),
    ):
        with pytest.raises(ValueError, match=message):
            adapted(lora=settings)


def test_load_agent_names_the_extra_of_peft(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match=r"LoRA needs peft: pip install 'hacpo_kit\[lora\]'"):
        hk.load_agent("qwen3-sums", device="cpu", lora=True)
