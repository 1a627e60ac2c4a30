"""Evaluation of many agents on many test sets, in batches; the same call resumes a stopped evaluation.

    agents × sets  →  answers/<agent>/<set>.jsonl, batch by batch  →  eval.json, eval.md, eval.csv

Each batch has a seed of its own, so the result is the same with and without a stop, and equals `evaluate` with this batch size.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from hacpo_kit.common.files import append_lines, locked, read_json, read_lines, write_json, write_lines, write_text
from hacpo_kit.models.agents import Agent
from hacpo_kit.models.loading import load_agent
from hacpo_kit.models.sources import built_in_sets
from hacpo_kit.rewards import boxed_math, score
from hacpo_kit.rollouts import Sampling, check_request, sample_batches
from hacpo_kit.runs.evaluation import sampling_of, summary
from hacpo_kit.runs.record import differences, listed, versions
from hacpo_kit.tasks.arithmetic import ARITHMETIC_SETS
from hacpo_kit.tasks.benchmarks import ANSWER_TOKENS, BENCHMARKS
from hacpo_kit.tasks.loading import load_problems
from hacpo_kit.tasks.problems import Problems

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Scoreboard:
    """The scores: scores[agent][set] as from `evaluate`, and the metric of each set that the table shows."""

    scores: Mapping[str, Mapping[str, Mapping[str, float]]]
    metrics: Mapping[str, str]
    remarks: Sequence[str]
    folder: Path

    def __repr__(self) -> str:
        return f"Scoreboard({len(self.scores)} agents, sets {', '.join(self.metrics)}, in {str(self.folder)!r})"

    def to_frame(self) -> pd.DataFrame:
        """Return one row per agent, one column per set, and their mean (NaN if a set has no score)."""
        import pandas as pd

        rows = {
            agent: {f"{name} {metric}": values[name][metric] for name, metric in self.metrics.items()}
            for agent, values in self.scores.items()
        }
        frame = pd.DataFrame(rows).T.rename_axis("agent")
        if len(self.metrics) > 1:
            frame["average"] = frame.mean(axis=1, skipna=False)
        return frame

    def to_markdown(self) -> str:
        """Return the table as Markdown, followed by the remarks."""
        frame = self.to_frame().astype(object)
        table = frame.where(frame.notna(), None).to_markdown(floatfmt=".3f", missingval="–")
        return "\n\n".join([table, *self.remarks]) + "\n"

    def write(self) -> None:
        """Write eval.json (all counts), eval.md and eval.csv (the table) to the folder."""
        scores = {
            agent: {n: {m: None if v != v else v for m, v in values.items()} for n, values in sets.items()}
            for agent, sets in self.scores.items()
        }
        content = {"metrics": self.metrics, "scores": scores, "remarks": list(self.remarks)}
        write_json(self.folder / "eval.json", content)
        write_text(self.folder / "eval.md", self.to_markdown())
        write_text(self.folder / "eval.csv", self.to_frame().to_csv())


def evaluate_sets(
    agents: Sequence[str | Agent],
    sets: Sequence[str] | Mapping[str, Problems],
    out: str | Path,
    *,
    limit: int | None = None,
    reward_function: Callable = boxed_math,
    progress: bool = True,
    loading: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> Scoreboard:
    """Evaluate every agent on every set; `out` keeps all answers, and the same call resumes a stopped evaluation.

    Agents: built-in agents and sets, folders, hub ids (each also as "name=…"), or loaded agents. Sets: arithmetic sets,
    benchmarks, files, hub ids, "gsm8k=file" for a file in a benchmark's form, or problems by name. `limit` keeps the first
    problems of each set, `loading` has options of `load_agent`. `sampling` is that of `evaluate` and k, with a batch size
    of 128. By default each set has its own metric: avg@1 (greedy), AIME 2025 best@30. `max_new_tokens` is by default 32
    for the arithmetic sets and 4096 for others.

    Raises ValueError for invalid settings, and if `out` holds answers with other settings.
    """
    opened, folder = open_sets(sets, limit, **sampling), Path(out)
    sources = list(_sources(agents))
    scores: dict[str, dict[str, dict[str, float]]] = {}
    with locked(folder / ".lock", what=f"evaluation {folder}"):
        function = {"reward_function": reward_function.__qualname__}
        _check_settings(folder, {f"set {s.name}": {**s.settings(), **function} for s in opened})
        total = len(sources) * sum(len(s.problems) * s.sampling.n for s in opened)
        with tqdm(total=total, unit="rollout", disable=None if progress else True) as bar:
            for agent in _loaded(sources, loading or {}):
                _check_settings(folder, {f"agent {agent.name}": agent.submit(_identity).result()})
                scores[agent.name] = {}
                for test in opened:
                    bar.set_description(f"{agent.name} on {test.name}")
                    scores[agent.name][test.name] = _evaluate(agent, test, folder, reward_function, bar)
                del agent  # one model in memory at a time
        board = Scoreboard(scores, {s.name: s.metric for s in opened}, _remarks(scores, opened), folder)
        board.write()
    return board


def _sources(agents: Sequence[str | Agent]) -> Iterator[tuple[str | None, str | Agent]]:
    """Yield name (None: the agent's own) and source of every agent; a built-in set yields its members."""
    for source in [agents] if isinstance(agents, str | Agent) else agents:
        if source in (sets := built_in_sets()):
            yield from ((None, name) for name in sets[source]["agents"])
        elif (
            isinstance(source, str)
            and (match := re.fullmatch(r"([\w.+-]+)=(.+)", source))
            and not Path(source).exists()
        ):
            yield match[1], match[2]
        else:
            yield None, source


def _loaded(sources: Sequence[tuple[str | None, str | Agent]], loading: Mapping[str, Any]) -> Iterator[Agent]:
    """Yield one loaded agent after the other, so that only one has to fit in memory."""
    names: set[str] = set()
    for name, source in sources:
        agent = source
        if not isinstance(source, Agent):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*lose updates smaller.*")  # an evaluation does not train
                agent = load_agent(source, name=name, **loading)
        if file_name(agent.name) in names:
            raise ValueError(f"two agents have the name {agent.name!r}; rename one with NAME={source}")
        names.add(file_name(agent.name))
        yield agent
        if agent is not source and hasattr(agent.engine, "close"):
            agent.engine.close()
        del agent  # before the next one is loaded


def _evaluate(agent: Agent, test: TestSet, folder: Path, reward_function: Callable, bar: tqdm) -> dict[str, float]:
    """Return the scores of one agent on one set; batches that an earlier call finished are read from the folder."""
    path = folder / "answers" / file_name(agent.name) / f"{file_name(test.name)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    check_request([agent], test.problems, test.sampling)
    gold = {p.id: p.gold for p in test.problems}
    rows, done = finished_batches(path, len(gold) * test.sampling.n, test.sampling.batch_size)
    bar.update(len(rows))
    for number, batch in enumerate(sample_batches(agent, test.problems, test.sampling, skip=done), start=done):
        verdicts = score([(r.text, gold[r.problem]) for r in batch], fn=reward_function)
        lines = [
            {"batch": number, "problem": r.problem, "sample": r.sample, "text": r.text, "gold": gold[r.problem],
             "reward": v.reward, "status": v.status, "tokens": len(r.token_ids), "ended": r.ended}
            for r, v in zip(batch, verdicts, strict=True)
        ]  # fmt: skip
        append_lines(path, lines)
        rows += lines
        bar.update(len(lines))
    return summary([SimpleNamespace(**row) for row in rows], test.k, test.sampling.n)


def finished_batches(path: Path, total: int, size: int) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of all complete batches and the number of these batches; removes other rows from the file."""
    rows = read_lines(path)
    done = len(rows) // size if len(rows) < total else -(-total // size)  # the last batch may be smaller
    rows = rows[: done * size]
    if path.exists():
        write_lines(path, rows)
    return rows, done


def _remarks(scores: Mapping[str, Mapping[str, Mapping[str, float]]], sets: Sequence[TestSet]) -> list[str]:
    """Return the sentences below the table: notes on the sets, cut answers, unscorable answers."""
    out = [f"{s.name}: {note}" for s in sets for note in s.problems.notes]
    for agent, test in itertools.product(scores, sets):
        v, limit = scores[agent][test.name], test.sampling.max_new_tokens
        for count, text in (
            (v["cut"], f"were cut at {limit} tokens"),
            (v["unscorable"], "could not be scored and are excluded"),
        ):
            out += [f"{agent} on {test.name}: {count} of {v['answers']} answers {text}"] if count else []
    return out


def _check_settings(folder: Path, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Add settings of sets or agents to settings.json; raises ValueError if they differ from the stored ones."""
    path = folder / "settings.json"
    settings = {f"{part}, {name}": value for part, values in parts.items() for name, value in values.items()}
    stored = read_json(path) if path.exists() else {"versions": versions(), "settings": {}}
    if stored["versions"] != versions():
        warnings.warn(f"{folder} was started with other package versions, see {path}", stacklevel=3)
    if changed := differences(stored["settings"], settings):
        raise ValueError(f"{folder} holds answers with other settings ({listed(changed)}); choose another folder")
    if not settings.items() <= stored["settings"].items():
        write_json(path, {**stored, "settings": stored["settings"] | settings})


def _identity(agent: Agent) -> dict[str, Any]:
    """Return what identifies an agent's policy; runs where the agent's model is."""
    digest = hashlib.sha256()
    for name, p in agent.model.named_parameters():  # a part of each tensor, since training changes all of them
        digest.update(name.encode() + p.detach().reshape(-1)[:64].float().cpu().numpy().tobytes())
    return {
        "weights": digest.hexdigest()[:16], "dtype": str(agent.dtype).removeprefix("torch."),
        "device": agent.device.type, "prompt_format": "chat" if agent.chat else "plain", "template": agent.template,
        "engine": agent.loading.get("engine", "transformers"), **({"stop": list(agent.stop)} if agent.stop else {}),
    }  # fmt: skip


# ── test sets ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TestSet:
    """Problems with the parameters of their evaluation."""

    name: str
    problems: Problems
    k: int
    sampling: Sampling

    @property
    def metric(self) -> str:
        """The metric that stands in the table."""
        return f"best@{self.k}" if self.k > 1 else f"avg@{self.sampling.n}"

    def settings(self) -> dict[str, Any]:
        """Return what must be equal for stored answers to be used again."""
        s = self.sampling
        return {
            "problems": len(self.problems), "fingerprint": self.problems.fingerprint(), "k": self.k, "samples": s.n,
            "temperature": s.temperature, "max_new_tokens": s.max_new_tokens, "batch_size": s.batch_size, "seed": s.seed[1],
        }  # fmt: skip


def open_sets(
    sets: Sequence[str] | Mapping[str, Problems],
    limit: int | None = None,
    *,
    k: int | None = None,
    samples: int | None = None,
    **sampling: Any,
) -> list[TestSet]:
    """Load test sets and fill in their settings; arguments as in `evaluate_sets`.

    Raises ValueError for invalid settings and for sets of the same name.
    """
    opened = []
    for source in sets:
        name, problems = (source, sets[source]) if isinstance(sets, Mapping) else _open_set(source, limit)
        problems = problems if isinstance(problems, Problems) else load_problems(list(problems))
        usual_samples, usual_k = (BENCHMARKS[name].samples, BENCHMARKS[name].k) if name in BENCHMARKS else (1, 1)
        count = samples if samples is not None else k if k is not None else usual_samples
        best = min(usual_k, count) if k is None else k
        options = {"max_new_tokens": 32 if problems.name in ARITHMETIC_SETS else ANSWER_TOKENS, "batch_size": 128}
        options |= {option: value for option, value in sampling.items() if value is not None}
        opened.append(TestSet(name, problems, best, sampling_of(best, samples=count, **options)))
    names = [s.name for s in opened]
    if len(set(map(file_name, names))) < len(names) or not names:
        raise ValueError(
            f"need test sets with different names, got {', '.join(names) or 'none'}; rename with NAME=FILE"
        )
    return opened


def file_name(name: str) -> str:
    """Return a name of an agent or set in a form that every file system takes."""
    return re.sub(r"[^\w.+=#-]+", "+", name)


def _open_set(text: str, limit: int | None) -> tuple[str, Problems]:
    """Return name and problems of a set that is named by text."""
    name, mark, source = (text, "", "") if Path(text).exists() else text.partition("=")
    if mark:
        return name, load_problems(source, benchmark=name if name in BENCHMARKS else None, limit=limit)
    if text in ARITHMETIC_SETS:
        return text, load_problems(text, split="test", size=limit)
    return (text if text in BENCHMARKS else Path(text).stem), load_problems(text, limit=limit)
