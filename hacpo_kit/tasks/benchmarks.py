"""The seven benchmarks of the paper: the dataset of each, its columns, and how to read the reference answer from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hacpo_kit.tasks.boxes import last_box
from hacpo_kit.tasks.problems import Problem

Row = Mapping[str, Any]

# The questions do not say how to answer. This text is ours, and the same for all seven.
TEMPLATE = "{prompt}\n\nReason step by step, and put the final answer, and nothing else, into \\boxed{}."
ANSWER_TOKENS = 4096  # the paper's length limit of a response


class NoGoldError(ValueError):
    """A row without a reference answer that can be checked; the message gives the reason."""


def _text(row: Row, column: str) -> str:
    value = row[column]
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        raise NoGoldError(f"{column} is empty")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # AMC stores 27 as 27.0
    return str(value).strip()


def _after_hashes(row: Row, column: str) -> str:
    _, mark, gold = _text(row, column).rpartition("####")
    if not mark or not gold.strip():
        raise NoGoldError(f"{column} has nothing after ####")
    return gold.strip()


def _boxed(row: Row, column: str) -> str:
    gold = last_box(_text(row, column))
    if gold is None:
        raise NoGoldError(rf"{column} has no closed, non-empty \boxed{{}} at its end")
    return gold


def _final_answer(row: Row, column: str) -> str:
    answers = row[column] if row[column] is not None else []
    answers = [str(answer).strip() for answer in ([answers] if isinstance(answers, str) else answers)]
    if not answers or not all(answers):
        raise NoGoldError(f"{column} is empty: a free-text answer or a proof")
    if row.get("answer_type") == "Need_human_evaluate":
        raise NoGoldError("answer_type says that a person has to judge the answer")
    gold = ", ".join(answers).rstrip(".")
    tolerance = str(row.get("error") or "").strip()
    if "," in tolerance:
        raise NoGoldError(f"the verifier does not support several tolerances ({tolerance})")
    return rf"{gold} (tolerance {tolerance})" if tolerance else gold


def _olympiad_prompt(row: Row, question: str) -> str:
    parts = [row.get("context") or "", question]
    if row.get("is_multiple_answer"):
        parts.append("There is more than one answer: put all of them into the box, separated by commas.")
    if row.get("unit"):
        parts.append(f"The answer is wanted in the unit ${row['unit']}$, which need not be written.")
    return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. `questions` and `golds` name columns; the first one that a dataset has is used."""

    title: str
    dataset: str  # Hugging Face id
    config: str | None
    split: str
    questions: tuple[str, ...]
    golds: Mapping[str, Callable[[Row, str], str]]  # column → function that reads the reference answer from a row
    samples: int = 1  # responses per problem
    k: int = 1  # of best@k; 1: avg@samples
    make_prompt: Callable[[Row, str], str] = lambda row, question: question

    @property
    def metric(self) -> str:
        """The metric that the paper reports."""
        return f"best@{self.k}" if self.k > 1 else f"avg@{self.samples}"

    def problem(self, id: str, row: Row, question: str, gold: str) -> Problem:
        """Return the problem of a row, without the template.

        Without a usable reference answer its gold is "" and meta["no_gold"] gives the reason. Raises ValueError for a row
        without a question.
        """
        meta = {str(column): value for column, value in row.items() if column != question}
        prompt = row[question]
        if isinstance(prompt, str) and prompt.strip():
            prompt = self.make_prompt(row, prompt)
        try:
            return Problem(id, prompt, self.golds[gold](row, gold), meta)
        except NoGoldError as reason:
            return Problem(id, prompt, "", {**meta, "no_gold": str(reason)})


_EITHER = ("problem", "question")
BENCHMARKS = {
    "math500": Benchmark("MATH-500", "HuggingFaceH4/MATH-500", None, "test", ("problem",), {"answer": _text}),
    "math": Benchmark("MATH", "DigitalLearningGmbH/MATH-lighteval", None, "test", ("problem",), {"solution": _boxed}),
    "gsm8k": Benchmark("GSM8K", "openai/gsm8k", "main", "test", ("question",), {"answer": _after_hashes}),
    "aime25": Benchmark("AIME 2025", "math-ai/aime25", None, "test", _EITHER, {"answer": _text}, samples=30, k=30),
    "amc23": Benchmark("AMC 2023", "math-ai/amc23", None, "test", _EITHER, {"answer": _text}),
    # there are two versions: one has the full solution, the other only its answer
    "minerva_math": Benchmark(
        "Minerva Math", "math-ai/minervamath", None, "test", _EITHER, {"solution": _boxed, "answer": _text}
    ),
    "olympiadbench": Benchmark(
        "OlympiadBench", "Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train", ("question",),
        {"final_answer": _final_answer}, make_prompt=_olympiad_prompt,
    ),
}  # fmt: skip
