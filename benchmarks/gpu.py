"""Measure hacpo_kit on a CUDA machine, in at most four minutes and without a network.

    python benchmarks/gpu.py          # writes reports/gpu.json
    python benchmarks/gpu.py --cpu    # the same code with small shapes on one thread; writes reports/gpu-cpu.json

Three parts, each only if enough time is left; the JSON lists skipped parts:

- matrix rate: a large square product in bfloat16, to which the other rates are compared;
- learn: the built-in pair trains on the device and, with the same seed, on the CPU: both must learn;
- speed: models in the shape of Qwen3-0.6B and Llama-3.2-1B with random weights sample, score and update through the
  package's own functions, in bfloat16 with float32 masters; plain, with gradient checkpointing, and with idle parts in
  host memory; peak memory beside that of `hacpo_kit.models.memory.estimate`. With vLLM, if it is installed.

Model FLOPs by the usual count: a forward pass takes 2·(N·T + V·R) + 2·L·H·ΣT², a backward pass twice that. N: weights of
the layers' matrices; T: tokens; V: weights of the output head, which sees the R response tokens only; L: layers; H: width
of all attention heads together; T² is halved, since attention is causal. Repeated computations
(activations with gradient checkpointing, the own rollouts' log-probabilities before the first update) do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import platform
import signal
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

import hacpo_kit as hk
from hacpo_kit.common.files import write_json
from hacpo_kit.models.memory import estimate
from hacpo_kit.records import Batch, Pool
from hacpo_kit.rollouts import Sampling, sample_pool, score
from hacpo_kit.runs.record import versions

ROOT = Path(__file__).resolve().parent.parent

# as in the published config.json of each model
QWEN3_06B = Qwen3Config(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
)  # fmt: skip
LLAMA32_1B = LlamaConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
    rope_parameters={
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)  # fmt: skip
# name → config, and the built-in agent whose tokenizer it borrows: any will do, since no text is read
SHAPES = {"qwen3-0.6b": (QWEN3_06B, "qwen3-sums"), "llama3.2-1b": (LLAMA32_1B, "llama-differences")}


@dataclass(frozen=True)
class Size:
    """Sizes of the parts; `needs` is the expected maximum of each part (s)."""

    budget: float  # seconds from the start of the process to the end
    matrix: int  # side of the square product
    steps: int  # of learning
    prompts_per_step: int
    test: int  # problems in an evaluation
    prompts: int  # of the speed part, 8 answers each
    prompt_tokens: int
    new_tokens: int
    minibatch: int
    microbatch_tokens: int
    needs: dict[str, float]


GPU = Size(
    budget=225, matrix=8192, steps=6, prompts_per_step=32, test=100, prompts=32, prompt_tokens=64, new_tokens=256,
    minibatch=128, microbatch_tokens=8192, needs={"speed": 60, "learn": 30, "vllm": 50},
)  # fmt: skip
CPU = Size(
    budget=55, matrix=512, steps=6, prompts_per_step=8, test=20, prompts=2, prompt_tokens=16, new_tokens=12,
    minibatch=8, microbatch_tokens=256, needs={"speed": 6, "learn": 8, "vllm": 30},
)  # fmt: skip


def shrunken(config: PretrainedConfig) -> PretrainedConfig:
    """Return the same architecture with two narrow layers and few tokens, for the CPU mode."""
    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    kept = {k: v for k, v in config.to_dict().items() if k not in ("layer_types", "model_type")}
    return type(config)(**{**kept, **small, **heads})


class Clock:
    """The seconds that are left, and the parts that were skipped."""

    def __init__(self, budget: float):
        self.end = psutil.Process().create_time() + budget  # imports count
        self.skipped: dict[str, str] = {}

    @property
    def left(self) -> float:
        """Return the seconds left."""
        return self.end - time.time()

    @contextlib.contextmanager
    def part(self, name: str, needs: float) -> Iterator[bool]:
        """Return whether enough time is left for a part; a part that exceeds its time is stopped and listed."""
        if self.left < needs:
            self.skipped[name] = f"needs up to {needs:.0f} s, {max(0, self.left):.0f} s were left"
            yield False
            return

        def stop(*_: Any) -> None:
            raise TimeoutError

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, max(0.1, self.left))
        try:
            yield True
        except TimeoutError:
            self.skipped[name] = "stopped: the time was up"
        except (
            RuntimeError,
            MemoryError,
            ImportError,
        ) as error:  # out of memory, no vLLM: the other parts are measured anyway
            self.skipped[name] = f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Measured:
    """Seconds of a block and the peak memory on the device (bytes; None on a CPU, which does not count it)."""

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> Measured:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        wait(self.device)
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        wait(self.device)
        self.seconds = time.perf_counter() - self.start
        self.peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


def matrix_rate(device: torch.device, side: int, seconds: float = 1.0) -> float:
    """Return the FLOP/s of a square matrix product in bfloat16: the median of several batches of products."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    rates, end = [], time.perf_counter() + seconds
    while len(rates) < 4 or time.perf_counter() < end:
        wait(device)
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        wait(device)
        rates.append(10 * 2 * side**3 / (time.perf_counter() - start))
    return statistics.median(rates[1:])  # without the warm-up


def forward_flops(model, batch: Batch) -> float:
    """Return the model FLOPs of one forward pass over a batch; the formula is in the module's docstring."""
    config = model.config
    head = model.get_output_embeddings().weight.numel()
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)) - head
    pairs = list(zip(batch.prompt_ids, batch.response_ids, strict=True))
    tokens = [len(prompt) + len(response) for prompt, response in pairs]
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    attention = 2 * width * sum(t * t for t in tokens)
    return 2 * (matrices * sum(tokens) + head * sum(len(response) for _, response in pairs)) + attention


# ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────────


def learn(device: torch.device, size: Size) -> dict[str, Any]:
    """Train the built-in pair; return both agents' accuracy before and after, and the seconds of a step."""
    agents = hk.load_agents("tiny-model-pair", device=device)
    config = hk.Config.preset("hacpo", prompts_per_step=size.prompts_per_step)
    problems = hk.load_problems("arithmetic", split="train")
    test = hk.load_problems("arithmetic", split="test", size=size.test)
    run = hk.train(agents, problems, config, size.steps, test=test, eval_every=size.steps, progress="off")
    parts = ("rollout", "scoring", "reward", "advantage", "update")
    times = {part: statistics.median(line[f"seconds_{part}"] for line in run.history[1:]) for part in parts}
    first, last = run.history[0]["agents"], run.history[-1]["agents"]
    return {
        "agents": {name: {"before": first[name]["avg@1"], "after": last[name]["avg@1"]} for name in first},
        "step_seconds": round(sum(times.values()), 4),
        "split_seconds": {k: round(v, 4) for k, v in times.items()},
        **gaps(agents[0], run.last.pool),
    }


def gaps(agent: hk.Agent, pool: Pool) -> dict[str, float]:
    """Return the largest differences of a token's log-probability (nats): alone or in a batch, on the device or the CPU."""
    rollouts = sorted(pool.by_source[agent.name], key=lambda r: len(r.token_ids))
    some = [*rollouts[:4], *rollouts[-4:]]  # short and long: the short ones are padded
    twin = hk.load_agent(agent.origin, device="cpu")
    twin.model.load_state_dict(agent.model.state_dict())
    together = score(agent, some, temperature=1.0)
    alone = [score(agent, [r], temperature=1.0)[0] for r in some]
    there = score(twin, some, temperature=1.0)

    def gap(these, those) -> float:
        return max(float(abs(a.logps - b.logps).max()) for a, b in zip(these, those, strict=True))

    return {"gap_padding": gap(together, alone), "gap_to_cpu": gap(together, there)}


def random_agent(name: str, device: torch.device, small: bool) -> hk.Agent:
    """Return an agent with this shape and random weights, in bfloat16."""
    config, tokenizer = SHAPES[name]
    config = shrunken(config) if small else config
    with torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return hk.Agent(model, hk.load_agent(tokenizer, device="cpu").tokenizer, name=name)


def sampled(agent: hk.Agent, size: Size) -> Pool:
    """Sample responses and assign synthetic rewards: half of each prompt's are correct.

    A random model rarely samples an end token, so nearly all responses have the maximum length.
    """
    digits = "0123456789" * size.prompt_tokens
    rows = [{"prompt": digits[k : k + size.prompt_tokens], "gold": str(k)} for k in range(size.prompts)]
    problems = hk.load_problems(rows)
    sampling = Sampling(8, max_new_tokens=size.new_tokens, scoring_tokens=size.microbatch_tokens)
    first = replace(sampling, max_new_tokens=4)
    sample_pool(agent, problems[:1], first, progress=False)  # first calls choose kernels and take memory
    pool = sample_pool(agent, problems, sampling, progress=False)
    return pool.with_rewards(
        [float(r.sample % 2) for r in pool], ["correct" if r.sample % 2 else "wrong" for r in pool]
    )


def speed(name: str, device: torch.device, size: Size, rate: float, small: bool) -> dict[str, Any]:
    """Measure rollout, scoring and update of one shape: tokens/s, share of the matrix rate, memory."""
    agent = random_agent(name, device, small)
    with Measured(device) as sampling:
        pool = sampled(agent, size)
    config = hk.Config.preset(
        "gspo", prompts_per_step=size.prompts, max_new_tokens=size.new_tokens, minibatch=size.minibatch,
        microbatch_tokens=size.microbatch_tokens, lr=1e-6, warmup=0,
    )  # fmt: skip
    batch = hk.advantage(pool, agent, hk.Capability().observe(pool), config)
    flops, tokens = forward_flops(agent.model, batch), sum(map(len, (*batch.prompt_ids, *batch.response_ids)))
    scoring = pool.seconds["seconds_scoring"]
    out: dict[str, Any] = {
        "parameters": sum(p.numel() for p in agent.model.parameters()),
        "rollouts": len(pool), "sampled_tokens": pool.tokens, "tokens": tokens,
        "rollout_tokens_per_second": round(pool.tokens / pool.seconds["seconds_rollout"], 1),
        "scoring_tokens_per_second": round(tokens / scoring, 1),
        "scoring_share_of_matrix_rate": round(flops / scoring / rate, 4),
        "rollout_peak_bytes": sampling.peak, "update": {},
    }  # fmt: skip
    work = {"flops": 3 * flops, "tokens": tokens, "rate": rate}
    hk.update(agent, batch.part(range(8)), config)  # makes masters and moments, chooses kernels
    out["update"]["plain"] = measured_update(agent, batch, config, **work)
    agent.model.gradient_checkpointing_enable({"use_reentrant": False})
    out["update"]["gradient checkpointing"] = measured_update(agent, batch, config, **work)
    agent.model.gradient_checkpointing_disable()
    agent.optimizer = None
    idle = hk.Agent(agent.model.to("cpu"), agent.tokenizer, name=name, offload=device)
    hk.update(idle, batch.part(range(8)), config)
    idle.offload.transfer_costs()
    out["update"]["offload"] = {**measured_update(idle, batch, config, **work), **idle.offload.transfer_costs()}
    for how, checkpointing in (("plain", False), ("gradient checkpointing", True)):
        bytes_of = estimated(agent.model.config, config, size, checkpointing)
        out["update"][how]["estimated_peak_bytes"] = bytes_of["update"]
    return {**out, "rollout_estimated_peak_bytes": bytes_of["rollout"]}


def estimated(shape: PretrainedConfig, config: hk.Config, size: Size, checkpointing: bool) -> dict[str, int]:
    """Return the package's estimate of each phase's peak memory, from the shape alone."""
    # with offload, since here too the optimiser is not there yet while the first rollouts are sampled
    how = {"dtype": "bfloat16", "gradient_checkpointing": checkpointing, "offload": True, "device_memory": 2**40}
    phases = estimate({"shape": shape}, config, prompt_tokens=size.prompt_tokens, device="cpu", **how).phases
    return {p.phase: p.total for p in phases}


def measured_update(
    agent: hk.Agent, batch: Batch, config: hk.Config, *, flops: float, tokens: int, rate: float
) -> dict[str, Any]:
    """Measure one whole update; if the device runs out of memory, repeat with half as many tokens in a pass."""
    while True:
        # as if the rollouts had just been sampled: then half precision scores the own ones before it moves
        batch = replace(batch, pool=replace(batch.pool, updates={agent.name: agent.updates}))
        try:
            with Measured(agent.device) as took:
                stats = hk.update(agent, batch, config)
        except (torch.OutOfMemoryError, MemoryError):
            if config.microbatch_tokens < 512:
                raise
            config = config.replace(microbatch_tokens=config.microbatch_tokens // 2)
            continue
        return {
            "tokens_per_second": round(tokens / took.seconds, 1),
            "share_of_matrix_rate": round(flops / took.seconds / rate, 4),
            "seconds": round(took.seconds, 4), "updates": len(stats.minibatches),
            "microbatch_tokens": config.microbatch_tokens, "peak_bytes": took.peak,
        }  # fmt: skip


def vllm(name: str, device: torch.device, size: Size, small: bool) -> dict[str, Any]:
    """Measure sampling with vLLM and the copy of new weights to it."""
    from hacpo_kit.models.engines.vllm import VLLM

    options = {"gpu_memory_utilization": 0.5} if device.type == "cuda" else {}
    engine = VLLM(enforce_eager=True, max_model_len=size.prompt_tokens + size.new_tokens + 8, **options)
    agent = random_agent(name, device, small)
    agent.engine = engine
    pool = sampled(agent, size)
    agent.weights_version += 1
    with Measured(device) as took:
        agent.engine.synchronise(agent)
    agent.engine.close()
    return {
        "rollouts": len(pool), "sampled_tokens": pool.tokens, "enforce_eager": True,
        "rollout_tokens_per_second": round(pool.tokens / pool.seconds["seconds_rollout"], 1),
        "synchronise_seconds": round(took.seconds, 4),
    }  # fmt: skip


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────


def machine(device: torch.device) -> dict[str, Any]:
    """Return a description of the machine."""
    out: dict[str, Any] = {"machine": platform.machine(), "threads": torch.get_num_threads(), "device": device.type}
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        out |= {"name": about.name, "memory_bytes": about.total_memory, "cuda": torch.version.cuda}
        out |= {"compute_capability": f"{about.major}.{about.minor}", "devices": torch.cuda.device_count()}
    return out


def measure(device: torch.device, size: Size, out: Path, small: bool) -> dict[str, Any]:
    """Measure every part for which enough time is left; the file is written after each part."""
    clock = Clock(size.budget)
    report: dict[str, Any] = {
        "mode": "cpu, shrunken shapes" if small else "gpu", **machine(device), "versions": versions(),
        "size": {k: v for k, v in asdict(size).items() if k != "needs"}, "skipped": clock.skipped,
        "matrix_rate_flops": matrix_rate(device, size.matrix),
    }  # fmt: skip

    def keep(name: str, part: Any) -> None:
        report[name] = part
        report["seconds"] = round(size.budget - clock.left, 1)
        write_json(out, report)

    with warnings.catch_warnings():
        # models with random weights never end a response
        warnings.filterwarnings("ignore", message=".*were cut at")
        for name in SHAPES:
            with clock.part(name, size.needs["speed"]) as there_is_time:
                if there_is_time:
                    keep(name, speed(name, device, size, report["matrix_rate_flops"], small))
            gc.collect()
        for name, where in {"learn": device, "learn_on_cpu": torch.device("cpu")}.items():
            with clock.part(name, size.needs["learn"]) as there_is_time:
                if there_is_time:
                    keep(name, learn(where, size))
        with clock.part("vllm", size.needs["vllm"]) as there_is_time:
            if there_is_time:
                keep("vllm", vllm(next(iter(SHAPES)), device, size, small))
    keep("skipped", clock.skipped)
    return report


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the JSON and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="the same code with small shapes on one CPU thread")
    parser.add_argument("--out", type=Path, default=None, help="default: reports/gpu.json, or gpu-cpu.json with --cpu")
    parser.add_argument("--seconds", type=float, default=None, help="time for all of it; a busy machine needs more")
    args = parser.parse_args(arguments)
    if not args.cpu and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --cpu runs the same code with small shapes")
    torch.set_num_threads(
        1
    )  # for what runs on the CPU: several threads wait for each other in models as small as those
    out = args.out or ROOT / "reports" / ("gpu-cpu.json" if args.cpu else "gpu.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu" if args.cpu else "cuda:0")
    size = CPU if args.cpu else GPU
    report = measure(device, replace(size, budget=args.seconds or size.budget), out, small=args.cpu)
    for name, part in report.items():
        for key, value in part.items() if isinstance(part, dict) else [("", part)]:
            print(f"{f'{name} {key}':45} {value}")


if __name__ == "__main__":
    main()
