"""Shared fixtures: agents as good as new for every test, small problem sets, tokenizers that show one thing each."""

import copy
import importlib
import itertools
import os
import shutil
import sys
from functools import cache
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub's client is imported: no test asks a network
os.environ["OMP_NUM_THREADS"] = "1"  # as below, in the processes and kernels that tests start

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hacpo_kit as hk
from hacpo_kit.models.engines import transformers as engine
from hacpo_kit.models.engines.base import until_end

collect_ignore = ["models/simulated.py"]  # importing it, be it for doctests, changes torch for the whole process

torch.set_num_threads(1)  # sums in one order, so the same bits every time
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # others work here too
settings.load_profile("tests")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadfile` a file stays in one worker, as its tests share slow fixtures; the browser's files share a server."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # the mark xdist_group would say the same, but pytest 9.2 does not hear it
        def _split_scope(self, nodeid):
            return "tests/browser" if nodeid.startswith("tests/browser/") else super()._split_scope(nodeid)

    return Scheduling(config, log)


LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.5}  # large weights: positions must matter


@cache
def _loaded(name):
    return hk.load_agent(name, device="cpu")


@pytest.fixture(scope="session")
def script():
    """script("readme"): the module of a file in benchmarks/, which finds its neighbours there."""
    folder = str(Path(__file__).resolve().parent.parent / "benchmarks")
    sys.path.append(folder)
    yield importlib.import_module
    sys.path.remove(folder)


@pytest.fixture
def fresh_agent():
    """fresh_agent("qwen3-sums"): a built-in agent, read from its folder once and copied for every call."""
    return lambda name: copy.deepcopy(_loaded(name))


@pytest.fixture
def qwen(fresh_agent):
    """One token per byte, no BOS, two end tokens, tied embeddings."""
    return fresh_agent("qwen3-sums")


@pytest.fixture
def llama(fresh_agent):
    r"""`\boxed{` is one token, the tokenizer adds a BOS, embeddings are not tied."""
    return fresh_agent("llama-differences")


@pytest.fixture
def pair(qwen, llama):
    """Two agents with different tokenizers."""
    return [qwen, llama]


@pytest.fixture(scope="session")
def problems():
    """Training problems of the built-in family."""
    return hk.load_problems("arithmetic", split="train", size=40)


@pytest.fixture
def uneven():
    """Three problems whose prompts differ much in length."""
    return hk.load_problems(
        [
            {"prompt": "1+1=", "gold": "2"},
            {"prompt": "37+58=", "gold": "95"},
            {"prompt": "What is 90-75=", "gold": "15"},
        ]
    )


def byte_tokenizer(*, merges=(), specials=("<end>",), unnamed=(), prefix="", suffix="", **roles):
    """Byte-level BPE; `roles` as bos_token="<s>"; `unnamed` special tokens have no role; `prefix`, `suffix` are added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*alphabet, *dict.fromkeys("".join(m) for m in merges)]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(vocabulary)}, [tuple(m) for m in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*specials, *unnamed)])
    if prefix or suffix:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{prefix} $A {suffix}".strip(),
            special_tokens=[(t, tokenizer.token_to_id(t)) for t in (prefix, suffix) if t],
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"eos_token": "<end>", **roles})


def word_tokenizer(words, **roles):
    """Whole words only: whatever else is in a text becomes <unk>."""
    vocabulary = {w: i for i, w in enumerate([*words, "<unk>", "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", **roles)


@pytest.fixture
def tokenizers():
    """The makers of special tokenizers: tokenizers.bytes(...), tokenizers.words([...])."""

    class Makers:
        bytes = staticmethod(byte_tokenizer)
        words = staticmethod(word_tokenizer)

    return Makers


@pytest.fixture
def tiny_agent():
    """tiny_agent(tokenizer, …): a small Llama, or GPT-2 with its `absolute` positions, with random weights from `seed`.

    It reads `positions` tokens and has `extra` embeddings that are no token.
    """

    def make(tokenizer=None, *, name="tiny", positions=256, extra=0, seed=0, absolute=False, **options):
        tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
            size = {"vocab_size": len(tokenizer) + extra, "max_position_embeddings": positions, **ids}
            model = (
                GPT2LMHeadModel(GPT2Config(**GPT2, **size))
                if absolute
                else LlamaForCausalLM(LlamaConfig(**LLAMA, **size))
            )
        return hk.Agent(model, tokenizer, name=name, **options)

    return make


@pytest.fixture
def write(monkeypatch):
    """write(agent, answers): from now on the agent samples these token ids, over and over, up to the length limit."""
    scripts, sampled = {}, engine.sample

    def sample(agent, prompts, **settings):
        if agent.name not in scripts:
            return sampled(agent, prompts, **settings)
        rows = [next(scripts[agent.name])[: settings["max_new_tokens"]] for _ in prompts]
        return [until_end(list(row), agent.end_ids) for row in rows]

    monkeypatch.setattr(engine, "sample", sample)

    def script(agent, answers):
        scripts[agent.name] = itertools.cycle([list(a) for a in answers])

    return script


@pytest.fixture
def say(write):
    """say(agent, texts): as `write`, but texts in the agent's own tokens, each closed by its end token."""

    def script(agent, texts):
        encode = agent.tokenizer
        write(agent, [[*encode(t, add_special_tokens=False)["input_ids"], encode.eos_token_id] for t in texts])

    return script


@pytest.fixture
def reporting_engine():
    """reporting_engine(off): samples like transformers and reports log-probs that are `off` from the trainer's (nats)."""

    class Reporting:
        def __init__(self, off):
            self.off = np.float32(off)

        def sample(self, agent, prompts, **how):
            answers = engine.sample(agent, prompts, **how)
            with torch.no_grad():
                values, mask = agent.logprobs(prompts, [a.ids for a in answers], temperature=how["temperature"] or 1.0)
            rows = [row[real].numpy() for row, real in zip(values, mask, strict=True)]
            return [a._replace(logps=row + self.off) for a, row in zip(answers, rows, strict=True)]

    return Reporting


@pytest.fixture(scope="session")
def experience_of():
    """experience_of(ratio, own): recorded experience of learner "A" with peer "B"; `m` is the mini-batch of each rollout."""
    import pandas as pd

    from hacpo_kit.runs.experience import Experience

    def make(ratio, own, *, m=0, config=None, rewards=None, problems=None):
        count, own = len(ratio), np.array(own)
        columns = {
            "learner": "A", "source": np.where(own, "A", "B"), "problem": problems or ["p"] * count, "prompt": "1+1=",
            "gold": "2", "sample": np.arange(count), "text": [f"text {i}" for i in range(count)], "ended": True,
            "reward": np.arange(count) % 2 * 1.0 if rewards is None else np.array(rewards, float), "status": "wrong",
            "own": own, "minibatch": pd.array(np.broadcast_to(m, count), dtype="Int32"), "excluded": "",
            "source_mean_logp": np.float32(-0.5), "ratio": np.array(ratio, np.float32), "advantage": np.float32(0),
            "weight": np.float32(1), "clipped": False, "lower": 0.8,
        }  # fmt: skip
        capability = hk.Capability().with_step({"A": 0.5, "B": 0.25})
        return Experience(pd.DataFrame(columns), capability, config or hk.Config(), 1)

    return make


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
    """A run of six steps without a stop."""
    from trained import CONFIG, OPTIONS, agents, problems

    folder = tmp_path_factory.mktemp("runs") / "whole"
    return hk.train(agents(), problems("train", 50), CONFIG, 6, test=problems("test", 6), out=folder, **OPTIONS)


@pytest.fixture
def copied_run(whole_run, tmp_path):
    """A copy of the folder of `whole_run`."""
    return Path(shutil.copytree(whole_run.folder, tmp_path / "copied"))


@pytest.fixture(scope="session")
def changed_run(tmp_path_factory):
    """A run of six steps whose settings change after the second and the third."""
    from trained import CONFIG, agents, change_settings, problems

    options = {"eval_every": 2, "save_every": 4, "progress": "off", "callbacks": [change_settings]}
    folder = tmp_path_factory.mktemp("runs") / "changed"
    return hk.train(agents(), problems("train", 50), CONFIG, 6, out=folder, **options)
