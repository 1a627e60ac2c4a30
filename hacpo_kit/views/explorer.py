"""The explorer: sliders over recorded experience. The figures come from `whatif`; there is no mathematics in here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from hacpo_kit.config import Config
from hacpo_kit.models.agents import Agent
from hacpo_kit.objective import lower_bound
from hacpo_kit.records import Pool, StepStats
from hacpo_kit.runs.experience import Experience, recorded_steps
from hacpo_kit.views.live import Live
from hacpo_kit.views.pictures import COLORS, GREY
from hacpo_kit.views.plots import AXIS, Figure, Table, escaped, plain
from hacpo_kit.views.whatif import Replay, WhatIf

if TYPE_CHECKING:
    import ipywidgets

    from hacpo_kit.advantages import Capability
    from hacpo_kit.training import Run

BINS = 20  # of a histogram
MAX_POINTS = 200  # drawn of the rollouts: each costs time at every move; the panel says how many there are
LARGEST_RATIO = 2.0  # ratios above share the last bar, and the panel says how many
ROWS = 12  # of the table
ORDERS = {
    "largest gradient": "those that pull hardest at the learner: largest |∂ objective / ∂ mean log π|",
    "clipped": "those that would pull hardest, were they not clipped",
    "changed most": "those whose pull differs most from the recorded one",
}
NOTE = (
    "A what-if over recorded experience: answers, rewards and log-probabilities stay as they were. Other settings would also "
    "have moved the weights otherwise, and with them the ratios of later mini-batches and everything after this step."
)
EQUAL_LENGTHS = (
    "The share of the gradient takes every rollout's ∇ mean log π to be equally long; what the true gradients add up to, "
    "gradients.gradient_parts measures with the models."
)
# each control: its settings, the words beside it, and what it does
SLIDERS = {
    "alpha": ("α", "exponent of the stopped ratio in a peer weight (eq. 12)"),
    "delta": ("δ", "width of the band at the first update of the step (eq. 13)"),
    "delta_step": ("δ_step", "by how much the band narrows with each update (eq. 14)"),
    "window": ("window K", "steps over which mean rewards are averaged to P̂ (eq. 8)"),
}
SWITCHES = {
    "capability_baseline": ("capability-aware baseline", "peer rewards count ω(learner, source) times (eq. 6)"),
    "discrepancy": ("discrepancy coefficient ω", "peer advantages count ω(source, learner) times (eq. 10)"),
    "exponential": ("exponential importance sampling", "off: α = 0 (eq. 12)"),
    "clipping": ("stepwise clipping", "off: the band is 0 to 1 at every update (eqs. 13-14)"),
}
MOVING = ("x", "y", "customdata", "showlegend")  # what can change in a trace
EACH = "each its own"  # the mini-batch whose band judges a rollout


def explorer(
    source: Pool | Experience | Run | str | Path,
    agent: Agent | str | None = None,
    capability: Capability | None = None,
    config: Config | None = None,
    *,
    stats: StepStats | None = None,
    step: int | None = None,
) -> Explorer:
    """Sliders over a step's experience: what other settings would have made of the same rollouts; needs no model.

    `source`: a run folder (any recorded `step`, by default the last), a `Run`, an `Experience`, or a scored pool with
    `agent` (the learner), `capability` and, if it is not the default, `config`. A pool without `stats` of `update` is scored
    once by the learner's present weights. For recorded experience, `agent` names the learner to begin with.

    Raises ValueError or TypeError for what is missing or does not fit, FileNotFoundError where nothing was recorded.
    """
    name = agent.name if isinstance(agent, Agent) else agent
    if isinstance(source, Pool):
        if not isinstance(agent, Agent) or capability is None:
            raise TypeError("for a pool give the learner and the capability: explorer(pool, agents[0], capability)")
        experience = Experience.of_pool(source, agent, capability, config or Config(), stats, step=step)
        return Explorer(lambda _: experience, [step], name)
    if config is not None or stats is not None or capability is not None:
        raise TypeError("capability=, config= and stats= belong to a pool; recorded experience has its own")
    if isinstance(source, Experience):
        return Explorer(lambda _: source, [source.step], name)
    if not isinstance(source, (str, Path)):
        source, step = _of_run(source, step)
        if isinstance(source, Experience):
            return Explorer(lambda _: source, [source.step], name)
    steps = recorded_steps(source)
    first = Experience.of_run(source, step)  # says what is missing
    return Explorer(lambda s: Experience.of_run(source, s), steps, name, first.step)


def _of_run(run: Any, step: int | None) -> tuple[Any, int | None]:
    """The folder of a `Run` if it recorded, otherwise its last step."""
    if not hasattr(run, "history") or not hasattr(run, "last"):
        raise TypeError(f"the explorer opens a run folder, a Run, an Experience or a Pool, not {type(run).__name__}")
    if run.folder is not None and recorded_steps(run.folder):
        return run.folder, step
    if run.last is None or step not in (None, run.state.step):
        raise FileNotFoundError("this run recorded nothing in a folder: train(..., out=…, record_every=1)")
    return Experience.of_step(run.last, run.agents, run.state.step), step


class Explorer(Live):
    """What `explorer` returns: shows itself; `move` sets the controls from code, `now` and `table` say what is shown."""

    def __init__(
        self,
        load: Callable[[int | None], Experience],
        steps: Sequence[int | None],
        learner: str | None,
        step: int | None = None,
    ):
        self._load, self.steps = load, list(steps)
        self._sent: tuple[list[dict[str, Any]], dict[str, Any]] = ([], {})  # traces and layout as the page has them
        self.order = next(iter(ORDERS))
        self._open(self.steps[-1] if step is None else step, learner)

    def __repr__(self) -> str:
        return f"Explorer({self.experience!r}, learner {self.learner!r}, {self.chosen})"

    def _open(self, step: int | None, learner: str | None = None) -> None:
        """Another step or learner, with the settings of the record."""
        experience = self._load(step)
        replay = Replay(experience, learner)
        recorded = replay.at()
        panels = Panels(replay, recorded)
        # nothing is changed before all of it is there
        self.experience, self.replay, self.step, self.learner = experience, replay, step, replay.learner
        self.recorded_choice = recorded_choice(experience.config)
        self.chosen = dict(self.recorded_choice)
        self.recorded = self.now = recorded
        self.panels = panels

    # ── the state ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def config(self) -> Config:
        """The settings that the controls stand for."""
        return chosen_config(self.experience.config, self.chosen)

    def move(self, **chosen: Any) -> Explorer:
        """Sets controls: alpha, delta, delta_step, window, m (None: each rollout in its own mini-batch), and the switches.

        Raises TypeError for a name that is no control, and as `Replay.at`.

        >>> view.move(alpha=3.0, clipping=False)  # doctest: +SKIP
        """
        if unknown := set(chosen) - set(self.chosen):
            raise TypeError(f"{', '.join(sorted(unknown))}: no such control; there are {', '.join(self.chosen)}")
        before = self.chosen
        self.chosen = {**self.chosen, **chosen}
        try:
            self.now = self.replay.at(self.config, updates_made=self.chosen["m"])
        except (ValueError, KeyError):
            self.chosen = before
            raise
        if "widget" in self.__dict__:
            self._controls.show(self.chosen)
            self._redraw()
        return self

    def figure(self) -> Figure:
        """The picture as it stands, with the recorded settings beside the present ones."""
        return self.panels.figure(self.now, self.title)

    @property
    def title(self) -> str:
        """What is shown, in a line."""
        where = "" if self.step is None else f" in step {self.step}"
        changed = {k: v for k, v in self.chosen.items() if v != self.recorded_choice[k]}
        told = ", ".join(f"{_name(k)} {_value(self.recorded_choice[k])} → {_value(v)}" for k, v in changed.items())
        return f"What moves {plain(self.learner, 60)}{where}: {told or 'the recorded settings'}"

    def table(self, order: str | None = None) -> Table:
        """The rollouts that matter most, in one of the `ORDERS`."""
        return _table(self.replay, self.now, self.recorded, self.order if order is None else order)

    def html(self) -> str:
        """What is said and listed below the figure, with every text escaped."""
        return f"{self._told()}<p>{ORDERS[self.order]}</p>{self.table()._repr_html_()}"

    def _told(self) -> str:
        return _summary(self.replay, self.now, self.recorded, self.panels.recorded_parts[0])

    # ── the widget ───────────────────────────────────────────────────────────────────────────────────────────────

    def build(self) -> ipywidgets.Box:
        """The controls, the figure, the table."""
        import ipywidgets as w

        from hacpo_kit.views.livefigure import LiveFigure

        # plotly would measure and draw its legend at every move; the page needs it once
        figure = self.figure().update_layout(showlegend=False, margin_t=70, height=600)
        self._plot = LiveFigure(figure).add_class("hk-explorer-plot")
        self._sent = self.panels.traces(self.now), self.panels.layout(self.now, self.title)
        self._controls = Controls(self)
        self._says, self._list = w.HTML().add_class("hk-explorer-says"), w.HTML().add_class("hk-explorer-table")
        self._kept = w.VBox()
        self._write()
        # what changes inside a part does not lay out the page anew
        style = w.HTML(
            "<style>.hk-explorer-plot, .hk-explorer-table {contain: content}</style>", layout={"display": "none"}
        )
        legend = w.HTML(self.panels.legend()).add_class("hk-explorer-legend")
        rows = [
            style,
            self._controls.box,
            self._says,
            legend,
            self._plot,
            self._controls.orders,
            self._list,
            self._kept,
        ]
        return w.VBox(rows, layout={"width": "100%", "max_width": "1280px"}).add_class("hk-explorer")

    def _redraw(self) -> None:
        """Sends what has changed, in one message, so that the page draws once."""
        traces, layout = self.panels.traces(self.now), self.panels.layout(self.now, self.title)
        changed = [
            {k for k in MOVING if k in new and not _same(new[k], old[k])}
            for new, old in zip(traces, self._sent[0], strict=True)
        ]
        where = [i for i, keys in enumerate(changed) if keys]
        # one value a trace for each key; names and tooltips change with the step only
        restyle = {k: [traces[i].get(k) for i in where] for k in sorted(set().union(*changed))}
        relayout = {k: v for k, v in layout.items() if v != self._sent[1][k]}
        if where or relayout:
            self._plot.plotly_update(restyle, relayout, where)
        self._sent = traces, layout
        self._write()

    def _write(self) -> None:
        self._says.value, self._list.value = self._told(), self.table()._repr_html_()

    def _moved(self, chosen: Mapping[str, Any]) -> None:
        """A control was moved in the page."""
        try:
            self.now = self.replay.at(chosen_config(self.experience.config, chosen), updates_made=chosen["m"])
        except (ValueError, KeyError) as error:
            self._says.value = f"<b>This cannot be shown:</b> {escaped(error.args[0])}"
            return
        self.chosen = dict(chosen)
        self._redraw()

    def _reopen(self, step: int | None, learner: str | None) -> None:
        """Another step or learner was chosen in the page."""
        try:
            self._open(step, learner)
        except (ValueError, KeyError, OSError) as error:
            self._controls.show(self.chosen)  # what is still shown
            told = error.args[0] if isinstance(error, KeyError) else error
            self._says.value = f"<b>This cannot be shown:</b> {escaped(told)}"
            return
        self._controls.show(self.chosen)
        self._redraw()

    def _keep(self, *_: Any) -> None:
        """Puts the picture as it stands below, with its table's settings, and keeps those before it."""
        import ipywidgets as w

        png, told = self.figure().png(), w.HTML(f"<p>{self.title}</p>")
        image = w.Image(value=png, format="png", layout={"max_width": "100%"}).add_class("hk-explorer-kept")
        self._kept.children = (w.VBox([told, image]), *self._kept.children)


# ── what the controls mean ───────────────────────────────────────────────────────────────────────────────────────


def recorded_choice(config: Config) -> dict[str, Any]:
    """Where the controls stand for these settings."""
    band = config.peer_update == "hacpo"  # otherwise peer rollouts are treated as own ones: neither α nor a band
    return {
        **{name: getattr(config, name) for name in SLIDERS}, "m": None,
        "capability_baseline": config.capability_baseline, "discrepancy": config.discrepancy,
        "exponential": band, "clipping": band,
    }  # fmt: skip


def chosen_config(recorded: Config, chosen: Mapping[str, Any]) -> Config:
    """The settings that the controls stand for, in place of the recorded ones."""
    for name in ("exponential", "clipping"):
        if not isinstance(chosen[name], bool):
            raise ValueError(f"{name}={chosen[name]!r}: it takes true or false")
    changes: dict[str, Any] = {name: chosen[name] for name in ("window", "capability_baseline", "discrepancy")}
    if recorded.peer_update == "hacpo" or chosen["exponential"] or chosen["clipping"]:
        changes |= {"peer_update": "hacpo", "alpha": chosen["alpha"] if chosen["exponential"] else 0.0}
        width = {name: chosen[name] for name in ("delta", "delta_step")}
        changes |= width if chosen["clipping"] else {"delta": 1.0, "delta_step": 0.0}
    return recorded.replace(**changes)


def _name(control: str) -> str:
    return {"m": "band of m:", **{k: v[0] for k, v in (SLIDERS | SWITCHES).items()}}[control]


def _value(value: Any) -> str:
    if value is None:
        return EACH
    return ("on" if value else "off") if isinstance(value, bool) else f"{value:g}"


class Controls:
    """The widgets above the figure."""

    def __init__(self, view: Explorer):
        import ipywidgets as w

        self.view, self._quiet = view, False
        wide = {"layout": {"width": "355px"}, "style": {"description_width": "82px"}}
        ranges = {"alpha": (0.0, 5.0, 0.25), "delta": (0.0, 1.0, 0.05), "delta_step": (0.0, 0.2, 0.005)}
        self.of: dict[str, Any] = {
            name: w.FloatSlider(min=low, max=high, step=by, readout_format=".3f", **wide)
            for name, (low, high, by) in ranges.items()
        }
        self.of["window"] = w.IntSlider(min=1, max=1, **wide)
        self.of["m"] = w.SelectionSlider(options=[(EACH, -1)], **wide)
        for name, (label, told) in SLIDERS.items():
            self.of[name].description, self.of[name].tooltip = label, told
        self.of["m"].description, self.of["m"].tooltip = (
            "m",
            "judge all rollouts by the band after m updates of the step",
        )
        for name, (label, told) in SWITCHES.items():
            self.of[name] = w.Checkbox(description=label, tooltip=told, indent=False, layout={"width": "265px"})
        self.step = None  # with a single step, which may have no number, there is nothing to choose
        if len(view.steps) > 1:
            self.step = w.SelectionSlider(options=view.steps, value=view.step, description="step", **wide)
        self.learner = w.Dropdown(options=view.experience.learners, value=view.learner, description="learner", **wide)
        self.orders = w.Dropdown(
            options=list(ORDERS), value=view.order, description="rollouts that matter most:",
            layout={"width": "420px"}, style={"description_width": "180px"},
        ).add_class("hk-order")  # fmt: skip
        reset, keep = w.Button(description="reset", icon="undo"), w.Button(description="keep a picture", icon="camera")
        for name, widget in (
            *self.of.items(),
            *([("step", self.step)] if self.step else []),
            ("learner", self.learner),
            ("reset", reset),
            ("keep", keep),
        ):
            widget.add_class(f"hk-{name.replace('_', '-')}")
        self.show(view.chosen)
        for widget in self.of.values():
            widget.observe(self._moved, "value")
        if self.step:
            self.step.observe(self._reopen, "value")
        self.learner.observe(self._reopen, "value")
        self.orders.observe(self._ordered, "value")
        reset.on_click(lambda _: view.move(**view.recorded_choice))
        keep.on_click(view._keep)
        flow = {"flex_flow": "row wrap", "align_items": "center"}
        top = [self.learner, *([self.step] if self.step else []), reset, keep]
        sliders, switches = [self.of[n] for n in (*SLIDERS, "m")], [self.of[n] for n in SWITCHES]
        self.box = w.VBox([w.Box(top, layout=flow), w.Box(sliders, layout=flow), w.Box(switches, layout=flow)])

    def chosen(self) -> dict[str, Any]:
        """Where the controls stand."""
        values = {name: widget.value for name, widget in self.of.items()}
        return {**values, "m": None if values["m"] < 0 else values["m"]}

    def show(self, chosen: Mapping[str, Any]) -> None:
        """Moves the controls without a redraw for each."""
        self._quiet = True
        try:
            self._make_room(chosen)
            for name, value in chosen.items():
                self.of[name].value = -1 if value is None else value
            if self.step:
                self.step.value = self.view.step
            if self.learner.options != tuple(self.view.experience.learners):
                self.learner.options = self.view.experience.learners
            self.learner.value = self.view.learner
            self._enable()
        finally:
            self._quiet = False

    def _make_room(self, chosen: Mapping[str, Any]) -> None:
        """Widens the controls to what was recorded and chosen: a slider silently cuts a value beyond its end."""
        history = self.view.experience.capability.history.values()
        self.of["window"].max = max([self.of["window"].max, self.view.experience.config.window, *map(len, history)])
        for name in SLIDERS:
            self.of[name].max = max(self.of[name].max, chosen[name])
        last = max(8, int(self.view.replay.minibatch.max()))
        counts = sorted({*range(last + 1), *([] if chosen["m"] is None else [chosen["m"]])})
        # −1 stands for None, which a selection takes for nothing selected
        options = ((EACH, -1), *((str(m), m) for m in counts))
        if self.of["m"].options != options:
            self.of["m"].options = options

    def _enable(self) -> None:
        """What has no effect cannot be moved."""
        alone = self.view.replay.own.all()
        off = {"alpha": not self.of["exponential"].value, "delta": not self.of["clipping"].value}
        off["delta_step"] = off["delta"]
        for name, widget in self.of.items():
            widget.disabled = bool(alone or off.get(name, False))

    def _moved(self, _: Any) -> None:
        if not self._quiet:
            self._enable()
            self.view._moved(self.chosen())

    def _reopen(self, _: Any) -> None:
        if not self._quiet:
            self.view._reopen(self.step.value if self.step else self.view.step, self.learner.value)

    def _ordered(self, change: Any) -> None:
        self.view.order = change.new
        self.view._write()


# ── the figure ───────────────────────────────────────────────────────────────────────────────────────────────────

KINDS = {"own": COLORS[3], "peer low": COLORS[4], "peer high": COLORS[5]}  # of clips
TITLES = (
    "Importance ratio", "Weight against ratio", "Advantage by source",
    "Share of the gradient, by source", "Clipped, by mini-batch", "Mean rewards and the window of P̂",
)  # fmt: skip
FADED = 0.35  # opacity
BAND = {"type": "rect", "xref": "x", "yref": "y domain", "y0": 0, "y1": 1, "line": {"width": 0}, "layer": "below",
        "fillcolor": "rgba(128,128,128,0.18)"}  # fmt: skip


class _Wide(Figure):
    """Three panels in a row want room."""

    def png(self, width: float | None = None, dpi: int | None = None) -> bytes:
        return super().png(width or 13.5, dpi or 80)


class Panels:
    """Six linked panels of one learner's step. The traces are the same ones at every setting: only their numbers change."""

    def __init__(self, replay: Replay, recorded: WhatIf):
        self.replay, self.recorded = replay, recorded
        past = replay.experience.capability.history
        self.agents = list(dict.fromkeys([*past, *replay.names]))  # in the order of the run, as on every other picture
        self.place = np.array([self.agents.index(name) for name in replay.names])[replay.of]
        self.colors = [COLORS[i % len(COLORS)] for i in range(len(self.agents))]
        self.labels = [plain(name, 40) for name in self.agents]
        length = max([1, *map(len, past.values())])  # without capability there is no past, but this step
        last = replay.experience.step or length
        self.steps = list(range(last - length + 1, last + 1))
        self._bin_ratios()
        # the axis stays where it is while the bars move; it grows if an advantage leaves it
        self.largest_a = 1.25 * float(np.abs(recorded.advantage).max(initial=0.8))
        rng, count = np.random.default_rng(0), len(replay.used)
        self.points = np.sort(rng.choice(count, MAX_POINTS, replace=False)) if count > MAX_POINTS else np.arange(count)
        self.tips = self._tips()
        self.recorded_parts = recorded.shares(), recorded.clip_fractions()

    def _bin_ratios(self) -> None:
        """Which bar each rollout's ratio belongs to: those of others, or where there are none the learner's own."""
        self.counted = ~self.replay.own if (~self.replay.own).any() else np.ones(len(self.replay.own), bool)
        s = self.replay.ratio[self.counted].astype(np.float64)
        low, high = min(float(s.min()), 1.0), min(max(float(s.max()), 1.0), LARGEST_RATIO)
        room = max(0.02 * (high - low), 1e-4)
        self.edges = np.linspace(low - room, high + room, BINS + 1)
        self.bar_of = np.clip(np.digitize(self.replay.ratio, self.edges) - 1, 0, BINS - 1)
        self.beyond = int((s > self.edges[-1]).sum())

    def _tips(self) -> list[np.ndarray]:
        """What the mouse shows of each drawn point, by agent."""
        rows = self.replay.frame.iloc[self.replay.used[self.points]]
        texts = [
            f"{plain(r.source, 40)}, {plain(r.problem, 60)} #{r.sample}<br>{_lines(r.text)}<br>reward {r.reward:g}"
            for r in rows.itertuples()
        ]
        return [np.array(texts, object)[self.place[self.points] == i] for i in range(len(self.agents))]

    def legend(self) -> str:
        """What the colours mean, in HTML."""
        marks = [*zip(self.colors, self.labels, strict=True), (GREY, "faded: clipped, or A below 0")]
        marks += [(color, f"clipped: {kind}") for kind, color in KINDS.items()]
        styles = ["■"] * len(self.labels) + ["□"] + ["●"] * len(KINDS)
        parts = [
            f"<span style='color:{c}'>{mark}</span> {label}" for (c, label), mark in zip(marks, styles, strict=True)
        ]
        return f"<div style='color:{GREY}'>{' &emsp; '.join(parts)}</div>"

    def figure(self, now: WhatIf, title: str) -> Figure:
        """All panels, for these settings."""
        from plotly.subplots import make_subplots

        grid = make_subplots(2, 3, subplot_titles=TITLES, horizontal_spacing=0.075, vertical_spacing=0.17)
        fig = _Wide(grid).update_layout(template="none")
        fig.add_traces(self.traces(now))
        fig.update_layout(
            paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"color": GREY, "size": 12}, height=640,
            autosize=True, margin={"l": 60, "r": 15, "t": 112, "b": 48, "autoexpand": False}, barmode="stack", bargap=0.05,
            title={"x": 0.01, "y": 0.985, "yanchor": "top", "font": {"size": 15}},
            legend={
                "orientation": "h", "x": 0, "xanchor": "left", "y": 0.945, "yref": "container", "yanchor": "top",
                "bgcolor": "rgba(0,0,0,0)", "font": {"size": 11},
            },
            meta={"panels": list(TITLES), "columns": 3}, dragmode=False, hoverlabel={"align": "left"},
        )  # fmt: skip
        for update in (fig.update_xaxes, fig.update_yaxes):
            # drawing the axes is a third of a move: few ticks, none measured for room, nothing to drag
            update(
                **AXIS,
                title={"font": {"size": 11}, "standoff": 6},
                nticks=5,
                ticklabeloverflow="allow",
                fixedrange=True,
            )
        fig.update_annotations(font={"color": GREY, "size": 13})
        names = {
            "xaxis2": "ratio s", "xaxis5": "m (updates already made)", "xaxis6": "step",
            "yaxis": "rollouts", "yaxis2": "weight (peer: s¹⁺ᵅ·ω)", "yaxis3": "rollouts",
            "yaxis4": "% of Σ|s¹⁺ᵅ·ω·A|", "yaxis5": "share without gradient", "yaxis6": "mean reward",
        }  # fmt: skip
        fig.update_layout({f"{axis}_title_text": text for axis, text in names.items()})
        fig.update_layout(
            shapes=[BAND, BAND, {**BAND, "xref": "x6", "yref": "y6 domain"}],
            yaxis4_range=[0, 100], yaxis5_range=[-0.03, 1.03], xaxis5_dtick=1 if now.minibatch.max(initial=0) < 12 else None,
        )  # fmt: skip
        for path, value in self.layout(now, title).items():
            fig.layout[path] = value
        return fig

    def traces(self, now: WhatIf) -> list[dict[str, Any]]:
        """The numbers of all panels for these settings, as plotly's traces; always the same traces in the same order."""
        self.largest_a = max(self.largest_a, 1.05 * float(np.abs(now.advantage).max(initial=0.0)))
        agents = range(len(self.agents))
        return [
            *(t for i in agents for t in self._ratios(now, i)),
            {
                "type": "bar",
                "x": [self.edges[0]],
                "y": [0],
                "name": "faded: clipped, or A below 0",
                "marker": {"color": GREY},
                "opacity": FADED,
                "hoverinfo": "skip",
            },  # for the legend
            *(self._weights(now, i) for i in agents),
            *(self._advantages(now, i) for i in agents),
            *self._gradient(now),
            *self._clips(now),
            *(t for i in agents for t in self._rewards(now, i)),
        ]

    def _ratios(self, now: WhatIf, i: int) -> list[dict[str, Any]]:
        centers, width = (self.edges[:-1] + self.edges[1:]) / 2, self.edges[1] - self.edges[0]
        mine = self.counted & (self.place == i)
        out = []
        for hit in (False, True):
            counts = np.bincount(self.bar_of[mine & (now.clipped == hit)], minlength=BINS)
            out.append({
                "type": "bar", "x": centers, "y": counts, "width": width, "name": self.labels[i], "showlegend": not hit,
                "marker": {"color": self.colors[i], "line": {"width": 0}}, "opacity": FADED if hit else 1.0,
                "hovertemplate": "s about %{x:.3f}: %{y} " + ("clipped" if hit else "teach") + "<extra></extra>",
            })  # fmt: skip
        return out

    def _weights(self, now: WhatIf, i: int) -> dict[str, Any]:
        points = self.points[self.place[self.points] == i]
        return {
            "type": "scatter", "mode": "markers", "x": now.ratio[points], "y": np.abs(now.pull[points]), "xaxis": "x2",
            "yaxis": "y2", "name": self.labels[i], "showlegend": False, "customdata": self.tips[i],
            "marker": {"color": self.colors[i], "size": 5}, "opacity": 0.6,  # of all points at once, which is faster than of each
            "hovertemplate": "s = %{x:.3f}, weight %{y:.3f}<br>%{customdata}<extra></extra>",
        }  # fmt: skip

    def _advantages(self, now: WhatIf, i: int) -> dict[str, Any]:
        edges = np.linspace(-self.largest_a, self.largest_a, BINS + 1)
        a = now.advantage[(self.place == i) & (now.advantage != 0)]
        return {
            "type": "bar", "x": (edges[:-1] + edges[1:]) / 2, "y": np.histogram(a, edges)[0], "width": edges[1] - edges[0],
            "xaxis": "x3", "yaxis": "y3", "name": self.labels[i], "showlegend": False,
            "marker": {"color": self.colors[i], "line": {"width": 0}},
            "hovertemplate": "A about %{x:.2f}: %{y}<extra></extra>",
        }  # fmt: skip

    def _gradient(self, now: WhatIf) -> list[dict[str, Any]]:
        pair = [
            100 * shares.reindex(self.agents, fill_value=0.0).to_numpy()
            for shares in (self.recorded_parts[0], now.shares())
        ]
        return [
            {
                "type": "bar", "x": ["recorded", "now"], "y": np.array([shares[i, way] for shares in pair]), "width": 0.6,
                "xaxis": "x4", "yaxis": "y4", "name": self.labels[i], "showlegend": False,
                "marker": {"color": self.colors[i], "line": {"width": 0}}, "opacity": FADED if way else 1.0,
                "hovertemplate": f"{self.labels[i]}, A {('>', '&lt;')[way]} 0: %{{y:.1f}} %<extra></extra>",
            }
            for i in range(len(self.agents)) for way in (0, 1)
        ]  # fmt: skip

    def _clips(self, now: WhatIf) -> list[dict[str, Any]]:
        out = []
        for shares, dash in ((self.recorded_parts[1], "dot"), (now.clip_fractions(), "solid")):
            out += [
                {
                    "type": "scatter", "mode": "lines" if dash == "dot" else "lines+markers", "x": shares.index.to_numpy(),
                    "y": shares[kind].to_numpy(), "xaxis": "x5", "yaxis": "y5", "name": f"clipped: {kind}",
                    "legendgroup": kind, "showlegend": dash == "solid" and bool(shares[kind].notna().any()),
                    "line": {"color": color, "dash": dash},
                    "hovertemplate": f"m = %{{x}}: %{{y:.1%}} {kind}{', as recorded' if dash == 'dot' else ''}<extra></extra>",
                }
                for kind, color in KINDS.items()
            ]  # fmt: skip
        return out

    def _rewards(self, now: WhatIf, i: int) -> list[dict[str, Any]]:
        past = self.replay.experience.capability.history.get(self.agents[i], (None,) * len(self.steps))
        level, axes = now.capability.get(self.agents[i], np.nan), {"xaxis": "x6", "yaxis": "y6", "showlegend": False}
        start = max(self.steps[-1] - now.config.window + 1, self.steps[0])
        y = np.array([np.nan if v is None else v for v in past], float)
        return [
            {
                "type": "scatter", "mode": "lines+markers", "x": np.array(self.steps), "y": y, **axes,
                "name": self.labels[i], "line": {"color": self.colors[i]},
                "hovertemplate": "step %{x}: mean reward %{y:.3f}<extra></extra>",
            },
            {
                "type": "scatter", "mode": "lines", "x": np.array([start - 0.4, self.steps[-1] + 0.4]),
                "y": np.array([level, level]), **axes, "name": f"P̂ of {self.labels[i]}",
                "line": {"color": self.colors[i], "dash": "dash"}, "hovertemplate": "P̂ = %{y:.3f}<extra></extra>",
            },
        ]  # fmt: skip

    def layout(self, now: WhatIf, title: str) -> dict[str, Any]:
        """What moves around the traces: title, bands, the window, and what a panel leaves out."""
        config, judged = now.config, sorted({0, int(now.minibatch.max(initial=0))})
        judged = judged if now.updates_made is None else [now.updates_made]
        upper = 1 + config.eps_high if config.peer_update == "own" or self.replay.own.all() else 1.0
        lowers = [1 - config.eps_low if self.replay.own.all() else lower_bound(m, config) for m in judged]
        start = max(self.steps[-1] - config.window + 1, self.steps[0])
        whose = "s, own rollouts" if self.replay.own.all() else "s, peer rollouts; grey: band"
        beyond = f"; {self.beyond:,} above {LARGEST_RATIO:g}: last bar" if self.beyond else ""
        zero = int((now.advantage == 0).sum())
        thin = len(self.points) < len(self.replay.used)
        return {
            "title.text": title,
            # the narrow band over the wide one looks darker
            "shapes[0].x0": lowers[0], "shapes[0].x1": upper, "shapes[1].x0": lowers[-1], "shapes[1].x1": upper,
            "shapes[2].x0": start - 0.4, "shapes[2].x1": self.steps[-1] + 0.4,
            "xaxis.title.text": f"{whose}{beyond}", "xaxis.range": list(self.edges[[0, -1]]),
            "xaxis2.title.text": f"s ({len(self.points):,} of {len(self.replay.used):,} rollouts)" if thin else "s",
            "xaxis2.range": list(self.edges[[0, -1]]),
            "xaxis3.title.text": f"A (not shown: {zero:,} with A = 0)" if zero else "A",
            "xaxis3.range": [-self.largest_a, self.largest_a],
        }  # fmt: skip


def _lines(text: str, width: int = 70, longest: int = 210, most: int = 8) -> str:
    """A model's text for a tooltip: escaped, in lines, cut with a count of what is missing."""
    shown = "\n".join(text[:longest].split("\n")[:most])
    left = len(text) - len(shown)
    lines = [line[i : i + width] for line in shown.split("\n") for i in range(0, max(len(line), 1), width)]
    return "<br>".join(plain(line, width) for line in lines) + (f" … (+{left:,} characters)" if left else "")


def _same(new: Any, old: Any) -> bool:
    if isinstance(new, np.ndarray):
        return isinstance(old, np.ndarray) and np.array_equal(new, old, equal_nan=new.dtype.kind == "f")
    return new == old


# ── words and numbers ────────────────────────────────────────────────────────────────────────────────────────────


def _summary(replay: Replay, now: WhatIf, recorded: WhatIf, recorded_shares: pd.DataFrame) -> str:
    """What the settings do, in a few numbers, and what they cannot say, in HTML."""
    left = replay.frame["excluded"].to_numpy()
    reasons = ", ".join(f"{count} {escaped(why, 40)}" for why, count in Counter(left[left != ""]).items())
    out = [f"<b>{len(now.row):,} rollouts</b>{f' (left out: {reasons})' if reasons else ''}"]
    if (~now.own).any():
        for i, name in enumerate(now.names[1:], start=1):
            omega = now.weight[now.of == i][0]
            out.append(f"ω({escaped(name, 40)}, {escaped(now.learner, 40)}) = {omega:.3f}")
        teach = [f"{100 * (~w.clipped[~w.own]).mean():.0f} %" for w in (recorded, now)]
        pull = [f"{100 * (1 - shares.loc[now.learner].sum()):.0f} %" for shares in (recorded_shares, now.shares())]
        out.append(f"peer rollouts not clipped: {teach[1]} (recorded {teach[0]})")
        out.append(f"peer share of the gradient: {pull[1]} (recorded {pull[0]})")
    else:
        out.append("this learner used its own rollouts only, so there is nothing to move")
    before = "" if replay.experience.trained else " Scored before any update of this step: own ratios are 1."
    numbers = " · ".join(f"<span style='white-space:nowrap'>{part}</span>" for part in out)
    return (
        f"<div style='line-height:1.5'>{numbers}<br>"
        f"<span style='color:{GREY}'>{NOTE}{before} {EQUAL_LENGTHS}</span></div>"
    )


def _table(replay: Replay, now: WhatIf, recorded: WhatIf, order: str) -> Table:
    """The rollouts at the head of an order, with what matters of each."""
    unclipped = np.abs(now.advantage) * now.weight * now.ratio
    key = {
        "largest gradient": lambda: np.abs(now.coefficient),
        "clipped": lambda: np.where(now.clipped, unclipped, 0.0),
        "changed most": lambda: np.abs(now.coefficient - recorded.coefficient),
    }[order]()
    top = np.argsort(-key, kind="stable")[:ROWS]
    top = top[key[top] > 0]
    rows = replay.frame.iloc[now.row[top]]
    return Table(
        pd.DataFrame(
            {
                "source": rows["source"].to_numpy(), "prompt": rows["prompt"].to_numpy(), "text": rows["text"].to_numpy(),
                "reward": rows["reward"].to_numpy(), "A": now.advantage[top], "s": now.ratio[top], "ω": now.weight[top],
                "m": now.minibatch[top], "clipped": now.clipped[top], "pull now": now.coefficient[top],
                "pull recorded": recorded.coefficient[top],
            }
        ),
        limit=ROWS,
    )  # fmt: skip


__all__ = ["Explorer", "explorer"]
