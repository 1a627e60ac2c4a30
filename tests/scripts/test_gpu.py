"""benchmarks/gpu.py, with tiny shapes on the CPU: its figures, its FLOPs, and what it does where time or memory is short."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import hacpo_kit as hk

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def gpu(script):
    return script("gpu")


@pytest.fixture
def tiny(gpu):
    # the clock starts with the process, which here has run other tests
    since = time.time() - gpu.psutil.Process().create_time()
    return replace(
        gpu.CPU, budget=since + 200, matrix=64, steps=1, prompts_per_step=4, test=4, prompts=1, new_tokens=6,
        needs=dict.fromkeys(gpu.CPU.needs, 1.0),
    )  # fmt: skip


@pytest.fixture
def batch_of(gpu, tiny):
    def make(agent):
        pool = gpu.sampled(agent, tiny)
        return hk.advantage(pool, agent, hk.Capability().observe(pool), hk.Config.preset("gspo"))

    return make


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*were cut at")
def test_every_part_leaves_its_figures_in_the_file(gpu, tiny, tmp_path):
    report = gpu.measure(CPU, tiny, tmp_path / "gpu.json", small=True)
    assert json.loads((tmp_path / "gpu.json").read_text()) == json.loads(json.dumps(report))
    assert report["mode"].startswith("cpu") and report["matrix_rate_flops"] > 0
    assert set(report["skipped"]) <= {"vllm"}
    for name in gpu.SHAPES:
        part = report[name]
        assert part["rollouts"] == 8 and 8 <= part["sampled_tokens"] <= 8 * 6 < part["tokens"]
        assert part["rollout_tokens_per_second"] > 0 < part["scoring_tokens_per_second"]
        assert set(part["update"]) == {"plain", "gradient checkpointing", "offload"}
        recomputed, plain = (part["update"][how]["estimated_peak_bytes"] for how in ("gradient checkpointing", "plain"))
        assert 14 * part["parameters"] < recomputed <= plain and part["rollout_estimated_peak_bytes"] > 0
        for how in part["update"].values():
            assert how["tokens_per_second"] > 0 < how["share_of_matrix_rate"]
    # float32 on one device: the same seed learns the same
    assert report["learn"]["agents"] == report["learn_on_cpu"]["agents"]
    assert report["learn"]["gap_to_cpu"] == 0 <= report["learn"]["gap_padding"] < 1e-4


@pytest.mark.filterwarnings("ignore:.*were cut at")
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama3.2-1b"])
def test_model_flops_are_those_that_torch_counts(gpu, batch_of, name):
    agent = gpu.random_agent(name, CPU, small=True)
    agent.model.set_attn_implementation("eager")  # whose two products torch counts one by one
    batch = batch_of(agent).part([0])
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        agent.logprobs(batch.prompt_ids, batch.response_ids)
    config, t = agent.model.config, len(batch.prompt_ids[0]) + len(batch.response_ids[0])
    # not causal: all of T² is computed; and the head sees one token more, which is thrown away
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * t * t
    beyond = attention + 2 * agent.model.get_output_embeddings().weight.numel()
    assert counted.get_total_flops() == pytest.approx(gpu.forward_flops(agent.model, batch) + beyond, rel=1e-12)


def test_the_full_shapes_have_the_size_of_the_published_models(gpu):
    sizes = {}
    for name, (config, _) in gpu.SHAPES.items():
        with torch.device("meta"):
            model = gpu.AutoModelForCausalLM.from_config(config)
        sizes[name] = sum(p.numel() for p in model.parameters())
    assert sizes == {"qwen3-0.6b": 596_049_920, "llama3.2-1b": 1_235_814_400}


def test_a_part_without_time_is_skipped_and_one_that_takes_too_long_is_stopped(gpu):
    since = time.time() - gpu.psutil.Process().create_time()
    clock = gpu.Clock(since + 0.5)
    with clock.part("late", 60) as there_is_time:
        assert not there_is_time
    with clock.part("slow", 0.1) as there_is_time:
        assert there_is_time
        time.sleep(30)
    with clock.part("broken", -60) as there_is_time:
        raise RuntimeError("no kernel image\nand more")
    assert clock.skipped["late"].startswith("needs up to 60 s") and clock.skipped["slow"].startswith("stopped")
    assert clock.skipped["broken"] == "failed: RuntimeError: no kernel image"
    assert time.time() - gpu.psutil.Process().create_time() - since < 10


@pytest.mark.filterwarnings("ignore:.*were cut at")
def test_without_enough_memory_a_pass_becomes_smaller(gpu, batch_of, monkeypatch):
    agent = gpu.random_agent("qwen3-0.6b", CPU, small=True)
    batch, update = batch_of(agent), hk.update

    def short(agent, batch, config):
        if config.microbatch_tokens > 1024:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return update(agent, batch, config)

    monkeypatch.setattr(hk, "update", short)
    config = hk.Config.preset("gspo", microbatch_tokens=4096)
    out = gpu.measured_update(agent, batch, config, flops=1e6, tokens=100, rate=1e9)
    assert out["microbatch_tokens"] == 1024 and agent.updates == 1


def test_without_a_gpu_it_says_so(gpu, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "--cpu" in capsys.readouterr().err
