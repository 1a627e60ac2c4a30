"""The explorer's controls: the setting behind each, and their widgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as w

from hacpo_kit.config import Config
from hacpo_kit.views.whatif import Replay

OWN_M = "each its own"  # label of m=None: every rollout has the clipping range of its own mini-batch
# control → label, help
SLIDERS = {
    "alpha": ("α", "exponent of the stop-gradient ratio that weights a peer rollout (eq. 12)"),
    "delta": ("δ", "width of the peer clipping range at the first update of the step (eq. 13)"),
    "delta_step": ("δ_step", "decrease of this width with each update (eq. 14)"),
    "window": ("window K", "steps in the mean of the rewards that gives P̂ (eq. 8)"),
    "m": ("m", "apply the clipping range after m updates to all rollouts (eq. 14)"),
}
RANGES = {
    "alpha": (0.0, 5.0, 0.25),
    "delta": (0.0, 1.0, 0.05),
    "delta_step": (0.0, 0.2, 0.005),
}  # least, greatest, step
SWITCHES = {
    "capability_baseline": ("capability-aware baseline", "scale peer rewards by ω(learner, source) (eq. 6)"),
    "discrepancy": ("discrepancy coefficient ω", "scale peer advantages by ω(source, learner) (eq. 10)"),
    "exponential": ("exponential importance sampling", "off: α = 0 (eq. 12)"),
    "clipping": ("stepwise clipping", "off: the clipping range is 0 to 1 at every update (eqs. 13-14)"),
}


def control_values(config: Config) -> dict[str, Any]:
    """Return the position of every control that stands for these settings."""
    hacpo = config.peer_update == "hacpo"  # with peer_update="own" there is neither α nor a peer clipping range
    settings = ("alpha", "delta", "delta_step", "window", "capability_baseline", "discrepancy")
    return {**{name: getattr(config, name) for name in settings}, "m": None, "exponential": hacpo, "clipping": hacpo}


def config_of(values: Mapping[str, Any], recorded: Config) -> Config:
    """Return the recorded settings with the changes that the controls stand for."""
    for name in SWITCHES:
        if not isinstance(values[name], bool):
            raise ValueError(f"{name}={values[name]!r}: a switch takes True or False")
    changes = {name: values[name] for name in ("window", "capability_baseline", "discrepancy")}
    if recorded.peer_update == "hacpo" or values["exponential"] or values["clipping"]:
        changes |= {"peer_update": "hacpo", "alpha": values["alpha"] if values["exponential"] else 0.0}
        clipping = {name: values[name] for name in ("delta", "delta_step")}
        changes |= clipping if values["clipping"] else {"delta": 1.0, "delta_step": 0.0}
    return recorded.replace(**changes)


def changes_text(values: Mapping[str, Any], recorded: Mapping[str, Any]) -> str:
    """Return the controls that differ from the recorded settings, as in "α 1 → 3"."""

    def text(value: Any) -> str:
        if value is None:
            return OWN_M
        return ("on" if value else "off") if isinstance(value, bool) else f"{value:g}"

    changed = [name for name in values if values[name] != recorded[name]]
    labels = {name: label for name, (label, _) in (SLIDERS | SWITCHES).items()}
    return ", ".join(f"{labels[name]} {text(recorded[name])} → {text(values[name])}" for name in changed)


class Controls:
    """The widgets above the figure. `on_move` gets all values, `on_open` a step and a learner."""

    def __init__(self, steps: Sequence[int | None], on_move: Callable, on_open: Callable):
        self.steps, self._on_move, self._on_open, self._silent = list(steps), on_move, on_open, False
        wide = {"layout": {"width": "355px"}, "style": {"description_width": "82px"}}
        self.of: dict[str, w.Widget] = {
            name: w.FloatSlider(min=low, max=high, step=step, readout_format=".3f", **wide)
            for name, (low, high, step) in RANGES.items()
        }
        self.of |= {"window": w.IntSlider(min=1, max=1, **wide), "m": w.SelectionSlider(options=[(OWN_M, -1)], **wide)}
        self.of |= {name: w.Checkbox(indent=False, layout={"width": "265px"}) for name in SWITCHES}
        for name, (label, meaning) in (SLIDERS | SWITCHES).items():
            self.of[name].description, self.of[name].tooltip = label, meaning
        self.step = w.SelectionSlider(options=list(map(str, steps)), description="step", **wide)
        self.step.layout.display = None if len(steps) > 1 else "none"
        self.learner = w.Dropdown(description="learner", **wide)
        self.reset = w.Button(description="reset", icon="undo", tooltip="back to the recorded settings")
        opening = {"step": self.step, "learner": self.learner}
        for name, widget in {**self.of, **opening, "reset": self.reset}.items():
            widget.add_class(f"hk-{name.replace('_', '-')}")
        for widget in self.of.values():
            widget.observe(self._moved, "value")
        for widget in opening.values():
            widget.observe(self._opened, "value")
        self.reset.on_click(lambda _: on_move(self._recorded))
        rows = ([self.learner, self.step, self.reset], [self.of[k] for k in SLIDERS], [self.of[k] for k in SWITCHES])
        flow = {"flex_flow": "row wrap", "align_items": "center"}
        self.box = w.VBox([w.Box(row, layout=flow) for row in rows])

    def values(self) -> dict[str, Any]:
        """Return the position of every control."""
        values = {name: widget.value for name, widget in self.of.items()}
        return {**values, "m": None if values["m"] < 0 else values["m"]}

    def show(self, values: Mapping[str, Any], replay: Replay, step: int | None) -> None:
        """Move every control to these values without calling back."""
        self._silent, self._recorded = True, control_values(replay.experience.config)
        try:
            self._widen(values, replay)
            for name, value in values.items():
                self.of[name].value = -1 if value is None else value
            self.step.index = self.steps.index(step)
            if self.learner.options != (learners := tuple(replay.experience.learners)):
                self.learner.options = learners
            self.learner.value = replay.learner
            # a control without effect is disabled
            without_effect = {"alpha": not values["exponential"]}
            without_effect |= dict.fromkeys(("delta", "delta_step"), not values["clipping"])
            for name, widget in self.of.items():
                widget.disabled = bool(replay.own.all() or without_effect.get(name, False))
        finally:
            self._silent = False

    def _widen(self, values: Mapping[str, Any], replay: Replay) -> None:
        """Extend the sliders to these values: a slider would silently cut a value beyond its end."""
        steps = map(len, replay.experience.capability.history.values())
        self.of["window"].max = max([self.of["window"].max, self._recorded["window"], *steps])
        for name in ("alpha", "delta", "delta_step", "window"):
            self.of[name].max = max(self.of[name].max, values[name])
        counts = {*range(max(8, int(replay.minibatch.max())) + 1), *({values["m"]} - {None})}
        # −1 stands for None, which a selection takes for no selection
        options = ((OWN_M, -1), *((str(m), m) for m in sorted(counts)))
        if self.of["m"].options != options:
            self.of["m"].options = options

    def _moved(self, _: Any) -> None:
        if not self._silent:
            self._on_move(self.values())

    def _opened(self, _: Any) -> None:
        if not self._silent:
            self._on_open(self.steps[self.step.index], self.learner.value)
