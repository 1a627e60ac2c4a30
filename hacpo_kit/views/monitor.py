"""A training that runs beside the notebook: start, pause, stop, change settings between steps, and look on meanwhile."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from hacpo_kit.common.files import read_steps
from hacpo_kit.config import Config, did_you_mean
from hacpo_kit.models.agents import Agent, as_list
from hacpo_kit.records import StepResult
from hacpo_kit.runs import changes as recorded
from hacpo_kit.runs.checkpoints import checkpoints
from hacpo_kit.runs.run import Run, history_frame
from hacpo_kit.training import train
from hacpo_kit.views.figure import Figure, panel_axes, panels
from hacpo_kit.views.live import Live
from hacpo_kit.views.markup import escaped, literal
from hacpo_kit.views.style import COLORS, GREY

if TYPE_CHECKING:
    import ipywidgets

    from hacpo_kit.tasks.problems import Problem

MOST_POINTS = 200  # of a curve; beyond them every second one goes, again and again, and the figure says so
MOST_NOTES = 20  # different warnings that are kept
MOST_MARKS = 40  # dotted lines where settings changed
PANELS = {"accuracy": "accuracy on test problems", "reward": "mean reward of the rollouts", "capability": "capability P̂",
          "ratio": "importance ratio s (dashed: peer)"}  # fmt: skip
UNITS = ("share right", "mean reward", "P̂ (mean reward)", "mean s of a step")


class Curve:
    """Points of one line, the newest always among them; at most `most`, beyond which every second one is dropped."""

    def __init__(self, most: int = MOST_POINTS):
        self.most, self.every = most, 1  # every how manyth point is kept
        self.kept: list[tuple[float, float]] = []
        self.newest: tuple[float, float] | None = None
        self.seen = 0

    def add(self, x: float, y: float) -> None:
        """One more point; what stood at this place or beyond is dropped, since those steps are made again."""
        if self.newest and self.newest[0] >= x:
            self.kept = [point for point in self.kept if point[0] < x]
            self.seen = len(self.kept) * self.every
        self.newest = (x, y)
        if self.seen % self.every == 0:
            self.kept.append(self.newest)
        self.seen += 1
        if len(self.kept) > self.most:
            self.kept, self.every = self.kept[::2], 2 * self.every

    def points(self) -> tuple[list[float], list[float]]:
        """x and y of what is drawn."""
        shown = self.kept if self.newest is None or self.newest in self.kept[-1:] else [*self.kept, self.newest]
        return [x for x, _ in shown], [y for _, y in shown]


class Monitor(Live):
    """A training in a thread of its own; displayed, it has buttons, curves, settings and the rollouts of the last step.

    Everything that the buttons do is a method. Pause and Stop end after the current step, with a checkpoint; to go on is
    the same training again from there, bit for bit as if nobody had paused. The state lives in the kernel and in the run
    folder: it may be displayed again anywhere, and after a restart of the kernel the same call goes on.
    """

    def __init__(
        self,
        agents: Agent | Sequence[Agent],
        problems: Sequence[Problem],
        config: Config,
        steps: int,
        *,
        out: str | Path,
        test: Sequence[Problem] | None = None,
        callbacks: Sequence[Callable[[StepResult], Any]] = (),
        **options: Any,
    ):
        known = set(inspect.signature(train).parameters) - {"out", "changes", "progress"}
        if unknown := [name for name in options if name not in known]:
            raise TypeError(f"train has no option {unknown[0]!r}{did_you_mean(unknown[0], known)}")
        self.agents, self.problems, self.steps, self.folder = as_list(agents), problems, steps, Path(out)
        self.options = {"save_first": True, **options, "test": test, "progress": "off"}
        self.first_config = config  # what the run began with; changes come on top
        self.callbacks = tuple(callbacks)
        self.config = config  # in force
        self.pending: dict[str, Any] = {}  # what changes at the next step
        self.changes: list[dict[str, Any]] = []  # lines as in changes.jsonl
        self.step = 0
        self.status = "ready"  # running, pausing, paused, stopping, stopped, finished, failed
        self.error: BaseException | None = None
        self.run: Run | None = None  # of the last call to train
        self.last: StepResult | None = None
        self.line: dict[str, Any] = {}  # metrics of the last step
        self.notes: dict[str, tuple[str, int]] = {}  # warning without its numbers → the last one, and how often
        self.notes_dropped = 0
        self.curves: dict[tuple[str, str, str], Curve] = {}  # (panel, agent, own or peer)
        self.seconds: list[float] = []  # of the last steps
        self._lock, self._starting = threading.RLock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._ending = False  # the thread has decided to end after this step
        self._changed = threading.Event()  # something to draw
        self._shown = False  # on a page
        self._read_folder()

    # ── what the buttons do ──────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> Monitor:
        """Starts the training, or goes on after a pause, a stop or a fault; while it runs, this does nothing."""
        with self._starting:
            self._start()
        return self

    def _start(self) -> None:
        with self._lock:
            if self.running and not self._ending:
                self.status = "running"  # a pause or stop not yet reached is withdrawn
                self._changed.set()
                return
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._read_folder()
            self.status, self.error, self._ending = "running", None, False
            self._thread = threading.Thread(target=self._train, name=f"train {self.folder.name}", daemon=True)
            self._thread.start()
            threading.Thread(target=self._paint, args=(self._thread,), name="monitor", daemon=True).start()

    resume = start

    def pause(self) -> Monitor:
        """Ends after the current step, with a checkpoint; `start` goes on."""
        return self._ask("pausing")

    def stop(self) -> Monitor:
        """As `pause`, for good: the folder holds a complete run of fewer steps. `start` goes on none the less."""
        return self._ask("stopping")

    def change(self, **settings: Any) -> Monitor:
        """Changes settings from the next step on; the run's record says so.

        Raises ValueError for a value that cannot be, and for a setting that cannot change within a run; TypeError for a name
        that is no setting. Nothing changes then.
        """
        with self._lock:
            wanted = {**self.pending, **settings}
            differences = recorded.check_change(self.config, self.config.replace(**wanted))
            prompts = self.config.replace(**wanted).prompts_per_step
            if prompts > len(self.problems):
                raise ValueError(f"prompts_per_step={prompts}: there are only {len(self.problems)} problems")
            self.pending = {name: new for name, (_, new) in differences.items()}
        self._changed.set()
        self._draw_if_idle()
        return self

    def wait(self, timeout: float | None = None) -> Run:
        """Blocks until the training ends, is paused, or fails, and returns its `Run`.

        An interrupt ends the waiting, not the training. Raises what the training raised, RuntimeError if it was never
        started, TimeoutError after `timeout` seconds.
        """
        if self._thread is None:
            raise RuntimeError("the training was not started: call start() first")
        end = None if timeout is None else time.monotonic() + timeout
        while self.running:
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"the training still runs after {timeout} s, in step {self.step + 1}")
            self._thread.join(0.1)
        if self.error is not None:
            raise self.error
        return self.run

    @property
    def running(self) -> bool:
        """True while the thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    def to_frame(self) -> pd.DataFrame:
        """One row a step and agent, as the run folder has them."""
        return history_frame(read_steps(self.folder / "metrics.jsonl"))

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, status: str) -> Monitor:
        with self._lock:
            if self.running:
                self.status = status
        self._changed.set()
        return self

    def _train(self) -> None:
        with self._lock:
            changes, self.pending = self.pending, {}
            self._note_changes(self.config.replace(**changes))
        try:
            with _heard(self._warned):
                run = train(
                    self.agents, self.problems, self.first_config, self.steps, out=self.folder, changes=changes,
                    callbacks=[self._after_step, lambda _: self._ending], **self.options,
                )  # fmt: skip
        except BaseException as error:
            with self._lock:
                self.error, self.status = error, "failed"
        else:
            with self._lock:
                self.run, self.config = run, run.config
                paused = "paused" if self.status == "pausing" else "stopped"
                self.status = paused if run.stopped else "finished"
        self._changed.set()

    def _after_step(self, result: StepResult) -> Config:
        """The callback of train: keeps what is shown, and answers with the settings of the next step."""
        with self._lock:
            if not self.step and (start := read_steps(self.folder / "metrics.jsonl")):
                self._take(start[0])  # the evaluation before training
            before = self.line.get("seconds", 0.0) if self.line.get("step") == result.metrics["step"] - 1 else None
            self._take(result.metrics)
            self.last, self.config = result, result.config
            if before is not None:
                self.seconds = [*self.seconds[-9:], result.metrics["seconds"] - before]
        answers = [callback(result) for callback in self.callbacks]  # they may call change, pause and stop
        with self._lock:
            self._changed.set()
            wanted = recorded.requested_config(answers) or result.config
            if any(a for a in answers if not isinstance(a, Config)) or self.status in ("pausing", "stopping"):
                self._ending = True  # what is pending waits for the next start
            else:
                wanted, self.pending = wanted.replace(**self.pending), {}
            self._note_changes(wanted)
            return wanted

    def _note_changes(self, wanted: Config) -> None:
        for name, (old, new) in self.config.differences(wanted).items():
            line = {"step": self.step, "from_step": self.step + 1, "setting": name, "old": old, "new": new}
            self.changes.append(line)
        self.config = wanted

    def _warned(self, message: str) -> None:
        with self._lock:
            kind = re.sub(r"\d+", "#", message)
            if kind in self.notes or len(self.notes) < MOST_NOTES:
                self.notes[kind] = (message, self.notes.get(kind, ("", 0))[1] + 1)
            else:
                self.notes_dropped += 1

    def _take(self, line: Mapping[str, Any]) -> None:
        """One line of metrics into the curves."""
        self.line, self.step = dict(line), line["step"]
        for name, values in line["agents"].items():
            accuracy = next((v for k, v in values.items() if k.startswith("avg@") and "/" not in k), None)
            shown = {
                ("accuracy", name, ""): accuracy,
                ("reward", name, ""): values.get("reward"),
                ("capability", name, ""): values.get("capability"),
                ("ratio", name, "own"): values.get("own_ratio_mean"),
                ("ratio", name, "peer"): values.get("peer_ratio_mean"),
            }
            for key, value in shown.items():
                if value is not None:
                    self.curves[key].add(line["step"], value)

    def _read_folder(self) -> None:
        """What an earlier call, maybe of another kernel, left in the run folder up to its newest checkpoint."""
        saved = checkpoints(self.folder)
        step = int(saved[-1].name.removeprefix("step-")) if saved else 0
        lines = [line for line in read_steps(self.folder / "metrics.jsonl") if line["step"] <= step]
        self.curves = {(panel, a.name, who): Curve() for panel in PANELS for a in self.agents for who in _whose(panel)}
        self.line, self.step = {}, 0
        names = {a.name for a in self.agents}
        for line in lines:
            if set(line["agents"]) <= names:  # another run's folder is refused by train
                self._take(line)
        self.changes = [line for line in read_steps(self.folder / recorded.FILE) if line["step"] <= step]
        with contextlib.suppress(ValueError, TypeError):  # likewise
            self.config = recorded.apply_changes(self.first_config, self.changes)
        if self.status == "ready" and self.step:
            self.status = "finished" if self.step >= self.steps else "stopped"

    # ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────

    def figure(self) -> Figure:
        """The four panels: accuracy, reward, capability, importance ratio."""
        fig = panels(self.title(), "step", "", list(PANELS.values()), height=300)
        for i, unit in enumerate(UNITS, start=1):
            axis = fig.layout[f"yaxis{i if i > 1 else ''}"]
            axis.update(title_text=unit, rangemode="normal" if i == len(UNITS) else "tozero")
        fig.update_xaxes(rangemode="tozero")
        for (panel, name, who), drawn in zip(self.curves, self.traces(), strict=True):
            color = COLORS[[a.name for a in self.agents].index(name) % len(COLORS)]
            fig.add_scatter(
                **drawn, name=name, legendgroup=name, showlegend=panel == "reward", marker={"size": 5},
                line={"color": color, "dash": "dash" if who == "peer" else "solid"},
                hovertemplate=f"%{{y:.3f}}{f' ({who})' if who else ''}", **panel_axes(list(PANELS).index(panel)),
            )  # fmt: skip
        above = {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.06, "yanchor": "bottom"}
        return fig.update_layout(shapes=self.marks(), legend=above, autosize=True, margin={"t": 80})

    def traces(self) -> list[dict[str, Any]]:
        """What changes in each of the figure's lines."""
        with self._lock:  # a step may be adding points
            points = [curve.points() for curve in self.curves.values()]
        return [{"x": x, "y": y, "mode": "lines+markers" if len(x) < 40 else "lines"} for x, y in points]

    def title(self) -> str:
        """The figure's title: which step, and what is left out."""
        every = max(curve.every for curve in self.curves.values())
        thinned = f"; at most {MOST_POINTS} points a line are drawn, here every {_nth(every)}" if every > 1 else ""
        dotted = "; dotted: settings changed" if self.changes else ""
        return f"{self.first_config.method}: step {self.step} of {self.steps}{dotted}{thinned}"

    def marks(self) -> list[dict[str, Any]]:
        """A dotted line in every panel before the first step with a changed setting."""
        places = sorted({line["from_step"] - 0.5 for line in self.changes})[-MOST_MARKS:]
        axes = ["" if i == 0 else str(i + 1) for i in range(len(PANELS))]
        style = {"type": "line", "y0": 0, "y1": 1, "line": {"color": GREY, "dash": "dot", "width": 1}}
        return [{**style, "x0": x, "x1": x, "xref": f"x{a}", "yref": f"y{a} domain"} for x in places for a in axes]

    def status_html(self) -> str:
        """One line: where the training stands; below it an error."""
        with self._lock:
            parts = [_TOLD[self.status], f"step {self.step} of {self.steps}"]
            if self.seconds:
                each = sum(self.seconds) / len(self.seconds)
                parts.append(f"{each:.2g} s a step")
                if self.running and self.step < self.steps:
                    parts.append(f"about {_duration(each * (self.steps - self.step))} left")
            lines = [f"<b>{parts[0]}</b> · {' · '.join(parts[1:])} · record: <code>{escaped(self.folder.name)}</code>"]
            if self.error is not None:
                told = f"{type(self.error).__name__}: {self.error}"
                goes_on = f"Start goes on from step {_saved_step(self.folder)}, the last one saved."
                lines.append(
                    f"<b style='color:{COLORS[1]}'>The training failed</b>: <code>{escaped(told, 2000)}</code> {goes_on}"
                )
        return literal("<br>".join(lines))

    def notes_html(self) -> str:
        """What the training warned about; of warnings that differ in their numbers only, the last."""
        with self._lock:
            lines = [
                f"warning{f' ({count} times, the last)' if count > 1 else ''}: <code>{escaped(message)}</code>"
                for message, count in self.notes.values()
            ]
            if self.notes_dropped:
                lines.append(f"{self.notes_dropped} further warnings are not shown")
        return literal("<br>".join(lines)) if lines else ""

    def table_html(self) -> str:
        """Numbers of the last step, one row an agent; the accuracy is that of the last test."""
        with self._lock:
            rows = []
            for name, values in self.line.get("agents", {}).items():
                tested = self.curves["accuracy", name, ""].newest
                accuracy = f"{tested[1]:.3f} (step {tested[0]})" if tested else "–"
                rows.append((name, accuracy, *(_number(values, keys) for keys in _COLUMNS.values())))
        head = _row("th", ["agent", "accuracy", *_COLUMNS])
        body = "".join(_row("td", row) for row in rows)
        return literal(f"<table style='border-collapse:collapse'>{head}{body}</table>") if rows else ""

    def changes_html(self) -> str:
        """What was changed, from which step on, and what waits for the next step."""
        with self._lock:
            lines = [
                f"from step {c['from_step']}: <code>{escaped(c['setting'])}</code> {escaped(c['old'])} → {escaped(c['new'])}"
                for c in self.changes
            ]
            lines += [
                f"<i>waits for the next step: <code>{escaped(k)}</code> {getattr(self.config, k)} → {escaped(v)}</i>"
                for k, v in self.pending.items()
            ]
        return literal("<br>".join(lines) or "no setting was changed")

    def rollouts_html(self, problem: int | None = None, result: StepResult | None = None) -> str:
        """Rollouts of the last step on one of its problems, side by side; by default one whose rewards differ."""
        from hacpo_kit.views.rollout_view import side_by_side

        result = result or self.last
        if result is None:
            return ""
        return literal(side_by_side(result, result.pool.informative_problem if problem is None else problem))

    def html(self) -> str:
        """What stands below the static figure."""
        titles = {"Changes": self.changes_html(), "Rollouts of the last step": self.rollouts_html()}
        blocks = [
            self.status_html(),
            self.table_html(),
            self.notes_html(),
            *(f"<b>{t}</b><br>{h}" for t, h in titles.items() if h),
        ]
        return "".join(f"<div style='margin:8px 0'>{block}</div>" for block in blocks if block)

    def build(self) -> ipywidgets.Box:
        """The widget; see `hacpo_kit.views.monitor_view`."""
        from hacpo_kit.views.monitor_view import View

        self._view = View(self)
        return self._view.root

    def _display_picture(self, update: bool = False) -> None:
        self._shown = True
        super()._display_picture(update)

    def _paint(self, thread: threading.Thread) -> None:
        """Draws what changed, at most four times a second, until the thread has ended; keeps drawing out of the training."""
        while thread.is_alive():
            if self._changed.wait(0.5):
                self._changed.clear()
                self._draw()
                time.sleep(PAUSE_BETWEEN)
        self._draw(final=True)

    def _draw_if_idle(self) -> None:
        if not self.running:
            self._draw()

    def _draw(self, final: bool = False) -> None:
        if "widget" not in self.__dict__:  # never shown
            return
        self._view.draw()
        if final and self._shown:
            with contextlib.suppress(Exception):  # the page may be gone
                self._display_picture(update=True)


PAUSE_BETWEEN = 0.25  # seconds between two updates of the page
_TOLD = {
    "ready": "ready", "running": "running", "pausing": "pausing after this step", "paused": "paused, saved",
    "stopping": "stopping after this step", "stopped": "stopped, saved", "finished": "finished", "failed": "failed",
}  # fmt: skip
# heading → metrics: a mean, then least and greatest; or shares
_COLUMNS: dict[str, tuple[str, ...]] = {
    "reward": ("reward",), "P̂": ("capability",),
    "s own (range)": ("own_ratio_mean", "own_ratio_min", "own_ratio_max"),
    "s peer (range)": ("peer_ratio_mean", "peer_ratio_min", "peer_ratio_max"),
    "clipped own": ("clip_own_low", "clip_own_high"), "clipped peer": ("clip_peer_low", "clip_peer_high"),
    "gradient norm": ("grad_norm",), "learning rate": ("lr",),
}  # fmt: skip


def _whose(panel: str) -> tuple[str, ...]:
    return ("own", "peer") if panel == "ratio" else ("",)


def _number(values: Mapping[str, float], keys: tuple[str, ...]) -> str:
    found = [values[k] for k in keys if k in values]
    if not found or len(found) < len(keys):
        return "–"
    if keys[0].startswith("clip_"):
        return f"{sum(found):.0%}"  # too low and too high together
    if keys == ("lr",):
        return f"{found[0]:.3g}"
    return f"{found[0]:.3f}" + (f" ({found[1]:.2f}–{found[2]:.2f})" if len(found) == 3 else "")


def _row(tag: str, cells: Sequence[str]) -> str:
    style = f"padding:0 8px;text-align:right;white-space:nowrap;font-size:90%;border-bottom:1px solid {GREY}40"
    return f"<tr>{''.join(f'<{tag} style={style!r}>{escaped(c)}</{tag}>' for c in cells)}</tr>"


def _nth(number: int) -> str:
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10 if number // 10 % 10 != 1 else 0, 'th') }"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _saved_step(folder: Path) -> int:
    saved = checkpoints(folder)
    with contextlib.suppress(OSError, json.JSONDecodeError, KeyError):
        return json.loads((saved[-1] / "state.json").read_text(encoding="utf-8"))["step"] if saved else 0
    return 0


@contextlib.contextmanager
def _heard(tell: Callable[[str], None]) -> Iterator[None]:
    """Warnings of this thread go to `tell`; a thread's standard error is nowhere on the page."""
    mine, shown = threading.get_ident(), warnings.showwarning

    def show(message, category, filename, lineno, file=None, line=None) -> None:
        if threading.get_ident() == mine:
            tell(str(message))
        else:
            shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = shown


__all__ = ["Monitor"]
