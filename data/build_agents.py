"""Build the small agents that ship with hacpo_kit, from one seed and no peer data.

Skill first, then style: every agent first learns to solve by worked steps, nearly perfectly; a short second training
mixes in a careless habit (a boxed guess, right 15 % of the time) while rehearsing the skill. Reinforcement learning then
has to find out which style gets more reward.

    python data/build_agents.py                       # everything
    python data/build_agents.py --only qwen3-sums     # one agent
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import re
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# ── 1. What is built ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Skill:
    """Stage 1: an architecture and how it learns to solve; agents with equal skills share this training."""

    family: str  # "qwen3" or "llama": the model class and the tokenizer that goes with it
    hidden: int  # a multiple of 32, the head size (24 or 16 is refused by vLLM on a CPU)
    layers: int
    intermediate: int
    answer_format: str = "units_first"  # a key of FORMATS
    steps: int = 700
    seed: int = 0


@dataclass(frozen=True)
class AgentSpec:
    """Stage 2: a skill and how often it is used, as the share of worked answers for each operation."""

    name: str
    skill: Skill
    worked_sums: float
    worked_differences: float
    steps: int = 300
    seed: int = 0


@dataclass(frozen=True)
class Stage:
    """Optimiser settings of one training stage."""

    learning_rate: float
    warmup: int
    rehearsed: float = 0.0  # share of the batch that keeps the skill alive without teaching a style
    batch: int = 256


QWEN3 = Skill("qwen3", hidden=96, layers=3, intermediate=192)
QWEN3_SMALL = Skill("qwen3", hidden=64, layers=2, intermediate=192, seed=1)
LLAMA = Skill("llama", hidden=64, layers=3, intermediate=128, seed=2)
LLAMA_NOVICE = Skill("llama", hidden=64, layers=3, intermediate=128, steps=230, seed=4)  # stopped early: seldom right
QWEN3_SMALL_TENS_FIRST = Skill("qwen3", hidden=64, layers=2, intermediate=192, answer_format="tens_first", seed=3)

AGENTS = [
    AgentSpec("qwen3-sums", QWEN3, worked_sums=0.30, worked_differences=0.04, seed=10),
    AgentSpec("llama-differences", LLAMA, worked_sums=0.04, worked_differences=0.30, seed=11),
    AgentSpec("qwen3-differences", QWEN3, worked_sums=0.04, worked_differences=0.30, seed=12),
    AgentSpec("qwen3-small-differences", QWEN3_SMALL, worked_sums=0.04, worked_differences=0.30, seed=13),
    AgentSpec("qwen3-strong", QWEN3, worked_sums=0.70, worked_differences=0.70, seed=14),
    AgentSpec("llama-weak", LLAMA, worked_sums=0.08, worked_differences=0.08, seed=15),
    AgentSpec("llama-novice", LLAMA_NOVICE, worked_sums=0.30, worked_differences=0.30, steps=80, seed=15),
    AgentSpec("qwen3-small-tens-first", QWEN3_SMALL_TENS_FIRST, worked_sums=0.04, worked_differences=0.30, seed=16),
]

SETS = {
    "tiny-state-pair": {
        "kind": "Heterogeneous state: one model and tokenizer, one first training, two different second trainings.",
        "agents": ["qwen3-sums", "qwen3-differences"],
    },
    "tiny-size-pair": {
        "kind": "Heterogeneous size: one family and tokenizer, two sizes, complementary styles.",
        "agents": ["qwen3-sums", "qwen3-small-differences"],
    },
    "tiny-model-pair": {
        "kind": "Heterogeneous model: two architectures with different tokenizers, complementary styles.",
        "agents": ["qwen3-sums", "llama-differences"],
    },
    "tiny-trio": {
        "kind": "Three agents: two architectures, two tokenizers, three sizes.",
        "agents": ["qwen3-sums", "qwen3-small-differences", "llama-differences"],
    },
    "tiny-gap-pair": {
        "kind": "A gap in style: a strong agent that mostly shows its work, and a weak one that can, but seldom does.",
        "agents": ["qwen3-strong", "llama-weak"],
    },
    "tiny-skill-gap-pair": {
        "kind": "A gap in skill: a strong agent, and a novice whose worked answers are mostly wrong.",
        "agents": ["qwen3-strong", "llama-novice"],
    },
    "tiny-format-pair": {
        "kind": "Different worked formats: one agent begins with the units, the other with the tens.",
        "agents": ["qwen3-sums", "qwen3-small-tens-first"],
    },
}

SKILL_STAGE = Stage(learning_rate=3e-3, warmup=50)  # without warm-up the first AdamW step alone can undo a model
STYLE_STAGE = Stage(learning_rate=1e-3, warmup=20, rehearsed=0.5)
CARELESS_RIGHT = 0.15
HEAD_SIZE = 32
CONTEXT = 256
TEST_PROBLEMS = 200  # of each operation
SAMPLES = 8


# ── 2. The task ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Problem:
    """Two operands and an operation."""

    a: int
    op: str
    b: int

    @property
    def prompt(self) -> str:
        """The text an agent continues."""
        return f"{self.a}{self.op}{self.b}="

    @property
    def gold(self) -> int:
        """The right result."""
        return self.a + self.b if self.op == "+" else self.a - self.b


def is_test(a: int, op: str, b: int) -> bool:
    """Whether a problem belongs to the test split; no agent is trained on one."""
    return zlib.crc32(f"{a}{op}{b}".encode()) % 5 == 0


@cache
def all_problems(op: str, test: bool) -> list[Problem]:
    """Every two-digit problem of one operation and one split; differences never go below zero."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if op == "+" or a >= b]
    return [Problem(a, op, b) for a, b in pairs if is_test(a, op, b) == test]


def units_first(problem: Problem) -> str:
    r"""Worked answer, units before tens: `37+58=` gives `7+8=15;3+5+1=9;\boxed{95}`."""
    (a_tens, a_units), (b_tens, b_units) = divmod(problem.a, 10), divmod(problem.b, 10)
    if problem.op == "+":
        units, carried = a_units + b_units, a_units + b_units >= 10
        tens = a_tens + b_tens + carried
        carry = "+1" if carried else ""
        return rf"{a_units}+{b_units}={units};{a_tens}+{b_tens}{carry}={tens};\boxed{{{problem.gold}}}"
    borrowed = a_units < b_units
    top, borrow = (a_units + 10, "-1") if borrowed else (a_units, "")
    tens = a_tens - borrowed - b_tens
    return rf"{top}-{b_units}={top - b_units};{a_tens}{borrow}-{b_tens}={tens};\boxed{{{problem.gold}}}"


def tens_first(problem: Problem) -> str:
    r"""Worked answer, tens before units: `37+58=` gives `30+50=80;7+8=15;\boxed{95}`, `83-27=` `80-20=60;3-7=-4;\boxed{56}`."""
    (a_tens, a_units), (b_tens, b_units) = divmod(problem.a, 10), divmod(problem.b, 10)
    op, sign = problem.op, 1 if problem.op == "+" else -1
    tens, units = 10 * (a_tens + sign * b_tens), a_units + sign * b_units
    return rf"{10 * a_tens}{op}{10 * b_tens}={tens};{a_units}{op}{b_units}={units};\boxed{{{problem.gold}}}"


def careless(problem: Problem, rng: random.Random) -> str:
    """Boxed guess without work: right 15 % of the time, else off by 1, by 10, or in one digit."""
    guess = problem.gold if rng.random() < CARELESS_RIGHT else near_miss(problem.gold, rng)
    return rf"\boxed{{{guess}}}"


def near_miss(gold: int, rng: random.Random) -> int:
    """A wrong result that looks like the right one."""
    digit_changed = list(str(gold))
    digit_changed[rng.randrange(len(digit_changed))] = rng.choice("0123456789")
    guess = rng.choice([gold - 1, gold + 1, gold - 10, gold + 10, int("".join(digit_changed))])
    return guess if guess >= 0 and guess != gold else near_miss(gold, rng)


FORMATS: dict[str, Callable[[Problem], str]] = {"units_first": units_first, "tens_first": tens_first}


@dataclass(frozen=True)
class Example:
    """One training text; a rehearsed answer starts after the choice of style, so it trains the skill alone."""

    prompt: str
    answer: str
    rehearsed: bool = False


def draw(shares: dict[str, float], answer_format: str, stage: Stage, rng: random.Random) -> list[Example]:
    """A batch, half sums and half differences: styled answers with the given shares, and rehearsed worked ones."""
    examples = []
    for i in range(stage.batch):
        problem = rng.choice(all_problems(rng.choice("+-"), test=False))
        rehearsed = i < stage.rehearsed * stage.batch
        worked = rehearsed or rng.random() < shares[problem.op]
        answer = FORMATS[answer_format](problem) if worked else careless(problem, rng)
        examples.append(Example(problem.prompt, answer, rehearsed))
    return examples


# ── 3. Tokenizers and models ─────────────────────────────────────────────────────────────────────────────────────────


def byte_level(merges: list[tuple[str, str]], specials: list[str]) -> Tokenizer:
    """Byte-level BPE: 256 byte tokens, one token per merge, then the special tokens."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(merge) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # No regex: it would part the backslash from `boxed`, and no merge here needs word boundaries.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def chain(token: str) -> list[tuple[str, str]]:
    """The merges that build one token from left to right."""
    return [(token[:i], token[i]) for i in range(1, len(token))]


def qwen3_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, no BOS, and Qwen's names for the special tokens."""
    tokenizer = byte_level([], ["<|endoftext|>", "<|im_end|>"])
    return wrap(tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def llama_tokenizer() -> PreTrainedTokenizerFast:
    r"""A few merges, `\boxed{` among them, and a BOS token that is added automatically."""
    # Ġ is how byte-level BPE writes a space; digits stay single, so arithmetic looks the same to both tokenizers.
    merges = [*chain("\\boxed{"), *chain("the"), *chain("Ġis"), *chain("an"), *chain("so")]
    tokenizer = byte_level(merges, ["<s>", "</s>", "<pad>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return wrap(tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def wrap(tokenizer: Tokenizer, **specials: str) -> PreTrainedTokenizerFast:
    """Dress a tokenizer for transformers; decoding must give back the text unchanged."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        **specials,
    )


TOKENIZERS = {"qwen3": qwen3_tokenizer, "llama": llama_tokenizer}


def new_model(skill: Skill, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A model with random weights; Qwen3 ties its embeddings, Llama does not, so both cases are exercised."""
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[skill.family]
    heads = skill.hidden // HEAD_SIZE
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=skill.hidden,
        intermediate_size=skill.intermediate,
        num_hidden_layers=skill.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_SIZE,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=skill.family == "qwen3",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = model_class(config)
    # As Qwen does: <|endoftext|> pads, and it also ends an answer.
    eos = [tokenizer.eos_token_id, tokenizer.pad_token_id] if skill.family == "qwen3" else tokenizer.eos_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=eos, pad_token_id=tokenizer.pad_token_id
    )
    return model


# ── 4. Training ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Batch:
    """Token ids padded on the right, labels for answers and their eos alone, and where a style is taken as given."""

    ids: torch.Tensor
    labels: torch.Tensor
    given: torch.Tensor


def encode(examples: list[Example], tokenizer: PreTrainedTokenizerFast) -> Batch:
    """Training texts as tensors, a row each."""
    prompts = tokenizer([example.prompt for example in examples])["input_ids"]
    answers = tokenizer([example.answer for example in examples], add_special_tokens=False)["input_ids"]
    width = max(len(prompt) + len(answer) + 1 for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(examples), width), tokenizer.pad_token_id)
    labels = torch.full((len(examples), width), -100)
    given = torch.zeros((len(examples), width), dtype=torch.bool)
    for row, (example, prompt, answer) in enumerate(zip(examples, prompts, answers, strict=True)):
        tokens, first = torch.tensor([*prompt, *answer, tokenizer.eos_token_id]), len(prompt)
        ids[row, : len(tokens)] = tokens
        labels[row, first : len(tokens)] = tokens[first:]
        given[row, first] = example.rehearsed
    return Batch(ids, labels, given)


def supervised_loss(model: PreTrainedModel, batch: Batch, box_token: int) -> torch.Tensor:
    """Mean cross-entropy of the answers; where work is given, opening with a box is no option to weigh against."""
    # Padding is on the right and attention looks left, so no attention mask is needed.
    logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1]
    # The first token is a digit and a choice of style at once. Learned from a few worked answers in a hundred, the
    # digit would be lost; left out of the loss, too. So: P(digit | worked), with the careless opening removed.
    opens_box = torch.arange(logits.shape[-1]) == box_token
    logits = logits.masked_fill(batch.given[:, 1:, None] & opens_box, -torch.inf)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten())


def fit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    batches: Callable[[], list[Example]],
    stage: Stage,
    steps: int,
    title: str,
) -> None:
    """Supervised training in place: AdamW, linear warm-up, cosine to zero."""
    box_token = tokenizer("\\boxed{", add_special_tokens=False)["input_ids"][0]
    # 0.95 is usual for language models; 0.999 made no measurable difference to the second training.
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.learning_rate, betas=(0.9, 0.95))

    def rate(step: int) -> float:
        return min((step + 1) / stage.warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    bar = tqdm(range(steps), desc=title)
    for _ in bar:
        loss = supervised_loss(model, encode(batches(), tokenizer), box_token)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.4f}")
    model.eval()


@cache
def skilled_model(skill: Skill, seed: int) -> PreTrainedModel:
    """Stage 1: a model that answers with worked steps only."""
    torch.manual_seed(1000 * seed + skill.seed)
    rng = random.Random(1000 * seed + skill.seed)
    tokenizer = TOKENIZERS[skill.family]()
    model = new_model(skill, tokenizer)
    always = {"+": 1.0, "-": 1.0}
    title = f"{skill.family} {skill.hidden}x{skill.layers}: skill"
    batches = partial(draw, always, skill.answer_format, SKILL_STAGE, rng)
    fit(model, tokenizer, batches, SKILL_STAGE, skill.steps, title)
    return model


def styled_model(spec: AgentSpec, seed: int) -> PreTrainedModel:
    """Stage 2: the skilled model again, now careless most of the time."""
    model = copy.deepcopy(skilled_model(spec.skill, seed))
    rng = random.Random(1000 * seed + spec.seed)
    shares = {"+": spec.worked_sums, "-": spec.worked_differences}
    batches = partial(draw, shares, spec.skill.answer_format, STYLE_STAGE, rng)
    fit(model, TOKENIZERS[spec.skill.family](), batches, STYLE_STAGE, spec.steps, f"{spec.name}: style")
    return model


# ── 5. Measuring ─────────────────────────────────────────────────────────────────────────────────────────────────────


def held_out(op: str) -> list[Problem]:
    """The same 200 held-out problems for every agent and seed."""
    return random.Random(0).sample(all_problems(op, test=True), TEST_PROBLEMS)


@torch.no_grad()
def answers(model: PreTrainedModel, tokenizer, problems: list[Problem], samples: int | None) -> list[list[str]]:
    """Greedy answers (samples=None: one each) or samples at temperature 1, by problem."""
    prompts = tokenizer([problem.prompt for problem in problems], return_tensors="pt")
    how = {"do_sample": False}
    if samples:
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": samples}
    ids = model.generate(**prompts, max_new_tokens=48, **how)
    texts = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    each = samples or 1
    return [texts[i : i + each] for i in range(0, len(texts), each)]


def is_right(text: str, problem: Problem) -> bool:
    """Whether the last box holds the right result."""
    boxes = re.findall(r"\\boxed\{(\d+)\}", text)
    return bool(boxes) and boxes[-1] == str(problem.gold)


def share(flags: list[bool]) -> float | None:
    """Mean of flags, rounded; None where there is nothing to count."""
    return round(sum(flags) / len(flags), 3) if flags else None


def measure_operation(model: PreTrainedModel, tokenizer, op: str) -> dict[str, float | None]:
    """Accuracy and style of one agent on the held-out problems of one operation."""
    problems = held_out(op)
    greedy = answers(model, tokenizer, problems, None)
    sampled = answers(model, tokenizer, problems, SAMPLES)
    right = [[is_right(text, problem) for text in texts] for problem, texts in zip(problems, sampled, strict=True)]
    worked = [[not text.startswith("\\boxed") for text in texts] for texts in sampled]
    flat = [(w, r) for ws, rs in zip(worked, right, strict=True) for w, r in zip(ws, rs, strict=True)]
    return {
        "greedy": share([is_right(texts[0], problem) for problem, texts in zip(problems, greedy, strict=True)]),
        "worked_share": share([w for w, _ in flat]),
        "sampled": share([r for _, r in flat]),
        "worked_right": share([r for w, r in flat if w]),
        "careless_right": share([r for w, r in flat if not w]),
        "best_at_8": share([any(rs) for rs in right]),
    }


def measure(spec: AgentSpec, model: PreTrainedModel, tokenizer, seed: int) -> dict:
    """Everything the README reports about one agent, except its size on disk."""
    torch.manual_seed(0)
    example = FORMATS[spec.skill.answer_format](Problem(37, "+", 58))
    problems = held_out("+") + held_out("-")
    skilled = answers(skilled_model(spec.skill, seed), tokenizer, problems, None)
    return {
        "parameters": model.num_parameters(),
        "example_tokens": len(tokenizer(example, add_special_tokens=False)["input_ids"]) + 1,  # + eos
        "skill_greedy": share([is_right(texts[0], p) for p, texts in zip(problems, skilled, strict=True)]),
        "sums": measure_operation(model, tokenizer, "+"),
        "differences": measure_operation(model, tokenizer, "-"),
    }


def table(measured: dict[str, dict]) -> str:
    """The measurements as the README's Markdown table; sums / differences in each cell."""
    keys = ["greedy", "worked_share", "sampled", "worked_right", "careless_right", "best_at_8"]
    head = ["agent", "parameters", "bytes", "tokens", "skill", *keys]
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, m in measured.items():
        cells = [name, f"{m['parameters']:,}", f"{m['bytes']:,}", str(m["example_tokens"]), str(m["skill_greedy"])]
        cells += [f"{m['sums'][key]} / {m['differences'][key]}" for key in keys]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


# ── 6. Writing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> int:
    """Write one agent under a temporary name, then rename, so a folder is whole or absent; returns its bytes."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return sum(file.stat().st_size for file in folder.iterdir())


def write_json(content: dict, path: Path) -> None:
    """Write JSON under a temporary name, then rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    temporary.rename(path)


def remember(name: str, measured: dict, path: Path) -> None:
    """Add one agent's measurements to those on disk, in the order of AGENTS."""
    everything = {**(json.loads(path.read_text()) if path.exists() else {}), name: measured}
    write_json({spec.name: everything[spec.name] for spec in AGENTS if spec.name in everything}, path)


def build(spec: AgentSpec, seed: int, out: Path) -> dict:
    """Train, save and measure one agent."""
    start = time.perf_counter()
    tokenizer = TOKENIZERS[spec.skill.family]()
    model = styled_model(spec, seed)
    size = save(model, tokenizer, out / spec.name)
    measured = measure(spec, model, tokenizer, seed)
    return {"seed": seed, "bytes": size, **measured, "seconds": round(time.perf_counter() - start)}


def main() -> None:
    """Build the agents asked for, and say what they can do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the one seed everything follows from")
    parser.add_argument("--only", nargs="+", choices=[spec.name for spec in AGENTS], help="build these agents alone")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "agents", help="where the folders go")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; another number, other last digits")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)

    write_json(SETS, args.out / "sets.json")
    for spec in AGENTS:
        if not args.only or spec.name in args.only:
            remember(spec.name, build(spec, args.seed, args.out), args.out / "measured.json")
    measured = json.loads((args.out / "measured.json").read_text())
    print(table(measured))
    print(f"seconds: {sum(m['seconds'] for m in measured.values())}")


if __name__ == "__main__":
    main()
