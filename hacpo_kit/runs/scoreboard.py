"""Many agents on many test sets, in batches; stopped at any moment, it goes on where it stopped.

    agents × sets  →  answers/<agent>/<set>.jsonl, batch by batch  →  eval.json, eval.md, eval.csv

Each batch draws from a stream of its own, so what was done before it does not matter: the end is the same with and
without a stop, and the same as that of `evaluate` with this batch size.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from hacpo_kit.common.files import append_lines, locked, read_lines, write_json, write_text
from hacpo_kit.models.agents import Agent, built_in_sets, each, load_agent
from hacpo_kit.rewards import boxed_math, score
from hacpo_kit.rollouts import Sampling, check_request, sample_batches
from hacpo_kit.runs.checkpoints import versions
from hacpo_kit.runs.evaluation import how_often, summary
from hacpo_kit.tasks.arithmetic import ARITHMETIC_SETS
from hacpo_kit.tasks.benchmarks import ANSWER_TOKENS, BENCHMARKS
from hacpo_kit.tasks.loading import load_problems
from hacpo_kit.tasks.problems import Problems

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class AskedSet:
    """Problems, and how they are asked and scored."""

    name: str
    problems: Problems
    k: int
    samples: int
    temperature: float
    max_new_tokens: int

    @property
    def metric(self) -> str:
        """The number that stands in the table."""
        return f"best@{self.k}" if self.k > 1 else f"avg@{self.samples}"

    def described(self) -> dict[str, Any]:
        """What must be the same again for its answers to be used again."""
        asked = {key: getattr(self, key) for key in ("k", "samples", "temperature", "max_new_tokens")}
        return {"problems": len(self.problems), "fingerprint": self.problems.fingerprint(), **asked}


@dataclass(frozen=True, repr=False)
class Scoreboard:
    """The results: scores[agent][set] as `evaluate` gives them, and the metric of each set that the table shows."""

    scores: Mapping[str, Mapping[str, Mapping[str, float]]]
    metrics: Mapping[str, str]
    remarks: tuple[str, ...]
    folder: Path

    def __repr__(self) -> str:
        return f"Scoreboard({len(self.scores)} agents, sets {', '.join(self.metrics)}, in {str(self.folder)!r})"

    def to_frame(self) -> pd.DataFrame:
        """One row an agent, one column a set with its metric, and their mean (NaN if one set has no score)."""
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
        """The same as a Markdown table, with the remarks below."""
        frame = self.to_frame()
        rows = [[agent, *(f"{v:.3f}" if v == v else "–" for v in row)] for agent, row in frame.iterrows()]
        head = ["agent", *frame.columns]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        lines = [
            "| " + " | ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(cells)) + " |"
            for cells in (list(zip(row, widths, strict=True)) for row in (head, *rows))
        ]
        rule = "|" + "|".join("-" * (w + 2 - (i > 0)) + ":" * (i > 0) for i, w in enumerate(widths)) + "|"
        return "\n".join([lines[0], rule, *lines[1:], *(f"\n{remark}" for remark in self.remarks)]) + "\n"

    def write(self) -> None:
        """eval.json (every count), eval.md and eval.csv (the table) in the folder."""
        plain = {
            agent: {n: {m: None if v != v else v for m, v in values.items()} for n, values in sets.items()}
            for agent, sets in self.scores.items()
        }
        write_json(self.folder / "eval.json", {"metrics": self.metrics, "scores": plain, "remarks": list(self.remarks)})
        write_text(self.folder / "eval.md", self.to_markdown())
        write_text(self.folder / "eval.csv", self.to_frame().to_csv())


def evaluate_sets(
    agents: Sequence[str | Agent],
    sets: Sequence[str] | Mapping[str, Problems],
    out: str | Path,
    *,
    k: int | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    limit: int | None = None,
    batch_size: int = 128,
    seed: int = 0,
    reward_function: Callable = boxed_math,
    progress: bool = True,
    **load: Any,
) -> Scoreboard:
    """Every agent on every set, with all answers in `out`; the same call goes on where a stopped one ended.

    Agents: built-in names and sets, folders, hub ids, any of them as "name=…", or Agents. Sets: names (arithmetic sets,
    benchmarks), files, hub ids, "gsm8k=file" for a file in a benchmark's form, or problems by name. Without k and samples
    each set has its own metric: avg@1 (greedy), AIME 2025 best@30. `max_new_tokens` is by default 32 for the arithmetic
    sets and 4096 for others; `limit` keeps the first problems of each set; `load` goes to `load_agent`.

    Raises ValueError for what cannot be asked, and if `out` holds answers under other settings.
    """
    opened = open_sets(sets, limit, k, samples, temperature, max_new_tokens)
    sources = list(_sources(agents))
    folder, scores = Path(out), {}
    with locked(folder / ".lock", what=f"evaluation {folder}"):
        common = {"seed": seed, "batch_size": batch_size, "reward_function": reward_function.__qualname__}
        _agree(folder, "settings", {"all": common} | {f"set {s.name}": s.described() for s in opened})
        total = len(sources) * sum(len(s.problems) * s.samples for s in opened)
        with tqdm(total=total, unit="answer", disable=None if progress else True) as bar:
            for agent in _loaded(sources, load):
                _agree(folder, "agents", {agent.name: _identity(agent)})
                scores[agent.name] = {}
                for asked in opened:
                    bar.set_description(f"{agent.name} on {asked.name}")
                    values = _answer(agent, asked, folder, batch_size, seed, reward_function, bar)
                    scores[agent.name][asked.name] = values
                    if bar.disable and progress:
                        print(f"{agent.name} on {asked.name}: {asked.metric} {values[asked.metric]:.3f}", flush=True)
                del agent  # one model in memory at a time
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        board = Scoreboard(scores, {s.name: s.metric for s in opened}, _remarks(scores, opened), folder)
        board.write()
    return board


# ── what is asked ────────────────────────────────────────────────────────────────────────────────────────────────


def open_sets(sets, limit=None, k=None, samples=None, temperature=None, max_new_tokens=None) -> list[AskedSet]:
    """The sets with all settings filled in; raises ValueError, before any model is loaded, for what cannot be asked."""
    named = list(sets.items()) if isinstance(sets, Mapping) else [(None, text) for text in sets]
    opened = []
    for given, source in named:
        name, problems = _open_set(source, limit) if given is None else (given, source)
        problems = problems if isinstance(problems, Problems) else load_problems(list(problems))
        usual = BENCHMARKS.get(name)
        wanted = samples if samples is not None else k if k is not None else usual.samples if usual else 1
        best = k if k is not None else min(usual.k, wanted) if usual else 1
        count, heat = how_often(best, wanted, temperature)
        usual_room = 32 if problems.name in ARITHMETIC_SETS else ANSWER_TOKENS
        room = usual_room if max_new_tokens is None else max_new_tokens
        opened.append(AskedSet(name, problems, best, count, heat, room))
    names = [s.name for s in opened]
    if len(set(map(_file_name, names))) < len(names) or not names:
        raise ValueError(
            f"need test sets with different names, got {', '.join(names) or 'none'}; NAME=FILE renames one"
        )
    return opened


def _open_set(text: str, limit: int | None) -> tuple[str, Problems]:
    name, mark, source = (text, "", "") if Path(text).exists() else text.partition("=")
    if mark and name in BENCHMARKS:
        return name, load_problems(source, benchmark=name, limit=limit)
    if mark:
        return name, load_problems(source, limit=limit)
    if text in ARITHMETIC_SETS:
        return text, load_problems(text, split="test", size=limit)
    return (text if text in BENCHMARKS else Path(text).stem), load_problems(text, limit=limit)


def _sources(agents: Sequence[str | Agent]) -> Iterator[tuple[str | None, str | Agent]]:
    """Name (None: the agent's own) and source of every agent, built-in sets taken apart."""
    for given in [agents] if isinstance(agents, str | Agent) else agents:
        if isinstance(given, Agent):
            yield given.name, given
        elif given in (sets := built_in_sets()):
            yield from ((None, name) for name in sets[given]["agents"])
        elif (match := re.fullmatch(r"([\w.+-]+)=(.+)", given)) and not Path(given).exists():
            yield match[1], match[2]
        else:
            yield None, given


def _loaded(sources: Sequence[tuple[str | None, str | Agent]], load: Mapping[str, Any]) -> Iterator[Agent]:
    """One agent after the other, so that only one has to fit into memory."""
    taken: set[str] = set()
    for name, source in sources:
        if isinstance(source, Agent):
            agent = source
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*lose updates smaller.*")  # nobody trains here
                agent = load_agent(source, name=name, **load)
        if _file_name(agent.name) in taken:
            raise ValueError(f"two agents are called {agent.name!r}; name one with NAME={source}")
        taken.add(_file_name(agent.name))
        yield agent
        if not isinstance(source, Agent) and hasattr(agent.engine, "close"):
            agent.engine.close()
        del agent  # before the next is loaded


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _answer(
    agent: Agent, asked: AskedSet, folder: Path, size: int, seed: int, reward_function, bar
) -> dict[str, float]:
    """Scores of one agent on one set; what an earlier call has finished is read and not asked again."""
    path = folder / "answers" / _file_name(agent.name) / f"{_file_name(asked.name)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    sampling = Sampling(asked.samples, asked.temperature, asked.max_new_tokens, ("evaluation", seed), size)
    check_request([agent], asked.problems, sampling)
    gold = {p.id: p.gold for p in asked.problems}
    rows, done = finished_batches(path, len(gold) * asked.samples, size)
    bar.update(len(rows))
    for number, batch in enumerate(sample_batches(agent, asked.problems, sampling, skip=done), start=done):
        verdicts = score([(r.text, gold[r.problem]) for r in batch], fn=reward_function)
        lines = [
            {"batch": number, "problem": r.problem, "sample": r.sample, "text": r.text, "gold": gold[r.problem],
             "reward": v.reward, "status": v.status, "tokens": len(r.token_ids), "ended": r.ended}
            for r, v in zip(batch, verdicts, strict=True)
        ]  # fmt: skip
        append_lines(path, lines)
        rows += lines
        bar.update(len(lines))
    return summary([SimpleNamespace(**row) for row in rows], asked.k, asked.samples)


def finished_batches(path: Path, total: int, size: int) -> tuple[list[dict[str, Any]], int]:
    """The rows of all whole batches, and how many these are; what a stop has cut is taken out of the file."""
    rows, whole = read_lines(path), 0
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["batch"], []).append(row)
    while whole * size < total and len(groups.get(whole, ())) == min(size, total - whole * size):
        whole += 1
    kept = [row for number in range(whole) for row in groups[number]]
    if path.exists():
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    return kept, whole


def _remarks(scores: Mapping[str, Mapping[str, Mapping[str, float]]], sets: Sequence[AskedSet]) -> tuple[str, ...]:
    """What a reader of the table has to know."""
    out = [f"{s.name}: {note}" for s in sets for note in s.problems.notes]
    limits = {s.name: s.max_new_tokens for s in sets}
    for agent, values in scores.items():
        for name, v in values.items():
            if v["cut"]:
                out.append(f"{agent} on {name}: {v['cut']} of {v['answers']} answers were cut at {limits[name]} tokens")
            if v["unscorable"]:
                out.append(f"{agent} on {name}: {v['unscorable']} of {v['answers']} answers cannot be scored")
    return tuple(out)


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────────


def _agree(folder: Path, part: str, now: Mapping[str, Any]) -> None:
    """Adds to settings.json; raises ValueError for what stands there otherwise. New agents and sets may be added."""
    path = folder / "settings.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"versions": versions()}
    if stored["versions"] != versions():
        warnings.warn(f"{folder} was begun with other versions of its packages, see settings.json", stacklevel=3)
    before = stored.setdefault(part, {})
    changed = [
        f"{name}, {key}: {before[name].get(key)!r} → {value!r}"
        for name, values in now.items()
        for key, value in values.items()
        if name in before and before[name].get(key) != value
    ]
    if changed:
        raise ValueError(
            f"{folder} holds answers under other settings ({'; '.join(changed)}); choose another folder for these"
        )
    if not now.items() <= before.items():
        stored[part] = {**before, **now}
        write_json(path, stored)


def _identity(agent: Agent) -> dict[str, Any]:
    return each([agent], _marks)[0]


def _marks(agent: Agent) -> dict[str, Any]:
    mark = hashlib.sha256()
    for name, p in agent.model.named_parameters():  # a little of each: training moves them all
        mark.update(name.encode() + p.detach().reshape(-1)[:64].float().cpu().numpy().tobytes())
    return {
        "weights": mark.hexdigest()[:16], "dtype": str(agent.dtype).removeprefix("torch."),
        "device": agent.device.type, "prompt_format": "chat" if agent.chat else "plain", "template": agent.template,
        **({"engine": engine} if (engine := agent.loading.get("engine", "transformers")) != "transformers" else {}),
    }  # fmt: skip


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.+=#-]+", "+", name)
