"""An agent: one model, its tokenizer, its optimiser and the engine that samples from it."""

from __future__ import annotations

import contextlib
import copy
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hacpo_kit.config import Config
from hacpo_kit.models.base import BaseAgent, WorkerLost, check_tokenizer
from hacpo_kit.models.engines import transformers as transformers_engine
from hacpo_kit.models.lora import has_adapter, merged_model
from hacpo_kit.models.offload import Offload
from hacpo_kit.models.optimizers import MasterAdamW
from hacpo_kit.models.passes import align
from hacpo_kit.models.sources import without_progress_bars
from hacpo_kit.models.templates import end_of_turn, stop_strings, with_date
from hacpo_kit.objective import token_logprobs


@dataclass(frozen=True)
class LocalCall:
    """A call that runs in this process when its result is requested."""

    result: Callable[[], Any]


class Agent(BaseAgent):
    """A language model that samples responses, is scored and is updated. Pools, batches and metrics refer to it by `name`.

    `updates` counts optimiser updates since loading, `steps` the calls of `update`. Together with the run's seed they
    determine every random choice and the learning rate.
    """

    engine = transformers_engine

    def __init__(
        self,
        model,
        tokenizer,
        *,
        name: str,
        prompt_format: str = "auto",
        template: Mapping[str, Any] | None = None,
        engine=None,
        offload: str | torch.device | None = None,
        stop: str | Sequence[str] | None = None,
    ):
        """Wrap a causal language model and its tokenizer.

        `prompt_format`: "chat" uses the tokenizer's chat template with the keywords in `template`, such as
        {"enable_thinking": False}; "plain" uses the text as it is; "auto" uses the chat template if there is one.
        `engine` samples instead of transformers (see `hacpo_kit.models.engines.base`). `offload`: the device for
        computation; parts of the agent that are not in use stay in host memory. `stop`: strings that end a response, as end
        tokens do; for base models, which may never sample an end token.

        Raises ValueError for a tokenizer without an end token, and for "chat" without a template.
        """
        check_tokenizer(tokenizer, name, prompt_format)
        self.name, self.model, self.tokenizer = name, model.eval(), tokenizer
        self.chat = prompt_format == "chat" or (prompt_format == "auto" and bool(tokenizer.chat_template))
        self.template = with_date(tokenizer, template or {}) if self.chat else dict(template or {})
        self.stop = stop_strings(stop)
        if engine is not None:
            self.engine = engine
        self.optimizer: MasterAdamW | None = None
        self.reference = None  # frozen copy of the initial policy, created by the first update with beta > 0
        self.offload = None if offload is None else Offload(offload)
        self._stored_generation_config = model.generation_config
        # the end tokens of the stored generation settings (Qwen3 has two), then the tokenizer's
        stored = getattr(model.generation_config, "eos_token_id", None)
        ends = [*(stored if isinstance(stored, list | tuple) else [stored]), tokenizer.eos_token_id]
        ends = [i for i in ends if i is not None]
        self.end_ids = set(ends)
        self.end_id = end_of_turn(tokenizer, self.template if self.chat else None, ends)
        # the checkpoint's own sampling defaults would fill every field that a call leaves open
        model.generation_config = transformers_engine.neutral_generation_config(self)

    @property
    def description(self) -> str:
        """Model class and sizes."""
        size = sum(p.numel() for p in self.model.parameters())
        return f"{type(self.model).__name__}, {size:,} parameters, {len(self.tokenizer):,} tokens"

    @property
    def device(self) -> torch.device:
        """The device for computation; with `offload` the weights may be in host memory."""
        return self.model.device if self.offload is None else self.offload.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the model."""
        return self.model.dtype

    @property
    def half_precision(self) -> bool:
        """Whether the model computes in bfloat16 or float16."""
        return self.dtype in (torch.bfloat16, torch.float16)

    @property
    def max_length(self) -> int:
        """The longest prompt and response together that the model accepts (tokens)."""
        return getattr(self.model.config, "max_position_embeddings", None) or self.tokenizer.model_max_length

    def submit(self, function: Callable, *args: Any, bar=None, **settings: Any) -> LocalCall:
        """Return a call of `function(agent, …)` whose `result()` runs it; the function gets `bar`, if there is one."""
        settings |= {} if bar is None else {"bar": bar}
        return LocalCall(partial(function, self, *args, **settings))

    def on_device(self, *parts: str) -> contextlib.AbstractContextManager:
        """Keep parts on the device inside the block if the agent was loaded with `offload`; otherwise they always are.

        Parts: "weights", "optimizer", "reference" and "engine", which stands for what sampling needs. Blocks can be
        nested; a part returns to host memory at the end of the outermost block that uses it, also after an error.
        """
        if self.offload is None:
            return contextlib.nullcontext()
        own_copy = hasattr(self.engine, "sleep")  # an engine with its own weights; others sample from the agent's
        parts = tuple("weights" if part == "engine" and not own_copy else part for part in parts)
        return self.offload.on_device(self, *parts)

    def transfer_costs(self) -> dict[str, float]:
        """Return what offloading has cost since the last call: bytes_moved and seconds_moving."""
        return {} if self.offload is None else self.offload.transfer_costs()

    # ── log-probabilities ────────────────────────────────────────────────────────────────────────────────────────

    def logprobs(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        model=None,
    ) -> tuple[Float[Tensor, "rollout token"], Bool[Tensor, "rollout token"]]:
        """Return the log-probability of every response token (nats) and the mask of real tokens.

        Log-softmax of logits / temperature in float32, differentiable. Sources and learners are scored by this function
        alone. `model` defaults to the agent's own. Equal rows are computed once.

        Raises RuntimeError while the weights are in host memory.
        """
        if self.offload is not None and not self.offload.users["weights"]:
            raise RuntimeError(
                f"the weights of agent {self.name!r} are in host memory: use `with agent.on_device('weights'):` around this "
                "call and around everything that uses its gradient"
            )
        model = self.model if model is None else model
        pairs = list(zip(map(tuple, prompts), map(tuple, responses), strict=True))
        row_of = {pair: row for row, pair in enumerate(dict.fromkeys(pairs))}
        ids, attention, mask = (t.to(self.device) for t in align(*zip(*row_of, strict=True), self.pad_id))
        width = mask.shape[1]
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        with _checkpointed_layers_training(model):
            logits = model(
                input_ids=ids,
                attention_mask=attention,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=width + 1,  # the last prompt token predicts the first response token
            ).logits
        # the last column predicts nothing; cutting its logits off first would copy all others
        following = torch.nn.functional.pad(ids[:, -width:], (0, 1))
        logp = token_logprobs(logits, following, temperature=temperature)[:, :-1]
        if len(row_of) < len(pairs):
            rows = torch.tensor([row_of[pair] for pair in pairs], device=self.device)
            logp, mask = logp[rows], mask[rows]
        return logp, mask

    @torch.no_grad()
    def reference_logprobs(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> Float[Tensor, "rollout token"]:
        """As `logprobs`, under the initial policy: the frozen copy, or the model without its adapters.

        Before the first update with beta > 0 there is no copy, and the model is its own reference.
        """
        without_adapter = self.model.disable_adapter() if has_adapter(self.model) else contextlib.nullcontext()
        with without_adapter:
            return self.logprobs(prompts, responses, temperature=temperature, model=self.reference)[0]

    # ── optimiser and files ──────────────────────────────────────────────────────────────────────────────────────

    def prepare_update(self, config: Config) -> MasterAdamW:
        """Return the optimiser with this config's settings and the learning rate of the next update (linear warm-up).

        Raises ValueError for a model in float16, and for beta > 0 after updates with beta = 0.
        """
        if self.model.dtype == torch.float16:
            raise ValueError(
                f"agent {self.name!r} computes in float16, where small gradients become zero; load it with dtype='bfloat16'"
            )
        if self.optimizer is None:
            self.optimizer = MasterAdamW(self.model.parameters())
        # lr(t) = lr · min(1, (t + 1) / warmup), where t counts steps, not updates: all methods warm up equally fast
        lr = config.lr * min(1.0, (self.steps + 1) / max(1, config.warmup))
        for group in self.optimizer.param_groups:
            group.update(
                lr=lr, betas=(config.beta1, config.beta2), eps=config.adam_eps, weight_decay=config.weight_decay
            )
        if config.beta > 0 and self.reference is None and not has_adapter(self.model):
            if self.updates:
                raise ValueError(
                    f"agent {self.name!r} has made {self.updates} updates with beta=0; the KL needs its initial policy: "
                    "set beta before the first update"
                )
            self.reference = copy.deepcopy(self.model).requires_grad_(False)
        return self.optimizer

    def save(self, folder: str | Path) -> Path:
        """Write a Hugging Face folder (safetensors, tokenizer, stored generation settings), with adapters merged."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary, without_progress_bars():
            merged_model(self.model).save_pretrained(temporary)
            # save_pretrained refuses generation settings that many checkpoints have (a temperature without do_sample)
            self._stored_generation_config.to_json_file(Path(temporary) / "generation_config.json")
            self.tokenizer.save_pretrained(temporary)
            for file in Path(temporary).iterdir():  # renamed when complete: a reader never sees half a file
                file.replace(folder / file.name)
        return folder


@contextlib.contextmanager
def _checkpointed_layers_training(model) -> Iterator[None]:
    """Set layers with gradient checkpointing to training mode for one pass with gradients, but not the modules in them.

    transformers recomputes layers only in training mode; in the modules it would also enable dropout.
    """
    layers = []
    if torch.is_grad_enabled():
        layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


# ── several agents ───────────────────────────────────────────────────────────────────────────────────────────────


def as_list(agents: BaseAgent | Sequence[BaseAgent]) -> list[BaseAgent]:
    """Return one agent or several as a list. Raises TypeError for names, which have to be loaded first."""
    agents = [agents] if isinstance(agents, BaseAgent | str) else list(agents)
    for agent in agents:
        if not isinstance(agent, BaseAgent):
            raise TypeError(f"need agents, got {agent!r}: load them first with hk.load_agents({agent!r})")
    return agents


def run_on_each(agents: Sequence[BaseAgent], function: Callable, *args: Any, bar=None, **settings: Any) -> list[Any]:
    """Return `function(agent, …)` of every agent, in their order. Agents in workers run it there, in parallel.

    After an error, agents that have not started are skipped and workers are waited for; a lost worker is raised first.
    `bar`: a progress bar, which advances inside the function, or, for a worker, when the agent is done.
    """
    calls = [agent.submit(function, *args, bar=bar, **settings) for agent in agents]
    values, errors = [], []
    for count, call in enumerate(calls, start=1):
        if errors and isinstance(call, LocalCall):
            continue
        try:
            values.append(call.result())
        except Exception as error:
            errors.append(error)
        if bar is not None:
            bar.update(max(0, bar.total * count // len(calls) - bar.n))
    if errors:
        raise next((e for e in errors if isinstance(e, WorkerLost)), errors[0])
    return values


def check_names(agents: Sequence[BaseAgent]) -> None:
    """Raise ValueError unless the agents' names are different and can be names of folders."""
    for agent in agents:
        if not re.fullmatch(r"[^\W_][\w .+#@=()-]{0,99}", agent.name) or agent.name.endswith((".", " ")):
            raise ValueError(
                f"agent name {agent.name!r} becomes a folder: use up to 100 letters, digits and . _ + - # @ = ( ); "
                "give name= when loading"
            )
    names = [a.name.casefold() for a in agents]
    if len(set(names)) < len(names):
        raise ValueError(f"agents need different names, also ignoring case: {[a.name for a in agents]}")
