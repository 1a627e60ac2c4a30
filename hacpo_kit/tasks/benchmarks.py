r"""The seven benchmarks of the paper: where each lies, which columns it has, and what in them is the gold answer.

    load_problems("gsm8k")  │  load_problems("gsm8k-test.jsonl", benchmark="gsm8k")

A row without a usable gold stays, with gold "" and the reason in its meta: it pays nobody and is counted and named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hacpo_kit.tasks.verifier import last_box

# The questions themselves do not say how to answer. In our own words, and the same for all seven.
TEMPLATE = "{prompt}\n\nReason step by step, and put the final answer, and nothing else, into \\boxed{}."
ANSWER_TOKENS = 4096  # the paper's limit on an answer


class NoGold(ValueError):
    """A row whose answer cannot be checked; the message says why."""


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        raise NoGold(f"{column} is empty")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # AMC: 27.0 means 27
    return str(value).strip()


def _after_hashes(row: Mapping[str, Any], column: str) -> str:
    _, mark, gold = _text(row, column).rpartition("####")
    if not mark or not gold.strip():
        raise NoGold(f"{column} has nothing after ####")
    return gold.strip()


def _boxed(row: Mapping[str, Any], column: str) -> str:
    gold = last_box(_text(row, column))
    if gold is None:
        raise NoGold(rf"{column} has no \boxed{{}} that is closed and not empty")
    return gold


def _final_answer(row: Mapping[str, Any], column: str) -> str:
    answers = row[column] if row[column] is not None else []
    answers = [str(answer).strip() for answer in ([answers] if isinstance(answers, str) else answers)]
    if not answers or not all(answers):
        raise NoGold(f"{column} is empty: an open question or a proof")
    if row.get("answer_type") == "Need_human_evaluate":
        raise NoGold("answer_type says that a person has to judge the answer")
    gold = ", ".join(answers).rstrip(".")
    tolerance = str(row.get("error") or "").strip()
    if "," in tolerance:
        raise NoGold(f"several tolerances ({tolerance}) are more than the verifier knows")
    return rf"{gold} (tolerance {tolerance})" if tolerance else gold


def _ask_olympiad(row: Mapping[str, Any], question: str) -> str:
    parts = [row.get("context") or "", question]
    if row.get("is_multiple_answer"):
        parts.append("There is more than one answer: put all of them into the box, separated by commas.")
    if row.get("unit"):
        parts.append(f"The answer is wanted in the unit ${row['unit']}$, which need not be written.")
    return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark; `questions` and `golds` name columns, and the first that a data set has is used."""

    title: str
    dataset: str  # Hugging Face id
    config: str | None
    split: str
    questions: tuple[str, ...]
    golds: Mapping[str, Callable[[Mapping[str, Any], str], str]]
    samples: int = 1  # answers to each problem
    k: int = 1  # of best@k; 1: avg@1, greedy
    ask: Callable[[Mapping[str, Any], str], str] = lambda row, question: question

    @property
    def metric(self) -> str:
        """The number that the paper reports."""
        return f"best@{self.k}" if self.k > 1 else f"avg@{self.samples}"


_ANY = ("problem", "question")
BENCHMARKS = {
    "math500": Benchmark("MATH-500", "HuggingFaceH4/MATH-500", None, "test", ("problem",), {"answer": _text}),
    "math": Benchmark("MATH", "DigitalLearningGmbH/MATH-lighteval", None, "test", ("problem",), {"solution": _boxed}),
    "gsm8k": Benchmark("GSM8K", "openai/gsm8k", "main", "test", ("question",), {"answer": _after_hashes}),
    "aime25": Benchmark("AIME 2025", "math-ai/aime25", None, "test", _ANY, {"answer": _text}, samples=30, k=30),
    "amc23": Benchmark("AMC 2023", "math-ai/amc23", None, "test", _ANY, {"answer": _text}),
    # two copies are about: one with the worked solution, one with its answer cut out
    "minerva_math": Benchmark(
        "Minerva Math", "math-ai/minervamath", None, "test", _ANY, {"solution": _boxed, "answer": _text}
    ),
    "olympiadbench": Benchmark(
        "OlympiadBench", "Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train", ("question",),
        {"final_answer": _final_answer}, ask=_ask_olympiad,
    ),
}  # fmt: skip


def table() -> str:
    """The benchmarks as a Markdown table."""
    head = "| name | benchmark | data set, config, split | question | gold | metric |\n|---|---|---|---|---|---|\n"
    hows = {_text: "", _after_hashes: " after `####`", _boxed: r", last `\boxed{}`", _final_answer: ", all entries"}

    def line(name: str, b: Benchmark) -> str:
        where = ", ".join(f"`{part}`" for part in (b.dataset, b.config, b.split) if part)
        golds = " or ".join(f"`{column}`{hows[how]}" for column, how in b.golds.items())
        questions = " or ".join(f"`{column}`" for column in b.questions)
        return f"| `{name}` | {b.title} | {where} | {questions} | {golds} | {b.metric} |"

    return head + "\n".join(line(name, b) for name, b in BENCHMARKS.items()) + "\n"


def read_row(benchmark: Benchmark, row: Mapping[str, Any], question: str, gold: str) -> tuple[str, str, dict[str, Any]]:
    """Prompt (without the template), gold and meta of a row; a gold that cannot be had is "" with meta["no_gold"]."""
    meta = {str(key): value for key, value in row.items() if key != question}
    asked = row[question]
    prompt = benchmark.ask(row, asked) if isinstance(asked, str) and asked.strip() else asked
    try:
        return prompt, benchmark.golds[gold](row, gold), meta
    except NoGold as reason:
        return prompt, "", {**meta, "no_gold": str(reason)}


def find_columns(benchmark: Benchmark, columns: list[str], told: str) -> tuple[str, str]:
    """The columns of question and gold; raises ValueError that says which is missing."""
    found = []
    for what, wanted in (("question", benchmark.questions), ("gold answer", tuple(benchmark.golds))):
        column = next((name for name in wanted if name in columns), None)
        if column is None:
            listed = ", ".join(map(repr, columns))
            raise ValueError(
                f"{told} has no column {' or '.join(map(repr, wanted))}, which holds the {what} of {benchmark.title}; "
                f"it has {listed}. For a table of another form leave out benchmark= and name prompt= and gold="
            )
        found.append(column)
    return found[0], found[1]
