"""The rollouts of a step as HTML, one column an agent; whatever a model wrote is text and nothing else."""

from __future__ import annotations

from typing import NamedTuple

from hacpo_kit.records import Rollout
from hacpo_kit.training import StepResult
from hacpo_kit.views.plots import COLORS, GREY, escaped

MOST = 16  # rollouts of an agent on one problem


class Seen(NamedTuple):
    """What one learner made of a rollout."""

    advantage: float
    ratio: float | None
    clipped: bool


def problem_names(result: StepResult) -> list[str]:
    """One line a problem: the prompt, cut, and how many of its rollouts were right."""
    names = []
    for i, problem in enumerate(result.pool.problems):
        scored = [r.reward for r in result.pool if r.problem == problem.id and r.reward is not None]
        prompt = " ".join(problem.prompt_text.split())
        right = f"mean reward {sum(scored) / len(scored):.2f}" if scored else "not scorable"
        names.append(f"{i + 1}. {prompt[:60]}{'…' if len(prompt) > 60 else ''} ({right})")
    return names


def side_by_side(result: StepResult, problem: int) -> str:
    """One problem's rollouts, a column for each agent: text, reward, status, and what each learner made of it."""
    asked = result.pool.problems[problem]
    views = _views(result)
    columns = []
    for place, agent in enumerate(result.pool.agents):
        mine = [(i, r) for i, r in enumerate(result.pool) if r.problem == asked.id and r.source == agent]
        cards = "".join(_card(r, {name: seen.get(i) for name, seen in views.items()}) for i, r in mine[:MOST])
        more = f"<div style='color:{GREY}'>{len(mine) - MOST} more are not shown</div>" if len(mine) > MOST else ""
        head = f"<b style='color:{COLORS[place % len(COLORS)]}'>{escaped(agent)}</b>"
        columns.append(f"<div style='flex:1 1 320px;min-width:260px'>{head}{cards}{more}</div>")
    prompt = (
        f"step {result.metrics['step']}: {_code(asked.prompt_text, 600)} &nbsp; right answer: {_code(asked.gold, 200)}"
    )
    return f"<div>{prompt}</div><div style='display:flex;flex-wrap:wrap;gap:16px'>{''.join(columns)}</div>"


def _views(result: StepResult) -> dict[str, dict[int, Seen]]:
    """Learner → position in the pool → advantage, importance ratio, and whether the clip took its gradient."""
    views: dict[str, dict[int, Seen]] = {}
    for name, batch in result.batches.items():
        ratios = {
            int(i): (float(s), bool(hit))
            for part in result.stats[name].minibatches
            for i, s, hit in zip(part.index, part.ratio, part.clipped, strict=True)
        }
        views[name] = {
            i: Seen(a, *ratios.get(i, (None, False)))
            for i, a in zip(batch.index, batch.advantages.tolist(), strict=True)
        }
    return views


def _card(rollout: Rollout, views: dict[str, Seen | None]) -> str:
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    color = COLORS[2] if rollout.reward else GREY
    seen = "".join(f"<div>{escaped(name)}: {_told(view)}</div>" for name, view in views.items())
    cut = "" if rollout.ended else ", cut at the length limit"
    return (
        f"<div style='border-left:3px solid {color};padding:2px 8px;margin:6px 0;line-height:1.35'>"
        f"{_code(rollout.text, 400)}<div style='color:{GREY};font-size:90%'>"
        f"<div><b>{reward}</b>, {escaped(rollout.status)}{cut}</div>{seen}</div></div>"
    )


def _told(view: Seen | None) -> str:
    if view is None:
        return "not used"
    if view.ratio is None:
        return f"A {view.advantage:+.2f}"
    return f"A {view.advantage:+.2f}, s {view.ratio:.3f}{', clipped' if view.clipped else ''}"


def _code(text: str, longest: int) -> str:
    return f"<code style='white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate'>{escaped(text, longest)}</code>"


__all__ = ["problem_names", "side_by_side"]
