"""The rollouts of a step as escaped HTML, one column per agent."""

from __future__ import annotations

from hacpo_kit.records import Rollout, StepResult
from hacpo_kit.views.markup import escaped
from hacpo_kit.views.style import COLORS, GREY

MOST = 16  # rollouts that are shown per agent


def problem_names(result: StepResult) -> list[str]:
    """Return one line per problem: the beginning of the prompt and the mean reward of its rollouts."""
    names = []
    for i, problem in enumerate(result.pool.problems, start=1):
        rewards = [r.reward for r in result.pool if r.problem == problem.id and r.reward is not None]
        prompt = " ".join(problem.prompt_text.split())
        mean = f"mean reward {sum(rewards) / len(rewards):.2f}" if rewards else "not scorable"
        names.append(f"{i}. {prompt[:60]}{'…' if len(prompt) > 60 else ''} ({mean})")
    return names


def side_by_side(result: StepResult, problem: int) -> str:
    """Return the rollouts of one problem, one column per agent: text, reward, status, and how each learner used it."""
    problem = result.pool.problems[problem]
    uses = _uses(result)
    columns = []
    for place, agent in enumerate(result.pool.agents):
        rollouts = [(i, r) for i, r in enumerate(result.pool) if r.problem == problem.id and r.source == agent]
        cards = "".join(
            _card(r, {name: used.get(i, "not used") for name, used in uses.items()}) for i, r in rollouts[:MOST]
        )
        hidden = len(rollouts) - MOST
        more = f"<div style='color:{GREY}'>{hidden} more are not shown</div>" if hidden > 0 else ""
        head = f"<b style='color:{COLORS[place % len(COLORS)]}'>{escaped(agent)}</b>"
        columns.append(f"<div style='flex:1 1 320px;min-width:260px'>{head}{cards}{more}</div>")
    prompt = f"{_code(problem.prompt_text, 600)} &nbsp; gold answer: {_code(problem.gold, 200)}"
    return (
        f"<div>step {result.metrics['step']}: {prompt}</div>"
        f"<div style='display:flex;flex-wrap:wrap;gap:16px'>{''.join(columns)}</div>"
    )


def _uses(result: StepResult) -> dict[str, dict[int, str]]:
    """Return advantage A and importance ratio s for each learner, by the position of the rollout in the pool."""
    uses = {}
    for name, batch in result.batches.items():
        uses[name] = {i: f"A {a:+.2f}" for i, a in zip(batch.index, batch.advantages.tolist(), strict=True)}
        for part in result.stats[name].minibatches:
            for i, ratio, clipped in zip(part.index, part.ratio, part.clipped, strict=True):
                uses[name][int(i)] += f", s {ratio:.3f}{', clipped' if clipped else ''}"
    return uses


def _card(rollout: Rollout, uses: dict[str, str]) -> str:
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    color = COLORS[2] if rollout.reward else GREY
    learners = "".join(f"<div>{escaped(name)}: {use}</div>" for name, use in uses.items())
    cut = "" if rollout.ended else ", cut at the length limit"
    return (
        f"<div style='border-left:3px solid {color};padding:2px 8px;margin:6px 0;line-height:1.35'>"
        f"{_code(rollout.text, 400)}<div style='color:{GREY};font-size:90%'>"
        f"<div><b>{reward}</b>, {escaped(rollout.status)}{cut}</div>{learners}</div></div>"
    )


def _code(text: str, longest: int) -> str:
    return f"<code style='white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate'>{escaped(text, longest)}</code>"
