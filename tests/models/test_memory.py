"""Memory: errors when it runs out, estimates, and `hacpo-kit doctor`."""

import gc
import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import hacpo_kit as hk
from hacpo_kit import objective
from hacpo_kit.cli import main
from hacpo_kit.models import measure, memory, offload
from hacpo_kit.models.memory import estimate
from hacpo_kit.models.sources import read_config
from hacpo_kit.runs.run import State

CONFIG = hk.Config.preset("gspo", n=4, minibatch=8, prompts_per_step=4, max_new_tokens=16, lr=1e-3, warmup=0)


@pytest.fixture
def scored(qwen, problems):
    """An agent, its batch of 16 rollouts, and a config with two mini-batches of several passes each."""
    pool = hk.reward(hk.rollout(qwen, problems[:4], n=4, max_new_tokens=16, progress=False))
    pool = pool.with_rewards([float(i % 2) for i in range(len(pool))], ["correct"] * len(pool))
    config = CONFIG.replace(microbatch_tokens=64)
    return qwen, hk.advantage(pool, qwen, hk.Capability().observe(pool), config), config


@pytest.fixture
def fail(monkeypatch):
    """fail(agent, k): the k-th pass of the model runs out of memory; with `learning` only passes with gradients count."""

    def at(agent, k, error=None, learning=False):
        passes, run = [], agent.model.forward
        reason = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")

        def forward(*args, **kwargs):
            if learning and not torch.is_grad_enabled():
                return run(*args, **kwargs)
            passes.append(torch.zeros(1000))
            kept = passes[-1]
            if len(passes) == k:
                passes[-1] = weakref.ref(kept)
                raise reason
            return run(*args, **kwargs)

        monkeypatch.setattr(agent.model, "forward", forward)
        return passes

    return at


def weights(agent):
    return {k: v.clone() for k, v in agent.model.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


def test_update_out_of_memory_names_the_remedy_and_leaves_weights_unchanged(scored, fail):
    agent, batch, config = scored
    before, passes = [], []

    def look(m, part):
        before.append(weights(agent))
        if m == 1:
            passes.append(fail(agent, 2, learning=True))

    message = (
        r"agent 'qwen3-sums' ran out of memory on cpu, mini-batch 1 \(weights unchanged\): pass over \d rollouts, \d+ "
        r"padded tokens \(CUDA out of memory. Tried to allocate 2.00 GiB.\); set microbatch_tokens=32 "
        r"\(now 64\), or load the agent with gradient_checkpointing=True or offload=True.*hk\.resume\(folder, changes="
    )
    with pytest.raises(MemoryError, match=message) as caught:
        hk.update(agent, batch, config, before=look)
    assert agent.updates == 1 and not same(before[0], before[1]) and same(before[1], weights(agent))
    assert all(p.grad is None for p in agent.model.parameters())
    gc.collect()
    assert passes[0][1]() is None and caught.value is not None  # the error keeps no tensor of the pass alive


def test_update_out_of_memory_with_one_rollout_names_max_new_tokens(scored, fail):
    agent, batch, config = scored
    fail(agent, 1)
    with pytest.raises(MemoryError, match=r"over 1 rollouts, .*set a smaller max_new_tokens"):
        hk.update(agent, batch, config.replace(microbatch_tokens=1))


def test_update_out_of_memory_in_the_optimiser_says_that_the_step_is_incomplete(scored, monkeypatch):
    agent, batch, config = scored

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.optim.AdamW, "step", full)
    with pytest.raises(MemoryError, match=r"mini-batch 0: the optimiser's step, which may be incomplete.*lora=True"):
        hk.update(agent, batch, config)


def test_memory_advice_keeps_other_errors(scored, fail):
    agent, batch, config = scored
    fail(agent, 1, RuntimeError("CUDA error: device-side assert triggered"))
    with pytest.raises(RuntimeError, match="device-side assert"):
        hk.update(agent, batch, config)


def test_memory_advice_covers_the_cpu(qwen, problems, fail):
    fail(
        qwen, 1, RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 9 bytes")
    )
    with pytest.raises(MemoryError, match=r"sampling 8 rollouts at once \(.*9 bytes\); sample fewer: rollout_batch=4"):
        hk.rollout(qwen, problems[:2], n=4, progress=False)


def test_rollout_and_score_out_of_memory_name_their_settings(qwen, problems, fail, monkeypatch):
    fail(qwen, 3)
    with pytest.raises(
        MemoryError, match=r"sampling 8 rollouts at once .*rollout_batch=4 \(batch_size without a Config"
    ):
        hk.rollout(qwen, problems[:2], n=4, progress=False)
    monkeypatch.undo()
    fail(qwen, 1)
    with pytest.raises(MemoryError, match=r"sampling 1 rollouts at once .*set a smaller max_new_tokens"):
        hk.evaluate(qwen, problems[:2], batch_size=1, progress=False)
    monkeypatch.undo()
    pool = hk.rollout(qwen, problems[:2], n=4, progress=False)
    fail(qwen, 1)
    with pytest.raises(
        MemoryError, match=r"scoring 8 rollouts, \d+ padded tokens .*set microbatch_tokens=500 \(now 1000\)"
    ):
        hk.rollouts.score(qwen, list(pool), temperature=1.0, tokens=1000)


@pytest.mark.parametrize("setting", ["microbatch_tokens", "rollout_batch"])
def test_resume_with_the_advised_setting_ends_the_same(fresh_agent, problems, tmp_path, fail, monkeypatch, setting):
    config = CONFIG.replace(
        eps_low=0.5, eps_high=0.5
    )  # no clip: the passes of the second mini-batch are of many rollouts
    whole = [fresh_agent("qwen3-sums")]
    hk.train(whole, problems, config, 3, save_every=1, out=tmp_path / "whole", progress="off")
    agents, calls, step = [fresh_agent("qwen3-sums")], [], hk.training.step

    def third(*args, **kwargs):
        calls.append(0)
        if len(calls) == 3:
            fail(agents[0], 2, learning=setting == "microbatch_tokens")  # in the second mini-batch, or while sampling
        return step(*args, **kwargs)

    monkeypatch.setattr(hk.training, "step", third)
    with pytest.raises(MemoryError, match=f"{setting}="):
        hk.train(agents, problems, config, 3, save_every=1, out=tmp_path / "run", progress="off")
    monkeypatch.undo()
    value = {"microbatch_tokens": 64, "rollout_batch": 8}[setting]
    run = hk.resume(
        tmp_path / "run",
        problems=problems,
        agents=[fresh_agent("qwen3-sums")],
        changes={setting: value},
        progress="off",
    )
    assert run.state.step == 3 and run.config.differences(config) == {setting: (value, getattr(config, setting))}
    for (name, expected), resumed in zip(
        whole[0].model.state_dict().items(), run.agents[0].model.state_dict().values(), strict=True
    ):
        if setting == "microbatch_tokens":  # other sums, same result; the other one draws other answers
            torch.testing.assert_close(resumed, expected, rtol=0, atol=2e-3, msg=name)


def test_cli_resume_takes_the_advised_setting(tmp_path, monkeypatch):
    calls = {}
    monkeypatch.setattr(
        "hacpo_kit.training.resume", lambda folder, **how: calls.update(how) or SimpleNamespace(state=State(3))
    )
    call = lambda *more: CliRunner().invoke(main, ["resume", str(tmp_path), *more])  # noqa: E731
    assert "3 steps done" in call("-p", "microbatch_tokens", "4096", "-p", "lr", "1e-6").output
    assert calls == {"steps": None, "changes": {"microbatch_tokens": 4096, "lr": 1e-6}}
    wrong = call("-p", "microbatch_token", "4096")
    assert wrong.exit_code == 2 and "did you mean 'microbatch_tokens'" in wrong.output

    def full(*_, **__):
        raise MemoryError("agent 'a' ran out of memory on cuda:0")

    monkeypatch.setattr("hacpo_kit.training.resume", full)
    assert (failed := call()).exit_code == 2 and failed.output == "hacpo-kit: agent 'a' ran out of memory on cuda:0\n"


# ── estimates ────────────────────────────────────────────────────────────────────────────────────────────────────

LLAMA = LlamaConfig(
    hidden_size=512, intermediate_size=2048, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=32000, tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "dtype", "checkpointing", "rows"),
    [
        ("qwen3-sums", "float32", False, 64),
        ("llama-differences", "bfloat16", True, 64),
        (LLAMA, "bfloat16", False, 2),
    ],
    ids=["qwen3-sums", "llama-differences", "llama-28M"],
)
def test_estimate_agrees_with_the_memory_that_pytorch_allocates(
    config, dtype, checkpointing, rows, monkeypatch, script
):
    monkeypatch.setitem(objective.LOGITS_AT_ONCE, "meta", objective.LOGITS_AT_ONCE["cpu"])  # estimates are for a GPU
    config = read_config(config) if isinstance(config, str) else config
    meta = measure.meta_agent(config, dtype=dtype, gradient_checkpointing=checkpointing)
    settings, sizes = hk.Config(), (rows, 12, 12)
    expected = {
        "rollout": sum(measure.sampling_bytes(meta, *sizes, prompts=1)),
        "score": measure.scoring_bytes(meta, *sizes, settings),
        "update": measure.update_bytes(meta, *sizes, settings),
    }
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    agent = hk.Agent(model, meta.tokenizer, name="real")
    some = (
        [[1 + i % 30, 1 + i // 30] * 6 for i in range(rows)],
        [[2] * 12] * rows,
    )  # different ones: equal ones cost one
    optimizer, kept = agent.prepare_update(settings), 0

    def update():
        logp, mask = agent.logprobs(*some)
        loss = (logp * mask).sum()
        loss.backward()
        del logp, loss
        optimizer.collect()
        torch.nn.utils.clip_grad_norm_(optimizer.masters, 1.0)
        optimizer.step()

    update()  # makes the moments; its gradients stay, as after a first micro-batch
    kept = sum(master.grad.nbytes for master in optimizer.masters)
    how = {"temperature": 1.0, "max_new_tokens": 12, "seed": 0}
    measured = script("update_memory").allocated
    found = {
        "rollout": measured(lambda: agent.engine.sample(agent, some[0], **how)),
        "score": measured(torch.no_grad()(lambda: agent.logprobs(*some))),
        "update": kept + measured(update),
    }
    optimizer.zero_grad()
    assert measure.kept_bytes(meta, settings) == {
        p: offload.size(agent, p) for p in ("weights", "optimizer", "reference")
    }
    assert {phase: expected[phase] / found[phase] for phase in found} == pytest.approx(dict.fromkeys(found, 1), abs=0.3)


BIG = Qwen3Config(
    hidden_size=4096, intermediate_size=12288, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=150000, max_position_embeddings=8192,
)  # fmt: skip


def test_estimate_agrees_with_sizes_computed_by_hand():
    config = hk.Config(rollout_batch=10, n=10, max_new_tokens=96, microbatch_tokens=1280, minibatch=64)
    frame = (
        estimate({"big": BIG}, config, prompt_tokens=32, dtype="bfloat16", device_memory=80 * 2**30).to_frame() * 2**30
    )
    layer = 4096 * (32 + 8 + 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    count = 2 * layer + 2 * 150000 * 4096 + 4096
    assert frame["weights"].loc["big", "rollout"] == pytest.approx(2 * count, rel=1e-6)
    assert frame["optimizer"].loc["big", "update"] == pytest.approx(12 * count, rel=1e-6)  # a master and two moments
    # layers × (keys and values) × heads × size of a head × bytes, for every token but the last
    assert frame["cache"].loc["big", "rollout"] == pytest.approx(2 * 2 * 8 * 128 * 2 * 10 * 127, rel=1e-6)
    logits = 4 * 10 * 96 * 150000
    # logits in bfloat16, as the model gives them, and a part at a time in float32
    assert logits / 2 < frame["work"].loc["big", "score"] < logits
    assert frame["work"].loc["big", "update"] > 4 * count + 2 * count  # gradients in float32, and those of one pass


def test_estimate_with_offload_counts_one_agent():
    config, how = hk.Config(max_new_tokens=64), {"dtype": "bfloat16", "device_memory": 80 * 2**30}
    plain = estimate({"a": BIG, "b": BIG}, config, **how).to_frame()
    moved = estimate({"a": BIG, "b": BIG}, config, offload=True, **how).to_frame()
    assert (moved["others"] == 0).all()
    everything = plain.loc[("a", "update"), ["weights", "optimizer", "reference"]].sum()
    assert plain["others"].tolist() == pytest.approx([everything] * 8)
    assert (moved["optimizer"] > 0).tolist() == ([False] * 3 + [True]) * 2
    assert moved["work"].tolist() == plain["work"].tolist()


def test_estimate_with_vllm_counts_its_share_of_the_memory():
    config, how = hk.Config(max_new_tokens=64), {"dtype": "bfloat16", "device_memory": 80 * 2**30, "engine": "vllm"}
    plain = estimate({"a": BIG, "b": BIG}, config, **how).to_frame()
    moved = estimate({"a": BIG, "b": BIG}, config, offload=True, engine_options={"gpu_memory_utilization": 0.5}, **how)
    assert plain["cache"].tolist() == pytest.approx([0, 24, 24, 24] * 2)
    assert plain["others"].tolist() == pytest.approx(
        [plain.loc[("a", "update"), ["weights", "optimizer"]].sum() + 24] * 8
    )
    moved = moved.to_frame()
    assert moved["cache"].tolist() == pytest.approx([0, 40, 0, 0] * 2)
    assert moved.loc[("a", "rollout"), "total"] == pytest.approx(40)


@pytest.mark.slow
def test_estimate_advises_settings_for_each_phase_that_does_not_fit():
    pair = dict.fromkeys("ab", Qwen3Config(**{**BIG.to_dict(), "num_hidden_layers": 1, "layer_types": None}))
    config = hk.Config(max_new_tokens=1000, rollout_batch=256, microbatch_tokens=32768, minibatch=128, beta=0.01)
    options = {"prompt_tokens": 24, "dtype": "bfloat16", "device_memory": 48 * 2**30}
    found = estimate(pair, config, **options)
    assert not found.fits and len(found.advice) == sum(p.total > memory.usable(48 * 2**30) for p in found.phases)
    assert "does not fit in 48.0 GiB" in repr(found)
    line = next(line for line in found.advice if line.startswith("update of 'a'"))
    for remedy in ("offload=True", "microbatch_tokens below 32768", "gradient_checkpointing=True", "lora=True"):
        assert remedy in line
    assert "bfloat16" not in line
    update = {p.phase: p.total for p in found.phases}["update"]
    for config_changes, loading in (
        ({}, {"offload": True}),
        ({"microbatch_tokens": 4096}, {}),
        ({}, {"gradient_checkpointing": True}),
        ({}, {"lora": True}),
    ):
        smaller = estimate(pair, config.replace(**config_changes), **options, **loading)
        assert {p.phase: p.total for p in smaller.phases}["update"] < update


@pytest.mark.parametrize(
    ("device", "native", "advised"), [("cpu", False, False), ("cpu", True, True), ("cuda", False, True)]
)
def test_estimate_advises_bfloat16_only_where_it_is_native(monkeypatch, device, native, advised):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    found = estimate(["qwen3-sums"], device=device, device_memory=7 * 2**27)
    assert not found.fits and ["bfloat16" in line for line in found.advice] == [advised] * len(found.advice)


def test_load_agent_refuses_a_model_that_does_not_fit_unread(monkeypatch, qwen, tmp_path):
    folder = qwen.save(tmp_path / "big")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("read the weights"))
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**20)
    message = r"does not fit: its 0.00 billion parameters need 1 MiB in float32, and cpu has 1 MiB free. dtype='bfloat16' needs"
    with pytest.raises(MemoryError, match=message):
        hk.load_agent(folder, device="cpu")


# ── hacpo-kit doctor ─────────────────────────────────────────────────────────────────────────────────────────────


def test_doctor_reports_the_machine_and_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(main, ["doctor", "--out", str(tmp_path / "not" / "there")])
    assert done.exit_code == 0
    for word in (
        "torch",
        "transformers",
        "cpu ",
        "GiB free",
        "not installed: pip install 'hacpo_kit[vllm]'",
        "hacpo_kit[ray]",
    ):
        assert word in done.output
    assert str(tmp_path) in done.output and not (tmp_path / "not").exists()


def test_doctor_reports_whether_agents_fit():
    call = [
        "doctor",
        "tiny-model-pair",
        "-p",
        "max_new_tokens",
        "16",
        "-p",
        "prompts_per_step",
        "4",
        "--prompt-tokens",
        "16",
    ]
    done = CliRunner().invoke(main, [*call, "--device-memory", "1", "--json"])
    found = json.loads(done.output)["estimate"]
    assert done.exit_code == 0 and found["fits"] and found["parameters"]["qwen3-sums"] == 302112
    assert [(p["agent"], p["phase"]) for p in found["phases"]][:4] == [("qwen3-sums", p) for p in memory.PHASES]
    small = CliRunner().invoke(main, [*call, "--device-memory", "0.7"])
    assert small.exit_code == 1 and "It does not fit.\n- " in small.output
    wrong = CliRunner().invoke(main, ["doctor", "-p", "max_tokens", "16"])
    assert wrong.exit_code == 2 and "unknown setting 'max_tokens'" in wrong.output
