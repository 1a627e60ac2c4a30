"""The explorer without a browser: what its controls mean, what it shows, what a move sends, and what is escaped."""

import base64
import io
import json

import ipywidgets
import matplotlib.image
import nbformat
import numpy as np
import pandas as pd
import pytest
from nbconvert import HTMLExporter
from test_experience import made  # pytest puts this folder on the path

import hacpo_kit as hk
from hacpo_kit.advantages import Capability
from hacpo_kit.runs.experience import Experience
from hacpo_kit.views import live
from hacpo_kit.views.explorer import MAX_POINTS, ORDERS, Explorer, chosen_config, recorded_choice
from hacpo_kit.views.live import WIDGET_VIEW

HOSTILE = "<img src=x onerror=alert(1)></code><b>$x^2$</b> <a href='javascript:1'>"


def step(count=64, text=None, config=None, seed=0):
    """One recorded step of learner A with partner B."""
    rng = np.random.default_rng(seed)
    own = np.arange(count) % 2 == 0
    ratio = np.where(own, 1 + 1e-4 * rng.standard_normal(count), rng.uniform(0.5, 1.3, count))
    problems = [f"p{i // 8}" for i in range(count)]
    rewards = rng.integers(0, 2, count)
    experience = made(ratio, own, rewards=rewards, problems=problems, m=np.arange(count) % 4, config=config)
    if text is not None:
        experience.frame["text"] = text
        experience.frame["prompt"] = text
    past = Capability().with_step({"A": 0.2, "B": 0.3}).with_step({"A": 0.5, "B": 0.25})
    return Experience(experience.frame, past, experience.config, 2)


@pytest.fixture
def view():
    return hk.widgets.explorer(step())


def sent(view, monkeypatch):
    """Every message that goes to the page's figure."""
    assert view.widget
    seen, real = [], view._plot._send_update_msg
    monkeypatch.setattr(view._plot, "_send_update_msg", lambda *a, **k: (seen.append((a, k)), real(*a, **k)))
    return seen


def control(view, name):
    return view._controls.of[name]


# ── what the controls mean ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["hacpo", "gspo", "naive", "no_clip", "alpha=0", "no_discrepancy", "delta_step=0"])
def test_untouched_controls_are_the_recorded_settings(method):
    config = hk.Config.preset(method)
    assert chosen_config(config, recorded_choice(config)) == config


def test_switches():
    config = hk.Config(alpha=2.0, delta=0.3)
    start = recorded_choice(config)
    off = {name: chosen_config(config, {**start, name: False}) for name in start if isinstance(start[name], bool)}
    assert off["exponential"] == config.replace(alpha=0.0)
    assert off["clipping"] == config.replace(delta=1.0, delta_step=0.0)
    assert off["capability_baseline"] == config.replace(capability_baseline=False)
    assert off["discrepancy"] == config.replace(discrepancy=False)
    naive = hk.Config.preset("naive")
    on = chosen_config(naive, {**recorded_choice(naive), "clipping": True})
    assert on == naive.replace(peer_update="hacpo", alpha=0.0)


def test_a_move_is_what_replay_says(view):
    view.move(alpha=3.0, delta=0.5, window=1, m=2, discrepancy=False)
    config = view.experience.config.replace(alpha=3.0, delta=0.5, window=1, discrepancy=False)
    assert view.config == config
    expected = view.replay.at(config, updates_made=2)
    np.testing.assert_array_equal(view.now.coefficient, expected.coefficient)
    assert "α 1 → 3" in view.title and "window K 5 → 1" in view.title and "→ 2" in view.title
    with pytest.raises(TypeError, match="gamma: no such control"):
        view.move(gamma=1)
    with pytest.raises(ValueError, match="delta"):
        view.move(delta=7.0)
    for name, value in (("m", -1), ("m", 1.5), ("m", True), ("m", "2"), ("clipping", "no"), ("exponential", None)):
        with pytest.raises(ValueError, match="it takes"):
            view.move(**{name: value})
    assert view.chosen["delta"] == 0.5  # a refused move changes nothing


# ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_figure_shows_the_numbers(view):
    now, traces = view.now, view.figure().data
    bars = [t for t in traces if t.type == "bar" and t.xaxis in (None, "x")]
    peer = ~now.own
    assert sum(int(np.sum(t.y)) for t in bars) == peer.sum()
    clipped = [t for t in bars if t.name == "B" and t.opacity < 1]
    assert np.sum(clipped[0].y) == now.clipped[peer].sum() > 0
    points = {t.name: t for t in traces if t.xaxis == "x2"}
    np.testing.assert_allclose(np.sort(points["B"].y), np.sort(np.abs(now.pull[peer])))
    advantages = [t for t in traces if t.xaxis == "x3"]
    assert sum(int(np.sum(t.y)) for t in advantages) == (now.advantage != 0).sum()
    shares = [t for t in traces if t.xaxis == "x4"]
    assert sum(t.y[1] for t in shares) == pytest.approx(100)
    view.move(clipping=False)
    after = view.figure()
    (band, *_) = after.layout.shapes
    assert (band.x0, band.x1) == (0, 1)
    assert sum(t.y[0] for t in after.data if t.xaxis == "x4") == pytest.approx(100)
    assert [t.y[0] for t in after.data if t.xaxis == "x4"] == [t.y[0] for t in shares]  # "recorded" stays


@pytest.mark.parametrize(
    "config", [None, hk.Config.preset("naive"), hk.Config(sources="own")], ids=["hacpo", "naive", "own"]
)
def test_there_is_a_static_picture_of_every_kind(config):
    experience = step(config=config)
    if config is not None and config.sources == "own":
        experience = Experience(experience.frame[experience.frame["own"]], experience.capability, config, 2)
    shown = hk.widgets.explorer(experience)
    image = matplotlib.image.imread(io.BytesIO(shown.figure().png()))
    assert image.shape[1] > 800 and image[..., 3].std() > 0.05
    assert "<table" in shown.html()


def test_large_steps_are_thinned_and_say_so():
    view = hk.widgets.explorer(step(5000))
    drawn = sum(len(t.x) for t in view.figure().data if t.xaxis == "x2")
    assert drawn == MAX_POINTS and f"{MAX_POINTS:,} of 5,000" in view.figure().layout.xaxis2.title.text
    assert len({len(t.x) for t in hk.widgets.explorer(step(64)).figure().data if t.xaxis == "x2"}) == 1


def test_ratios_beyond_the_axis_are_counted():
    experience = step()
    experience.frame.loc[1, "ratio"] = np.float32(40.0)
    view = hk.widgets.explorer(experience)
    assert "1 above 2: last bar" in view.figure().layout.xaxis.title.text
    bars = [t for t in view.figure().data if t.type == "bar" and t.xaxis in (None, "x")]
    assert sum(int(np.sum(t.y)) for t in bars) == 32


@pytest.mark.parametrize("order", ORDERS)
def test_the_table_lists_what_matters_most(view, order):
    frame = view.move(alpha=4.0).table(order).frame
    assert {"source", "text", "reward", "A", "s", "ω", "clipped"} <= set(frame)
    now, recorded = view.now, view.recorded
    key = {
        "largest gradient": np.abs(now.coefficient),
        "clipped": np.where(now.clipped, np.abs(now.advantage) * now.weight * now.ratio, 0),
        "changed most": np.abs(now.coefficient - recorded.coefficient),
    }[order]
    assert 0 < len(frame) <= 12 and frame["text"].iloc[0] == view.replay.frame["text"].iloc[now.row[np.argmax(key)]]
    assert frame["clipped"].all() if order == "clipped" else True


def test_model_text_is_escaped_everywhere():
    view = hk.widgets.explorer(step(text=HOSTILE))
    assert view.widget
    tips = [str(tip) for t in view.figure().data if t.customdata is not None for tip in t.customdata]
    for shown in (view.html(), view._list.value, *tips):
        assert "<img" not in shown and "<a " not in shown and "$x" not in shown
        assert "&lt;img" in shown


@pytest.mark.parametrize(
    "name", ["<b>x</b>", '<a href="http://x">"y"</a>', "$a$", "%{x}", "own", "a\u202eb\u061c", "z" * 300, "_a & 'b'"]
)
def test_no_name_of_an_agent_is_markup_formula_or_template(name):
    experience = step()
    for column in ("source", "learner"):
        experience.frame[column] = experience.frame[column].replace({"A": name})
    past = {name if k == "A" else k: v for k, v in experience.capability.history.items()}
    view = hk.widgets.explorer(Experience(experience.frame, Capability(5, past), experience.config, 2))
    figure = view.figure()
    assert view.widget and figure.png()
    shown = [view.title, *(t.name for t in figure.data)]
    shown += [str(tip) for t in figure.data if t.customdata is not None for tip in t.customdata]
    for text in map(str, shown):
        assert not set(text.replace("<br>", "").replace("<extra></extra>", "")) & set("<>$\u202e\u061c"), text
        assert "&quot;" not in text  # plotly does not know it
    assert not any(f"{name}, A" in str(t.hovertemplate) for t in figure.data if name == "%{x}")


def test_tooltips_stay_small_and_say_what_is_missing():
    view = hk.widgets.explorer(step(text="a\n" * 1000 + "x" * 100_000))
    tip = next(str(t.customdata[0]) for t in view.figure().data if t.customdata is not None)
    assert tip.count("<br>") < 12 and "(+101,985 characters)" in tip
    assert len(view.html()) < 50_000


# ── the widget ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_slider_sends_one_message(view, monkeypatch):
    seen = sent(view, monkeypatch)
    for name, value in (
        ("alpha", 2.0),
        ("delta", 0.6),
        ("delta_step", 0.1),
        ("window", 1),
        ("m", 3),
        ("discrepancy", False),
    ):
        seen.clear()
        control(view, name).value = value
        assert len(seen) == 1, name
        assert view.chosen[name] == value
    np.testing.assert_array_equal(view.now.coefficient, view.replay.at(view.config, updates_made=3).coefficient)
    # the page's figure is the one that would be drawn afresh
    fresh = view.figure()
    for mine, other in zip(view._plot.data, fresh.data, strict=True):
        np.testing.assert_array_equal(np.asarray(mine.y, float), np.asarray(other.y, float), err_msg=str(mine.name))
    assert view._plot.layout.title.text == fresh.layout.title.text
    assert view._plot.layout.shapes[0].x0 == fresh.layout.shapes[0].x0


def test_reset_and_moves_from_code_move_the_sliders_with_one_message(view, monkeypatch):
    seen = sent(view, monkeypatch)
    view.move(alpha=2.0, delta=0.6, m=1)
    assert len(seen) == 1 and control(view, "alpha").value == 2.0 and control(view, "m").value == 1
    button = next(w for w in walk(view.widget) if "hk-reset" in getattr(w, "_dom_classes", ()))
    seen.clear()
    button.click()
    assert len(seen) == 1 and view.chosen == view.recorded_choice and control(view, "delta").value == 0.2


def walk(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from walk(child)


def test_what_has_no_effect_cannot_be_moved(view):
    assert view.widget
    control(view, "exponential").value = False
    control(view, "clipping").value = False
    assert [n for n, w in view._controls.of.items() if w.disabled] == ["alpha", "delta", "delta_step"]
    own = step(config=hk.Config(sources="own"))
    alone = hk.widgets.explorer(Experience(own.frame[own.frame["own"]], own.capability, own.config, 2))
    assert alone.widget
    assert all(w.disabled for w in alone._controls.of.values())


def test_a_window_without_a_reward_is_said_and_not_drawn(view, monkeypatch):
    past = Capability().with_step({"A": 0.2, "B": 0.3}).with_step({"A": 0.5, "B": None})
    view = hk.widgets.explorer(Experience(view.experience.frame, past, view.experience.config, 2))
    seen = sent(view, monkeypatch)
    control(view, "window").value = 1
    assert not seen and "no scorable rollout in the last 1 steps" in view._says.value
    control(view, "window").value = 2
    assert "rollouts" in view._says.value


@pytest.mark.parametrize(
    ("name", "value"), [("alpha", 9.0), ("window", 50), ("delta_step", 0.9), ("m", 40)], ids=lambda v: str(v)
)
def test_no_slider_cuts_what_is_chosen_or_recorded(view, name, value):
    """A slider that ends before the value would silently stand for another one at the next click."""
    assert view.widget
    view.move(**{name: value})
    assert control(view, name).value == value == view._controls.chosen()[name]
    control(view, "discrepancy").value = False  # a click somewhere else
    assert view.chosen[name] == value
    if name != "m":
        opened = {1: step(), 2: step(config=hk.Config(**{name: value}))}
        several = Explorer(opened.__getitem__, [1, 2], "A", 1)
        assert several.widget
        several._controls.step.value = 2
        control(several, "discrepancy").value = False
        assert several.chosen[name] == value == several.config.to_dict()[name]


def test_a_step_that_cannot_be_shown_leaves_everything_as_it_was(monkeypatch):
    """A damaged file, a learner without a rollout, an agent without capability: said, and the controls go back."""
    good = step()
    nothing = made([1.0], [True])
    nothing.frame["minibatch"] = pd.NA
    unknown = Experience(good.frame, Capability().with_step({"A": 0.5, "B": None}), good.config, 3)

    def load(at):
        if at == 4:
            raise ValueError("no recorded experience <b>")
        return {1: good, 2: nothing, 3: unknown}[at]

    view = Explorer(load, [1, 2, 3, 4], "A", 1)
    seen = sent(view, monkeypatch)
    view.move(alpha=2.0)
    seen.clear()
    for at, why in ((2, "used none of the 1 rollouts"), (3, "no scorable rollout"), (4, "experience &lt;b&gt;")):
        view._controls.step.value = at
        assert "This cannot be shown" in view._says.value and why in view._says.value
        assert (
            view.step == view._controls.step.value == 1 and view.experience is good and view.replay.experience is good
        )
        assert view.chosen["alpha"] == 2.0 == view._controls.chosen()["alpha"]
    assert not seen
    control(view, "delta").value = 0.5
    assert len(seen) == 1 and "cannot be shown" not in view._says.value


@pytest.mark.parametrize("method", ["naive", "gspo"])
def test_methods_that_need_no_capability_open_without_one(method):
    experience = step(config=hk.Config.preset(method))
    frame = experience.frame[experience.frame["own"]] if method == "gspo" else experience.frame
    view = hk.widgets.explorer(Experience(frame, Capability(), experience.config, 3))
    assert view.widget and view.figure().png() and list(view.panels.steps) == [3]


def test_keep_a_picture(view):
    assert view.widget
    button = next(w for w in walk(view.widget) if "hk-keep" in getattr(w, "_dom_classes", ()))
    button.click()
    view.move(alpha=2.0)
    button.click()
    kept = view._kept.children
    assert [("α 1 → 2" in box.children[0].value) for box in kept] == [True, False]
    assert all(
        isinstance(box.children[1], ipywidgets.Image) and box.children[1].value[:4] == b"\x89PNG" for box in kept
    )


def test_every_control_can_be_found_and_is_named(view):
    classes = {c for w in walk(view.widget) for c in getattr(w, "_dom_classes", ())}
    names = ("alpha", "delta", "delta-step", "window", "m", "learner", "reset", "keep", "order", "capability-baseline")
    assert {f"hk-{name}" for name in names} <= classes
    assert all(w.description for w in view._controls.of.values())


# ── where it stands ──────────────────────────────────────────────────────────────────────────────────────────────


def test_below_the_widget_stands_its_picture(view, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: shown.append((data, options)))
    view._ipython_display_()
    view._display_picture(update=True)
    (widget, _), (picture, first), (_, again) = shown
    assert widget[WIDGET_VIEW]["model_id"] == view.widget.model_id and "hacpo-live" in view.widget._dom_classes
    assert base64.b64decode(picture["image/png"])[:4] == b"\x89PNG" and picture["text/plain"].startswith("Explorer: ")
    assert again == {**first, "update": True}  # in the same place, and the widget is left alone
    # a notebook saved in JupyterLab, without the widgets' state, as HTML
    stored = [nbformat.v4.new_output("display_data", data=data) for data in (widget, picture)]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("view", outputs=stored)])
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert page.count(picture["image/png"][:200]) == 1 and view.widget.model_id not in page


def test_where_nobody_can_click_no_widget_is_made(view, monkeypatch):
    shown = []
    monkeypatch.setattr(live, "unattended", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda x, **_: shown.append(x))
    monkeypatch.setattr(type(view), "build", lambda self: pytest.fail("a widget was made"))
    view._ipython_display_()
    figure, table = shown
    assert set(figure._repr_mimebundle_()) == {"text/plain", "image/png", "application/vnd.plotly.v1+json"}
    json.dumps(figure._repr_mimebundle_())
    assert "<table" in table.data


# ── what it opens ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = hk.Config(prompts_per_step=4, n=4, minibatch=16)
    agents = hk.load_agents("tiny-model-pair", device="cpu")
    problems = hk.load_problems("arithmetic", split="train", size=40)
    return hk.train(agents, problems, config, 3, out=tmp_path_factory.mktemp("run") / "run", progress="off")


def test_a_recorded_run_opens_at_any_step_and_learner(run):
    view = hk.widgets.explorer(run.folder, agent="llama-differences", step=2)
    assert view.panels.agents == [
        "qwen3-sums",
        "llama-differences",
    ]  # as the run has them: colours are those of other plots
    assert (view.step, view.learner) == (2, "llama-differences")
    assert hk.widgets.explorer(run).step == 3
    view.move(alpha=3.0)
    assert view.widget
    view._controls.step.value = 1
    assert view.step == 1 and view.learner == "llama-differences" and view.chosen["alpha"] == 1.0
    assert "in step 1" in view._plot.layout.title.text
    view._controls.learner.value = "qwen3-sums"
    assert view.learner == "qwen3-sums"
    fresh = hk.widgets.explorer(run.folder, agent="qwen3-sums", step=1).figure()
    for mine, other in zip(view._plot.data, fresh.data, strict=True):
        np.testing.assert_array_equal(np.asarray(mine.y, float), np.asarray(other.y, float), err_msg=str(mine.name))
        assert mine.customdata is None or list(mine.customdata) == list(other.customdata)


def test_a_live_pool_opens_before_and_after_its_update(pair, problems):
    pool = hk.reward(hk.rollout(pair, problems[:4], n=4, progress=False))
    capability, config = hk.Capability().observe(pool), hk.Config(minibatch=8)
    before = hk.widgets.explorer(pool, pair[0], capability, config)
    assert before.step is None and before.widget  # without a step's number
    control(before, "alpha").value = 2.0
    before._controls.learner.options = [*before._controls.learner.options, "nobody"]
    before._controls.learner.value = "nobody"
    assert "is no learner" in before._says.value and before.chosen["alpha"] == 2.0
    assert "before any update" in before.html() and before.learner == pair[0].name
    stats = hk.update(pair[0], hk.advantage(pool, pair[0], capability, config), config)
    after = hk.widgets.explorer(pool, pair[0], capability, config, stats=stats)
    assert "before any update" not in after.html()
    seen = stats.to_frame()
    assert after.now.clipped.sum() == seen["clipped"].sum()


def test_what_does_not_fit_is_refused(run, tmp_path, pair, problems):
    pool = hk.reward(hk.rollout(pair, problems[:2], n=2, progress=False))
    with pytest.raises(TypeError, match="give the learner and the capability"):
        hk.widgets.explorer(pool)
    with pytest.raises(TypeError, match="belong to a pool"):
        hk.widgets.explorer(run.folder, config=hk.Config())
    with pytest.raises(TypeError, match="not int"):
        hk.widgets.explorer(3)
    with pytest.raises(FileNotFoundError, match="record_every"):
        hk.widgets.explorer(tmp_path)
    with pytest.raises(ValueError, match="is no learner"):
        hk.widgets.explorer(run.folder, agent="nobody")
