"""Memory: what a run will need, known before anything is loaded, and what to do where it did not suffice."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import psutil
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent
from hacpo_kit.models.lora import add_adapter
from hacpo_kit.models.offload import size
from hacpo_kit.models.sources import built_in_sets, read_config

if TYPE_CHECKING:
    import pandas as pd

# ── what will be needed ──────────────────────────────────────────────────────────────────────────────────────────

PHASES = ("load", "rollout", "score", "update")
RESERVE = 0.6 * 2**30  # bytes of a CUDA context and the workspaces of its libraries
MARGIN = 0.9  # of the device's memory; the rest is lost between tensors


@dataclass(frozen=True)
class Phase:
    """Most bytes on the device at once while one agent is in one phase."""

    agent: str
    phase: str  # one of PHASES
    weights: int = 0
    optimizer: int = 0  # moments, and float32 masters of half-precision weights
    reference: int = 0  # the frozen copy for the KL
    cache: int = 0  # keys and values of the answers that are being sampled; with vLLM all that its engine takes
    work: int = 0  # gradients, activations, logits
    others: int = 0  # what the other agents keep there

    @property
    def total(self) -> int:
        """All of it (bytes)."""
        return sum(getattr(self, part) for part in PARTS)


PARTS = tuple(f.name for f in fields(Phase) if f.name not in ("agent", "phase"))


@dataclass(frozen=True, repr=False)
class Estimate:
    """What each agent needs in each phase, whether that fits, and what to change if not."""

    phases: tuple[Phase, ...]
    parameters: Mapping[str, int]
    kept: Mapping[
        str, int
    ]  # bytes of weights, optimiser and reference: what rests on the host, and what a checkpoint holds
    offload: bool
    device_memory: int | None  # bytes; None: not known
    advice: tuple[str, ...]

    def __repr__(self) -> str:
        worst = max(self.phases, key=lambda p: p.total)
        fits = "fits" if self.fits else "does not fit"
        most = f"at most {format_bytes(worst.total)}, {worst.phase} of {worst.agent!r}"
        return f"Estimate({fits} in {format_bytes(self.device_memory)}: {most})"

    @property
    def fits(self) -> bool:
        """Whether every phase fits with some room to spare."""
        return all(p.total <= usable(self.device_memory) for p in self.phases)

    def to_frame(self) -> pd.DataFrame:
        """One row an agent and phase: the parts and their total in GiB, and whether it fits."""
        import pandas as pd

        rows = [
            {"agent": p.agent, "phase": p.phase, **{part: getattr(p, part) / 2**30 for part in (*PARTS, "total")}}
            | {"fits": p.total <= usable(self.device_memory)}
            for p in self.phases
        ]
        return pd.DataFrame(rows).set_index(["agent", "phase"])


def format_bytes(size: float) -> str:
    """Bytes for people.

    >>> format_bytes(1.5 * 2**30), format_bytes(84 * 2**20)
    ('1.5 GiB', '84 MiB')
    """
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def usable(device_memory: float) -> float:
    """How much of a device's memory tensors can have (bytes)."""
    return MARGIN * device_memory - RESERVE


def memory_of(device: str | torch.device) -> int:
    """Bytes of a GPU, or of this machine for the CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def estimate(
    agents: str | Path | Agent | Sequence[str | Path | Agent] | Mapping[str, Any],
    config: Config | None = None,
    *,
    prompt_tokens: int = 256,
    offload: bool = False,
    engine: str = "transformers",
    engine_options: Mapping[str, Any] | None = None,
    device: str | None = None,
    device_memory: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **loading: Any,
) -> Estimate:
    """Device memory that agents need under a config, phase by phase, from their `config.json` alone.

    The toolkit's own passes run on PyTorch's meta device, where tensors have a shape and no contents, and the bytes that
    live at the same time are counted. Agents: names, sets, folders, hub ids, loaded agents, or by name transformers configs.
    Prompts have `prompt_tokens` tokens, answers all `max_new_tokens`. `loading`: dtype, lora, gradient_checkpointing and
    attention, as for `load_agent`. `device_memory` (bytes) defaults to the device's.

    Raises ValueError for a model that cannot be built, OSError for one that cannot be had, ModuleNotFoundError for `lora`
    without peft.
    """
    config = Config() if config is None else config
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    device_memory = memory_of(device) if device_memory is None else device_memory
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    shapes = {name: Shape.of(source, **options, **loading) for name, source in _named(agents).items()}
    # vLLM fills the share that it is given, with weights of its own and a cache
    share = (engine_options or {}).get("gpu_memory_utilization", 0.3) if engine == "vllm" else 0.0
    plan = _Plan(config, prompt_tokens, offload, shapes, engine=int(share * device_memory))
    phases = tuple(plan.phase(name, phase) for name in shapes for phase in PHASES)
    budget = usable(device_memory)
    advice = tuple(plan.advice(p, budget) for p in phases if p.total > budget)
    kept = {name: sum(shape.kept(config).values()) for name, shape in shapes.items()}
    parameters = {name: shape.parameters for name, shape in shapes.items()}
    return Estimate(phases, parameters, kept, offload, device_memory, advice)


def check_fits(where: str, dtype: torch.dtype, device: str | torch.device, **options: Any) -> None:
    """Raises MemoryError if a model's weights alone are more than what is free on a device; they are not read for that."""
    files = sum(p.stat().st_size for p in Path(where).glob("*.safetensors")) if Path(where).is_dir() else None
    free = free_memory(device)
    if files is not None and 4 * files < free:  # also if they get wider: a small model needs no second look
        return
    from transformers import AutoConfig

    options = {k: v for k, v in options.items() if v is not None}
    config = AutoConfig.from_pretrained(where, **options)
    count = Shape(config, dtype=dtype, trust_remote_code=options.get("trust_remote_code", False)).parameters
    if count * dtype.itemsize > free:
        half = "" if dtype.itemsize <= 2 else f"dtype='bfloat16' needs {format_bytes(2 * count)}; "
        raise MemoryError(
            f"{where} does not fit: its {count / 1e9:.2f} billion parameters are {format_bytes(count * dtype.itemsize)} in "
            f"{str(dtype).removeprefix('torch.')}, and {device} has {format_bytes(free)} free. {half}other agents can make "
            "room with offload=True; or take a smaller model. `hacpo-kit doctor` says what each phase of a run needs"
        )


def free_memory(device: str | torch.device) -> int:
    """Bytes that are free on a GPU, or in this machine's main memory."""
    device = torch.device(device)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def _named(agents) -> dict[str, Any]:
    """Agents and sources by the names that `load_agents` would give them."""
    if isinstance(agents, Mapping):
        return dict(agents)
    sets, out = built_in_sets(), {}
    given = [agents] if isinstance(agents, str | Path | Agent) else agents
    for source in (s for g in given for s in (sets[g]["agents"] if isinstance(g, str) and g in sets else [g])):
        name, count = source.name if isinstance(source, Agent) else Path(str(source)).name, 1
        while (numbered := name if count == 1 else f"{name}#{count}") in out:
            count += 1
        out[numbered] = source
    return out


@dataclass(frozen=True, eq=False)
class Shape:
    """All of a model but its numbers, and how it would be loaded."""

    config: Any  # transformers' config
    dtype: str = "float32"
    lora: Mapping[str, Any] | bool | None = None
    gradient_checkpointing: bool = False
    attention: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def of(cls, source, *, revision: str | None = None, trust_remote_code: bool = False, **loading: Any) -> Shape:
        """The shape of a built-in agent, a folder, a hub id, a transformers config, or an agent."""
        if isinstance(source, Agent):
            config = source.model.config
        elif isinstance(source, str | Path):
            config = read_config(source, revision=revision, trust_remote_code=trust_remote_code)
        else:
            config = source
        return cls(config, trust_remote_code=trust_remote_code, **loading)

    @cached_property
    def agent(self) -> Agent:
        """An agent on the meta device, whose tensors have no contents; its tokenizer is what passes ask of one."""
        from transformers import AutoModelForCausalLM

        kind = {} if self.attention is None else {"attn_implementation": self.attention}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(self.config),
                dtype=getattr(torch, str(self.dtype).removeprefix("torch.")),
                trust_remote_code=self.trust_remote_code,
                **kind,
            )
            if self.gradient_checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            if self.lora:
                model = add_adapter(model, {} if self.lora is True else self.lora, seed=0)
        return Agent(model, SimpleNamespace(eos_token_id=0, pad_token_id=0, chat_template=None), name="shape")

    @cached_property
    def parameters(self) -> int:
        """How many numbers the model has, tied ones counted once."""
        return sum(p.numel() for p in self.agent.model.parameters())

    def kept(self, config: Config) -> dict[str, int]:
        """Bytes that the agent keeps from step to step once it has learned: weights, optimiser, reference."""
        if self.agent.optimizer is None:
            for master in self.agent.prepare_update(config).masters:
                master.grad = torch.empty_like(master)
            self.agent.optimizer.step()
            self.agent.optimizer.zero_grad()
        return {part: size(self.agent, part) for part in ("weights", "optimizer", "reference")}

    def rollout(self, rows: int, prompt: int, answer: int, different: int) -> tuple[int, int]:
        """Bytes of keys and values at the end of `rows` answers to `different` prompts, and of all else in sampling them."""
        from transformers import DynamicCache

        model = self.agent.model
        ids = torch.zeros(rows, prompt + answer, dtype=torch.long, device="meta")
        last = {"logits_to_keep": 1}
        with torch.no_grad(), _without_contents():
            with Peak() as prompts:
                read = ids[:different, :prompt]
                model(read, attention_mask=torch.ones_like(read), use_cache=True, **last)
            cache = DynamicCache(config=model.config)
            model(ids[:, 1:], past_key_values=cache, use_cache=True, **last)
            held = list({id(t): t for layer in cache.layers for t in (layer.keys, layer.values)}.values())
            kept = sum(t.nbytes for t in held)
            with Peak(held) as answers:
                del held
                model(ids[:, :1], attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True, **last)
        # after the pass: logits in float32 (in half precision a copy of them), the noise, and what their sum takes
        scores = (3 + self.agent.half_precision) * 4 * rows * model.config.get_text_config().vocab_size
        return kept, max(prompts.most, answers.most, kept + scores) - kept

    def score(self, rows: int, prompt: int, answer: int, config: Config) -> int:
        """Bytes alive while the log-probabilities of `rows` answers are computed."""
        with torch.no_grad(), _without_contents(), Peak() as peak:
            self.agent.logprobs(*_different(rows, prompt, answer), temperature=config.temperature)
        return peak.most

    def update(self, rows: int, prompt: int, answer: int, config: Config) -> int:
        """Bytes of gradients, activations and logits in an update, and of what the optimiser's step needs."""
        agent, some = self.agent, _different(rows, prompt, answer)
        self.kept(config)
        optimizer = agent.prepare_update(config)
        with _without_contents(), Peak() as peak:
            for master in optimizer.masters:  # as after a first micro-batch
                master.grad = torch.empty_like(master)
            logp, mask = agent.logprobs(*some, temperature=config.temperature)
            loss = (logp * mask).sum()
            if config.beta > 0:
                loss = loss + (agent.reference_logprobs(*some, temperature=config.temperature) - logp).exp().sum()
            loss.backward()
            del logp, loss
            optimizer.collect()
            torch.nn.utils.clip_grad_norm_(optimizer.masters, config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        return peak.most


def _different(rows: int, prompt: int, answer: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and answers of these lengths, no two equal, since equal ones would be computed once."""
    return [[row] * prompt for row in range(rows)], [[0] * answer] * rows


@dataclass(frozen=True)
class _Plan:
    """A config's phases for some agents on one device; `measured` keeps what a pass was found to need."""

    config: Config
    prompt: int
    offload: bool
    shapes: Mapping[str, Shape]
    measured: dict = field(default_factory=dict)
    engine: int = 0  # bytes that each agent's engine takes

    def rows(self, phase: str) -> int:
        """Rollouts in one pass."""
        c = self.config
        sampled = c.prompts_per_step * c.rollouts_per_prompt
        fitting = max(1, c.microbatch_tokens // (self.prompt + c.max_new_tokens))
        return min({"rollout": c.rollout_batch, "score": fitting, "update": min(fitting, c.minibatch)}[phase], sampled)

    def pass_(self, name: str, phase: str) -> dict[str, int]:
        """Bytes that a pass needs besides what the agent keeps."""
        shape, config = self.shapes[name], self.config
        sizes = (self.rows(phase), self.prompt, config.max_new_tokens)
        # all that makes a difference
        key = (
            name,
            phase,
            sizes,
            config.rollouts_per_prompt,
            str(shape.dtype),
            repr(shape.lora),
            shape.gradient_checkpointing,
        )
        if key not in self.measured:
            if phase == "rollout":
                different = -(-sizes[0] // config.rollouts_per_prompt)
                cache, work = shape.rollout(*sizes, different)
                self.measured[key] = {"cache": cache, "work": work}
            elif phase == "score":
                self.measured[key] = {"work": shape.score(*sizes, config)}
            else:
                self.measured[key] = {"work": shape.update(*sizes, config)}
        return self.measured[key]

    def phase(self, name: str, phase: str) -> Phase:
        """One agent in one phase; without offload it and the others keep all that they have."""
        kept = self.shapes[name].kept(self.config)
        others = sum(sum(s.kept(self.config).values()) + self.engine for n, s in self.shapes.items() if n != name)
        if phase == "load" or (self.offload and phase != "update"):
            kept = {"weights": kept["weights"]}
        if phase == "rollout" and self.engine:
            kept = {} if self.offload else kept  # the engine has weights of its own
            needed = {"cache": self.engine}
        else:
            needed = {} if phase == "load" else self.pass_(name, phase)
            needed |= {"cache": self.engine} if self.engine and phase != "load" and not self.offload else {}
        return Phase(name, phase, **kept, **needed, others=0 if self.offload else others)

    def changed(self, changes: Mapping[str, Any]) -> _Plan:
        """The plan with other settings, of the config or of how agents are loaded."""
        settings = {k: v for k, v in changes.items() if k in Config.model_fields}
        loading = {k: v for k, v in changes.items() if k in Shape.__dataclass_fields__ and k not in settings}
        shapes = {n: replace(s, **loading) for n, s in self.shapes.items()} if loading else self.shapes
        offload = changes.get("offload", self.offload)
        return replace(self, config=self.config.replace(**settings), shapes=shapes, offload=offload)

    def advice(self, at: Phase, budget: float) -> str:
        """The fewest changes, gentle ones first, with which a phase fits."""
        changes: dict[str, Any] = {}
        for name in ("offload", "dtype", *STEPS[at.phase]):
            plan = self.changed(changes)
            if plan.phase(at.agent, at.phase).total <= budget:
                break
            value = plan.proposed(name, at, budget)
            changes |= {} if value is None else {name: value}
        total = lambda some: self.changed(some).phase(at.agent, at.phase).total  # noqa: E731
        for name in list(changes):  # what later ones have made needless
            fewer = {k: v for k, v in changes.items() if k != name}
            if total(fewer) <= budget:
                changes = fewer
        told = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        where = f"{at.phase} of {at.agent!r} needs {format_bytes(at.total)} of {format_bytes(budget)}"
        if (needed := total(changes)) <= budget:
            return f"{where}: set {told}, and it needs {format_bytes(needed)}"
        tried = f", and with {told} still {format_bytes(needed)}" if told else ""
        return f"{where}{tried}: take a smaller model, a smaller max_new_tokens, or a larger device"

    def proposed(self, name: str, at: Phase, budget: float) -> Any:
        """A value for one setting that makes a phase smaller; None where there is none."""
        shape = self.shapes[at.agent]
        if name == "offload":
            return None if self.offload else True
        if name == "dtype":
            return "bfloat16" if str(shape.dtype).removeprefix("torch.") in ("float32", "float64") else None
        if name == "gradient_checkpointing":
            return None if shape.gradient_checkpointing else True
        if name == "lora":
            return None if shape.lora or importlib.util.find_spec("peft") is None else True
        # rows in a pass: bytes are linear in them
        rows, width = self.rows(at.phase), 1 if name == "rollout_batch" else self.prompt + self.config.max_new_tokens
        if rows == 1:
            return None
        least = self.changed({name: width}).phase(at.agent, at.phase).total
        each = (self.phase(at.agent, at.phase).total - least) / (rows - 1)
        if each <= 0:  # an engine that takes its share whatever it is asked
            return None
        return width * max(1, int(1 + (budget - least) / each))


# what makes a phase smaller, gentle changes first
STEPS = {
    "load": (),
    "rollout": ("rollout_batch",),
    "score": ("microbatch_tokens",),
    "update": ("microbatch_tokens", "gradient_checkpointing", "lora"),
}


class Peak(TorchDispatchMode):
    """Follows every tensor made in a block from its making to its end; `most` is the most bytes alive at once."""

    def __init__(self, tensors: Iterable[Tensor] = ()):
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.most = 0
        for tensor in tensors:
            self._follow(tensor)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):  # what was there before the block, such as weights, counts nothing
            if isinstance(tensor, Tensor):
                self._follow(tensor, counted=False)
        out = function(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor)
        if function is torch.ops.aten.logsumexp.default:  # exp(x − max) inside it
            self.most = max(self.most, self.now + args[0].nbytes)
        return out

    def _follow(self, tensor: Tensor, counted: bool = True) -> None:
        storage = tensor.untyped_storage()  # views share it
        if storage._cdata not in self.alive:
            self.alive[storage._cdata] = storage.nbytes() if counted else 0
            self.now += self.alive[storage._cdata]
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._end, storage._cdata)

    def _end(self, storage: int) -> None:
        self.now -= self.alive.pop(storage)


@contextlib.contextmanager
def _without_contents() -> Iterator[None]:
    """Answers what code asks of contents that meta tensors do not have, and attends as the fused kernels do."""
    kernels = torch.nn.functional.scaled_dot_product_attention

    def attend(query, key, value, attn_mask=None, **how):
        if query.is_meta:
            return _Attention.apply(query, key, value, attn_mask)
        return kernels(query, key, value, attn_mask, **how)

    # not in the mode below: no mode is active inside backward(), where layers may be computed again
    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend), _Untold():
        yield


class _Untold(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.__bool__ and args[0].is_meta:
            return False  # no mask is all ones: prompts and answers differ in length
        return function(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    """What fused attention keeps: its inputs, its output and one number a query, but no score of a pair of tokens."""

    @staticmethod
    def forward(ctx, query, key, value, mask):
        out = query.new_empty(query.shape)
        bias = mask.to(query.dtype) if mask is not None and mask.dtype == torch.bool else mask
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32), bias)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return *(torch.empty_like(t) for t in ctx.saved_tensors[:3]), None
