"""An agent: one model, its tokenizer, its optimiser and the engine it samples with."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hacpo_kit.common.seeds import derive_seed
from hacpo_kit.config import Config, did_you_mean
from hacpo_kit.models.engines import ENGINES
from hacpo_kit.models.engines import transformers as transformers_engine
from hacpo_kit.models.hub import hub_options
from hacpo_kit.models.lora import add_adapter, check_extra, has_adapter, merged_state
from hacpo_kit.models.memory import check_fits
from hacpo_kit.models.offload import Offload
from hacpo_kit.models.optimizers import MasterAdamW
from hacpo_kit.objective import token_logprobs

if TYPE_CHECKING:
    from hacpo_kit.tasks.problems import Problem


class Agent:
    """A language model that answers, is scored and is updated; `name` is how pools, batches and metrics refer to it.

    `updates` counts optimiser updates since loading, `steps` the calls of `update`; with the run's seed they fix every
    random choice and the learning rate.
    """

    engine = transformers_engine  # how it samples, unless another engine is given
    remote = False  # whether the model is in a worker (`hacpo_kit.models.remote`)

    def __init__(
        self,
        model,
        tokenizer,
        *,
        name: str,
        prompt_format: str = "auto",
        template: Mapping[str, Any] | None = None,
        origin: str | None = None,
        loading: Mapping[str, Any] | None = None,
        engine=None,
        offload: str | torch.device | None = None,
    ):
        """Wraps a causal language model and its tokenizer.

        `origin` and `loading` say where the model came from and with which options of `load_agent`, so that a run can
        load it again. `engine` samples in place of transformers (see `hacpo_kit.models.engines`). `offload`: the device
        to compute on, to which only those parts come that are at work; the others rest in host memory.

        `prompt_format`: "chat" uses the tokenizer's chat template (with the keywords in `template`, for example
        enable_thinking=False), "plain" gives the text as it is, "auto" takes chat if there is a template.

        Raises ValueError for a tokenizer without an end token, or "chat" without a template.
        """
        check_tokenizer(tokenizer, name, prompt_format)
        self.name, self.model, self.tokenizer, self.origin = name, model.eval(), tokenizer, origin
        self.chat = prompt_format == "chat" or (prompt_format == "auto" and bool(tokenizer.chat_template))
        self.template = dict(template or {})
        self.loading = dict(loading or {})
        if engine is not None:
            self.engine = engine
        self.updates = self.steps = 0
        self.weights_version = 0  # grows with every change of the weights: an engine with a copy knows that it is old
        self.optimizer: MasterAdamW | None = None
        self.reference = None  # frozen copy of the initial policy, made by the first update with beta > 0
        self.offload = None if offload is None else Offload(offload)
        self._stored_generation_config = model.generation_config
        # generate() fills every unset field from the model's stored sampling defaults; a neutral one has none to leak
        model.generation_config = transformers_engine.neutral_generation_config(self)

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.model.parameters())
        kind = type(self.model).__name__
        return (
            f"Agent({self.name!r}: {kind}, {size:,} parameters, {len(self.tokenizer):,} tokens, {self.updates} updates)"
        )

    @property
    def device(self) -> torch.device:
        """Where the agent computes; its weights may rest elsewhere."""
        return self.model.device if self.offload is None else self.offload.device

    def awake(self, *parts: str) -> contextlib.AbstractContextManager:
        """Holds parts on the device while a block runs, if the agent was loaded with `offload`; else they always lie there.

        Parts: "weights", "optimizer", "reference" and "engine", which stands for what sampling needs. Blocks may be nested:
        the outermost one that uses a part sends it back to the host, also when it ends with an error.
        """
        if self.offload is None:
            return contextlib.nullcontext()
        own = hasattr(self.engine, "sleep")  # an engine with a copy of the weights; others sample with the agent's
        return self.offload.awake(self, *("weights" if part == "engine" and not own else part for part in parts))

    def moved(self) -> dict[str, float]:
        """What the moves between device and host have cost since the last call (bytes_moved, seconds_moving)."""
        return {} if self.offload is None else self.offload.spent()

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self.model.dtype

    @property
    def half(self) -> bool:
        """Whether the model computes in half precision."""
        return self.dtype in (torch.bfloat16, torch.float16)

    @property
    def max_length(self) -> int:
        """Longest prompt and answer together that the model can read (tokens)."""
        return getattr(self.model.config, "max_position_embeddings", None) or self.tokenizer.model_max_length

    @property
    def end_ids(self) -> set[int]:
        """Every token that ends an answer: the tokenizer's and those of the stored generation settings (Qwen3 has two)."""
        stored = getattr(self._stored_generation_config, "eos_token_id", None)
        return {self.tokenizer.eos_token_id, *(stored if isinstance(stored, list | tuple) else [stored])} - {None}

    @property
    def control_ids(self) -> set[int]:
        """Every token that steers instead of standing for text, also special ones that have no role (<|start_header_id|>)."""
        added = self.tokenizer.added_tokens_decoder
        return {*self.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}

    @property
    def pad_id(self) -> int:
        """The token that fills up rows; never read, since masks come from lengths."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id

    # ── text and tokens ──────────────────────────────────────────────────────────────────────────────────────────

    def encode_prompt(self, prompt: str | Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of a prompt, text or chat messages, with exactly one BOS if the model uses one.

        Raises ValueError for chat messages without a chat template, and for a prompt of no tokens.
        """
        if isinstance(prompt, str) and not self.chat:
            ids = self._plain(prompt)
        else:
            ids = self._from_template(
                [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            )
        if not ids:
            raise ValueError(f"a prompt of agent {self.name!r} has no tokens: {prompt!r}")
        return tuple(ids)

    def _plain(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
        if ids and ids[-1] == self.tokenizer.eos_token_id and not text.endswith(self.tokenizer.eos_token):
            ids = ids[:-1]  # some tokenizers close every text; an answer is still to come
        return self._one_bos(ids)

    def _from_template(self, messages: list[Mapping[str, str]]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"agent {self.name!r} has no chat template, but the prompt is a list of messages; "
                "give prompts as text, or set tokenizer.chat_template"
            )
        # as text first: apply_chat_template(tokenize=True) returns a list, a mapping or a tensor, by version
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **self.template)
        bos = self.tokenizer.bos_token_id
        # a tokenizer that opens every text with BOS was trained so, whether or not the template writes it too
        opening = [bos] if bos is not None and self.tokenizer("a")["input_ids"][:1] == [bos] else []
        return self._one_bos([*opening, *self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]])

    def _one_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            ids = ids[1:]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an answer as the model wrote it: no clean-up of spaces, control tokens left visible."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def view(
        self, problem: Problem, text: str, *, ended: bool, prompt: tuple[int, ...] = ()
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | str:
        """A peer answer in this agent's tokens (prompt, response), or the reason why it cannot be used.

        `prompt` has the prompt's tokens where they are known: a template takes longer than the answer's own tokens.

        Reasons: "lossy_reencoding" (the tokens do not give the text back), "control_token" (the text would become one
        here), "empty" (no token to score), "too_long" (prompt and answer do not fit; never cut).
        """
        prompt = prompt or self.encode_prompt(problem.prompt)
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if self.decode(ids) != text:
            return "lossy_reencoding"
        if self.control_ids.intersection(ids):
            return "control_token"
        ids = [*ids, self.tokenizer.eos_token_id] if ended else ids
        if not ids:
            return "empty"
        return "too_long" if len(prompt) + len(ids) > self.max_length else (prompt, tuple(ids))

    # ── log-probabilities ────────────────────────────────────────────────────────────────────────────────────────

    def logprobs(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        model=None,
    ) -> tuple[Float[Tensor, "rollout token"], Bool[Tensor, "rollout token"]]:
        """Log-probability of every response token, log-softmax of logits / T in float32 (nats), and the mask of real tokens.

        Differentiable; the one scoring function for sources and learners. `model` defaults to the agent's own. What is there
        several times is computed once.
        Raises RuntimeError while the weights rest in host memory.
        """
        if self.offload is not None and not self.offload.users["weights"]:
            raise RuntimeError(
                f"the weights of agent {self.name!r} rest in host memory: with agent.awake('weights'): …, around all that "
                "uses the result's gradient"
            )
        model = self.model if model is None else model
        pairs = list(zip(map(tuple, prompts), map(tuple, responses), strict=True))
        place = {pair: row for row, pair in enumerate(dict.fromkeys(pairs))}
        ids, attention, mask = (t.to(self.device) for t in align(*zip(*place, strict=True), self.pad_id))
        width = mask.shape[1]
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        with self._recomputing(model):
            logits = model(
                input_ids=ids,
                attention_mask=attention,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=width + 1,  # the last prompt token predicts the first response token
            ).logits
        # what follows the last token is nobody's business; to cut its logits off would copy all others
        following = torch.nn.functional.pad(ids[:, -width:], (0, 1))
        logp = token_logprobs(logits, following, temperature=temperature)[:, :-1]
        if len(place) < len(pairs):
            rows = torch.tensor([place[pair] for pair in pairs], device=self.device)
            logp, mask = logp[rows], mask[rows]
        return logp, mask

    # ── optimiser ────────────────────────────────────────────────────────────────────────────────────────────────

    def prepare_update(self, config: Config) -> MasterAdamW:
        """The optimiser with this config's settings and the learning rate of the next update (linear warm-up).

        Raises ValueError for a model in float16, and for beta > 0 after updates without it.
        """
        if self.model.dtype == torch.float16:
            raise ValueError(
                f"agent {self.name!r} computes in float16, where small gradients become zero; load it with dtype='bfloat16'"
            )
        if self.optimizer is None:
            self.optimizer = MasterAdamW(self.model.parameters())
        # lr(t) = lr · min(1, (t + 1) / warmup), t whole steps: methods that make more updates a step do not warm up sooner
        lr = config.lr * min(1.0, (self.steps + 1) / max(1, config.warmup))
        for group in self.optimizer.param_groups:
            group.update(
                lr=lr, betas=(config.beta1, config.beta2), eps=config.adam_eps, weight_decay=config.weight_decay
            )
        if config.beta > 0 and self.reference is None and not has_adapter(self.model):
            if self.updates:
                raise ValueError(
                    f"agent {self.name!r} has made {self.updates} updates without beta; the KL needs its initial policy: "
                    "set beta from the first update on"
                )
            self.reference = copy.deepcopy(self.model).requires_grad_(False)
        return self.optimizer

    @torch.no_grad()
    def reference_logprobs(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> Float[Tensor, "rollout token"]:
        """As `logprobs`, by the initial policy: the frozen copy, or the model without its adapters.

        Before the first update with beta > 0 there is no copy, and the model is its own reference.
        """
        base = self.model.disable_adapter() if has_adapter(self.model) else contextlib.nullcontext()
        with base:
            return self.logprobs(prompts, responses, temperature=temperature, model=self.reference)[0]

    @contextlib.contextmanager
    def _recomputing(self, model) -> Iterator[None]:
        """Gradient checkpointing for one pass with gradients: layers in training mode recompute, their parts stay in evaluation.

        transformers recomputes only in training mode, which would also switch dropout on.
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

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, folder: str | Path) -> Path:
        """Writes a plain Hugging Face folder (safetensors, tokenizer, the original generation settings), adapters merged in."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary, quiet():
            if has_adapter(self.model):
                self.model.get_base_model().save_pretrained(temporary, state_dict=merged_state(self.model))
            else:
                self.model.save_pretrained(temporary)
            # not through save_pretrained, which refuses settings that many checkpoints have (a temperature, no do_sample)
            self._stored_generation_config.to_json_file(Path(temporary) / "generation_config.json")
            self.tokenizer.save_pretrained(temporary)
            for file in Path(temporary).iterdir():  # renamed when complete: no reader finds half a file
                file.replace(folder / file.name)
        return folder


def check_tokenizer(tokenizer, name: str, prompt_format: str) -> None:
    """Raises ValueError for a tokenizer that no agent can use: without an end token, or without the template asked for."""
    if prompt_format not in ("auto", "chat", "plain"):
        raise ValueError(f"prompt_format={prompt_format!r}: it takes 'auto', 'chat' or 'plain'")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of agent {name!r} has no end token, so no answer could end: set tokenizer.eos_token (to a token "
            "that the model was trained to end with) and save the tokenizer into the model's folder"
        )
    if prompt_format == "chat" and not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of agent {name!r} has no chat template; use prompt_format='plain', or set tokenizer.chat_template "
            "and save the tokenizer into the model's folder"
        )


def align(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with all responses starting in one column: prompts padded left, responses right.

    Returns ids and attention `[rollout, prompt + response]` and the response mask `[rollout, response]`, from lengths.
    """
    left, right = max(map(len, prompts)), max(map(len, responses))
    pad = [pad_id]
    ids = torch.tensor(
        [
            [*pad * (left - len(prompt)), *prompt, *response, *pad * (right - len(response))]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
    )
    first, end = (
        torch.tensor(n)[:, None] for n in ([left - len(p) for p in prompts], [left + len(r) for r in responses])
    )
    columns = torch.arange(left + right)
    attention = (columns >= first) & (columns < end)
    return ids, attention.long(), attention[:, left:]


# Tokens from which on a pass takes about as long as it has tokens (two CPU cores, models of 0.2 to 135 million parameters),
# and the share of a larger pass that may not be padding. Updates of the built-in agents take two thirds of the time.
WORTH_A_PASS, FULL = 512, 0.8


def microbatches(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], tokens: int
) -> Iterator[list[int]]:
    """Rows sorted by length, in groups that `align` pads to at most `tokens` (a single longer row stands alone).

    Equal rows stay together and count once, as `Agent.logprobs` computes them once. A group ends earlier where the next row
    would make more than a fifth of it padding, unless it is then so small that a pass costs more than the padding does.

    >>> list(microbatches([[1], [1], [1], [1]], [[2] * 4, [2], [2] * 3, [3]], tokens=8))
    [[1, 3], [2], [0]]
    >>> list(microbatches([[1], [1], [1]], [[2, 3], [4, 5], [2, 3]], tokens=3))
    [[0, 2], [1]]
    """
    rows = [(tuple(p), tuple(r)) for p, r in zip(prompts, responses, strict=True)]
    group: list[int] = []
    left = right = count = held = 0  # lengths of the longest, number and tokens of the different rows
    for i in sorted(range(len(rows)), key=lambda i: (len(rows[i][1]), len(rows[i][0]), rows[i])):
        prompt, response = rows[i]
        if not group or rows[i] != rows[group[-1]]:
            left, right, own = max(left, len(prompt)), max(right, len(response)), len(prompt) + len(response)
            padded = (count + 1) * (left + right)
            if group and (padded > tokens or (held >= WORTH_A_PASS and held + own < FULL * padded)):
                yield group
                group, left, right, count, held = [], len(prompt), len(response), 0, 0
            count, held = count + 1, held + own
        group.append(i)
    if group:
        yield group


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def data_folder() -> Path:
    """Where the built-in agents lie: HACPO_KIT_DATA, or `data/` beside the package."""
    return Path(os.environ.get("HACPO_KIT_DATA") or Path(__file__).resolve().parents[2] / "data")


def built_in_sets() -> dict[str, dict[str, Any]]:
    """The built-in sets of agents: name → kind and members.

    Raises FileNotFoundError where the package was installed without its data folder.
    """
    path = data_folder() / "agents" / "sets.json"
    if not path.exists():
        raise FileNotFoundError(
            f"no built-in agents at {path}; work in a clone, or set HACPO_KIT_DATA to its data folder"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def load_agents(
    names: str | Sequence[str | Agent],
    *,
    workers: str | None = None,
    threads: int | None = None,
    num_gpus: float | None = None,
    **options: Any,
) -> list[Agent]:
    """Agents of a built-in set ("tiny-model-pair"), or one for each name in a list; `options` as in `load_agent`.

    Agents that would have the same name get #2, #3, … after it. With workers="ray" each agent lives in a process of its
    own, on the Ray cluster of RAY_ADDRESS or else on this machine, with `threads` of a CPU (default: this process's
    divided among them) and `num_gpus` (default: one where the cluster has GPUs); they work at the same time.

    Raises ValueError for an unknown set, for one Agent given twice, for fewer GPUs than asked for, and for a loaded Agent
    where workers load; ModuleNotFoundError without Ray.
    """
    if isinstance(names, str):
        sets = built_in_sets()
        if names not in sets:
            raise ValueError(
                f"unknown set of agents {names!r}{did_you_mean(names, sets)}; there are {', '.join(sets)}; "
                "give a list for agents of your own"
            )
        names = sets[names]["agents"]
    names = list(names)
    if not names:
        raise ValueError("no agents given")
    if workers is not None:
        from hacpo_kit.models.remote import load_in_workers

        agents = load_in_workers([(name, options) for name in names], workers, threads=threads, num_gpus=num_gpus)
    elif threads is not None or num_gpus is not None:
        raise ValueError(
            "threads= and num_gpus= are of workers: give workers='ray', or use torch.set_num_threads and device="
        )
    else:
        agents = [a if isinstance(a, Agent) else load_agent(a, **options) for a in names]
    taken: dict[str, Agent] = {}
    for agent in agents:
        if taken.get(agent.name) is agent:
            raise ValueError(f"agent {agent.name!r} is given twice; load it twice to have two agents that learn apart")
        name, count = agent.name, 1
        while agent.name in taken:
            count += 1
            agent.name = f"{name}#{count}"
        taken[agent.name] = agent
    return agents


def as_list(agents: Agent | Sequence[Agent]) -> list[Agent]:
    """One agent or several as a list; raises TypeError for names, which have to be loaded first."""
    agents = [agents] if isinstance(agents, Agent | str) else list(agents)
    for agent in agents:
        if not isinstance(agent, Agent):
            raise TypeError(f"need agents, got {agent!r}: load them first, as in hk.load_agents({agent!r})")
    return agents


def each(agents: Sequence[Agent], function: Callable, *args: Any, bar=None, **settings: Any) -> list[Any]:
    """What `function(agent, …)` gives for every agent, in their order; agents in workers do it there, at the same time.

    A function gets the progress `bar` if there is one; for a worker it advances when the agent is done.
    """
    if any(agent.remote for agent in agents):
        from hacpo_kit.models.remote import each_in_workers

        return each_in_workers(agents, function, args, settings, bar)
    if bar is not None:
        settings["bar"] = bar
    values = []
    for agent in agents:  # no comprehension: before Python 3.12 it is a frame, and warnings count frames
        values.append(function(agent, *args, **settings))
    return values


def check_names(agents: Sequence[Agent]) -> None:
    """Raises ValueError unless the agents' names are different and can be names of folders."""
    for agent in agents:
        if not re.fullmatch(r"[^\W_][\w .+#@=()-]{0,99}", agent.name) or agent.name.endswith((".", " ")):
            raise ValueError(
                f"agent name {agent.name!r}: use up to 100 letters, digits and . _ + - # @ = ( ), since it becomes a folder; "
                "give name= when loading"
            )
    names = [a.name.casefold() for a in agents]
    if len(set(names)) < len(names):
        raise ValueError(f"agents need different names, also without regard to case: {[a.name for a in agents]}")


def load_agent(
    source: str | Path,
    *,
    name: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str = "float32",
    attention: str | None = None,
    gradient_checkpointing: bool = False,
    lora: Mapping[str, Any] | bool | None = None,
    offload: bool = False,
    prompt_format: str = "auto",
    template: Mapping[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    engine: str = "transformers",
    engine_options: Mapping[str, Any] | None = None,
) -> Agent:
    """One agent from a built-in name, a local folder or a model hub id, in that order; safetensors only.

    `device` defaults to a GPU if there is one, and to the CPU for built-in agents: they are too small to gain, and give
    the same results everywhere. `dtype` is what the model computes in: with "bfloat16" it learns through
    float32 master weights. `attention`: one of transformers' implementations ("sdpa", "eager", "flash_attention_2", …).
    `gradient_checkpointing` keeps fewer activations and computes them twice. `lora`: settings of peft's LoraConfig, or
    True for r = 16 on every linear layer; only the adapters learn. `offload`: what the agent does not need at the moment
    (weights, optimiser, reference, the engine's memory) rests in host memory, so that several agents can share one device.
    `template`: keywords of the chat template, such as {"enable_thinking": False}. `engine`: what samples, "transformers" or
    "vllm", the latter with `engine_options` (`hacpo_kit.models.engines.vllm.OPTIONS`).

    Raises FileNotFoundError for a folder without a model, OSError for a hub id that cannot be had, ValueError for a model
    or an option that cannot be used, ModuleNotFoundError for a missing extra.
    """
    where, is_local = locate(source)
    sampler = _engine(engine, engine_options)
    if device is None:
        device = "cuda" if torch.cuda.is_available() and _built_in(source) is None else "cpu"
    if lora:
        check_extra()
    from transformers import AutoModelForCausalLM, AutoTokenizer  # takes seconds, and a misspelt name should not

    name = name or Path(str(source)).name
    options = {"trust_remote_code": trust_remote_code, **({} if revision is None else {"revision": revision})}
    options |= {} if is_local else _hub_options(source, revision)
    with quiet():
        tokenizer = _read(source, AutoTokenizer, where, **options)
        check_tokenizer(tokenizer, name, prompt_format)  # before gigabytes are read
        check_fits(where, _dtype(dtype), "cpu" if offload else device, **options)
        kind = {} if attention is None else {"attn_implementation": attention}
        model = _read(source, AutoModelForCausalLM, where, dtype=_dtype(dtype), use_safetensors=True, **kind, **options)
    if len(tokenizer) > (rows := model.get_input_embeddings().num_embeddings):
        raise ValueError(
            f"{source}: the tokenizer has {len(tokenizer)} tokens, the model {rows} embeddings; "
            "call model.resize_token_embeddings and save it first"
        )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    stored_generation_config = model.generation_config
    if lora:
        model = add_adapter(model, {} if lora is True else lora, seed=derive_seed("lora", name))
        model.generation_config = stored_generation_config
    given = {
        "device": str(device), "dtype": str(_dtype(dtype)).removeprefix("torch."), "attention": attention,
        "gradient_checkpointing": gradient_checkpointing, "lora": lora if isinstance(lora, bool | None) else dict(lora),
        "revision": revision, "engine": engine, "engine_options": dict(engine_options) if engine_options else None,
        "offload": offload,
    }  # fmt: skip
    return Agent(
        model if offload else model.to(device),
        tokenizer,
        name=name,
        prompt_format=prompt_format,
        template=template,
        # a folder is found again from any working directory
        origin=str(Path(where).resolve()) if is_local and _built_in(source) is None else str(source),
        loading=given,
        engine=sampler,
        offload=device if offload else None,
    )


def _engine(name: str, options: Mapping[str, Any] | None):
    """What samples; None for transformers."""
    if name == "vllm":
        from hacpo_kit.models.engines.vllm import VLLM

        return VLLM(**(options or {}))
    if name != "transformers":
        raise ValueError(f"unknown engine {name!r}{did_you_mean(name, ENGINES)}; there are {' and '.join(ENGINES)}")
    if options:
        raise ValueError(
            f"engine_options={dict(options)} are those of engine='vllm'; this engine is transformers: use None"
        )
    return None


def read_config(source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False):
    """The transformers config of a built-in agent, a folder or a hub id; its weights are not touched."""
    from transformers import AutoConfig

    where, is_local = locate(source)
    options = {} if is_local else _hub_options(source, revision)
    return _read(source, AutoConfig, where, revision=revision, trust_remote_code=trust_remote_code, **options)


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype={dtype}: it takes 'float32', 'bfloat16', 'float64', or 'float16' (not to train)")
    return found


def _hub_options(source: str | Path, revision: str | None) -> dict[str, Any]:
    try:
        return hub_options(str(source), revision)
    except OSError as error:
        known = ", ".join(built_in_names())
        raise OSError(f"cannot load {error}. It is no folder either, and no built-in agent or set ({known})") from None


def _read(source, kind, where: str, **options):
    """Tokenizer, config or model, from a folder or the hub."""
    try:
        return kind.from_pretrained(where, **options)
    except (ImportError, ValueError) as error:
        if (attention := options.get("attn_implementation")) is None:
            raise
        raise ValueError(f"{source}: attention={attention!r} cannot be used here: {error}") from error


@contextlib.contextmanager
def quiet():
    """Without transformers' bars over weights and shards, which would be stored in every notebook."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def built_in_names() -> list[str]:
    """The built-in agents, then the built-in sets."""
    names = sorted(p.parent.name for p in (data_folder() / "agents").glob("*/config.json"))
    return [*names, *built_in_sets()] if names else []


def _built_in(source: str | Path) -> Path | None:
    folder = data_folder() / "agents" / str(source)
    return folder if isinstance(source, str) and source and (folder / "config.json").exists() else None


def locate(source: str | Path) -> tuple[str, bool]:
    """The path or hub id to load from, and whether it is local."""
    if (built_in := _built_in(source)) is not None:
        return str(built_in), True
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            if (path / "adapter_config.json").exists():
                raise FileNotFoundError(
                    f"{path} holds adapters alone: merge them into their base model and save that first"
                )
            raise FileNotFoundError(f"{path} holds no model: config.json is missing")
        return str(path), True
    if source in (known := built_in_names()):
        raise ValueError(f"{source!r} is a set of agents: use load_agents({source!r})")
    if isinstance(source, Path) or str(source).startswith((".", "/", "~")):
        raise FileNotFoundError(f"there is no folder {source}")
    if "/" not in str(source) and (near := did_you_mean(str(source), known)):  # not worth asking a network
        raise ValueError(f"unknown agent {source!r}{near}; models of the hub are named owner/name")
    return str(source), False
