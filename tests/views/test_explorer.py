"""hk.widgets.explorer without a browser: its controls, its figure and table, the messages that it sends, and escaping."""

import io

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from parts import find

import hacpo_kit as hk
from hacpo_kit.runs.experience import Experience
from hacpo_kit.views.explorer import ORDERS, Explorer
from hacpo_kit.views.explorer_controls import config_of, control_values
from hacpo_kit.views.explorer_figure import MAX_POINTS, tooltip_text

HOSTILE = "<img src=x onerror=alert(1)></code><b>$x^2$</b> <a href='javascript:1'>"
PAST = hk.Capability().with_step({"A": 0.2, "B": 0.3}).with_step({"A": 0.5, "B": 0.25})


@pytest.fixture(scope="module")
def step(experience_of):
    """step(…): one recorded step of learner "A" with peer "B", by default the second step of 64 rollouts."""

    def make(count=64, *, text=None, config=None, capability=PAST, only_own=False, number=2):
        rng = np.random.default_rng(0)
        own = np.arange(count) % 2 == 0
        ratio = np.where(own, 1 + 1e-4 * rng.standard_normal(count), rng.uniform(0.5, 1.3, count))
        rewards, problems = rng.integers(0, 2, count), [f"p{i // 8}" for i in range(count)]
        made = experience_of(ratio, own, rewards=rewards, problems=problems, m=np.arange(count) % 4, config=config)
        frame = made.frame[own] if only_own else made.frame
        if text is not None:
            frame = frame.assign(text=text, prompt=text)
        return Experience(frame, capability, made.config, number)

    return make


@pytest.fixture
def view(step):
    return hk.widgets.explorer(step())


@pytest.fixture
def sent():
    """sent(view): the list that receives every message from now on to the figure in the page."""

    def record(view):
        messages, plot = [], view.widget and view._plot
        plot.observe(lambda change: change.new and messages.append(change.new), "_py2js_update")
        return messages

    return record


def traces(view, panel):
    """The traces of one panel of the static figure."""
    return [t for t in view.figure().data if t.xaxis == (f"x{panel}" if panel > 1 else "x")]


# ── controls and settings ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["hacpo", "gspo", "naive", "no_clip", "alpha=0", "no_discrepancy", "delta_step=0"])
def test_config_of_untouched_controls_is_the_record(method):
    config = hk.Config.preset(method)
    assert config_of(control_values(config), config) == config


def test_config_of_switches():
    config = hk.Config(alpha=2.0, delta=0.3)
    start = control_values(config)
    off = {name: config_of({**start, name: False}, config) for name in start if isinstance(start[name], bool)}
    assert off == {
        "exponential": config.replace(alpha=0.0),
        "clipping": config.replace(delta=1.0, delta_step=0.0),
        "capability_baseline": config.replace(capability_baseline=False),
        "discrepancy": config.replace(discrepancy=False),
    }
    naive = hk.Config.preset("naive")
    on = config_of({**control_values(naive), "clipping": True}, naive)
    assert on == naive.replace(peer_update="hacpo", alpha=0.0)


def test_explorer_move_equals_the_replay(view):
    view.move(alpha=3.0, delta=0.5, window=1, m=2, discrepancy=False)
    config = view.experience.config.replace(alpha=3.0, delta=0.5, window=1, discrepancy=False)
    assert view.config == config
    np.testing.assert_array_equal(view.now.coefficient, view.replay.at(config, updates_made=2).coefficient)
    assert "α 1 → 3" in view.title and "window K 5 → 1" in view.title and "→ 2" in view.title


@pytest.mark.parametrize(
    ("name", "value"), [("delta", 7.0), ("m", -1), ("m", 1.5), ("m", True), ("clipping", "no"), ("exponential", None)]
)
def test_explorer_move_refuses_an_invalid_value(view, name, value):
    before = dict(view.values)
    with pytest.raises(ValueError, match=f"{'updates_made' if name == 'm' else name}="):
        view.move(**{name: value})
    with pytest.raises(TypeError, match="gamma"):
        view.move(gamma=1)
    assert view.values == before


# ── figure and table ─────────────────────────────────────────────────────────────────────────────────────────────


def test_explorer_figure_shows_the_numbers_of_the_replay(view):
    now, peer = view.now, ~view.now.own
    assert sum(int(np.sum(t.y)) for t in traces(view, 1)) == peer.sum()
    (clipped,) = [t for t in traces(view, 1) if t.name == "B" and t.opacity < 1]
    assert np.sum(clipped.y) == now.clipped[peer].sum() > 0
    (weights,) = [t for t in traces(view, 2) if t.name == "B"]
    contributing = peer & (now.advantage != 0)
    expected = np.abs(now.coefficient[contributing] / now.advantage[contributing])
    np.testing.assert_allclose(np.sort(weights.y[np.isfinite(weights.y)]), np.sort(expected))
    assert sum(int(np.sum(t.y)) for t in traces(view, 3)) == (now.advantage != 0).sum()
    recorded = [t.y[0] for t in traces(view, 4)]
    assert sum(t.y[1] for t in traces(view, 4)) == pytest.approx(100)
    view.move(clipping=False)
    assert (view.figure().layout.shapes[0].x0, view.figure().layout.shapes[0].x1) == (0, 1)
    assert [t.y[0] for t in traces(view, 4)] == recorded != [t.y[1] for t in traces(view, 4)]


@pytest.mark.parametrize("method", ["hacpo", "naive", "gspo"])
def test_explorer_figure_has_a_static_picture(step, method):
    view = hk.widgets.explorer(step(config=hk.Config.preset(method), only_own=method == "gspo"))
    image = matplotlib.image.imread(io.BytesIO(view.figure().png()))
    assert image.shape[1] > 800 and image[..., 3].std() > 0.05


def test_explorer_figure_limits_points_and_ratios(step):
    view = hk.widgets.explorer(step(5000))
    assert sum(len(t.x) for t in traces(view, 2)) == MAX_POINTS
    assert f"{MAX_POINTS} of 5,000" in view.figure().layout.xaxis2.title.text
    experience = step()
    experience.frame.loc[1, "ratio"] = np.float32(40.0)
    view = hk.widgets.explorer(experience)
    assert "1 above 2" in view.figure().layout.xaxis.title.text
    assert sum(int(np.sum(t.y)) for t in traces(view, 1)) == 32


@pytest.mark.parametrize("order", ORDERS)
def test_explorer_table_begins_with_the_largest(view, order):
    frame = view.move(alpha=4.0).table(order).frame
    now = view.now
    key = {
        "largest gradient": np.abs(now.coefficient),
        "clipped": np.where(now.clipped, np.abs(now.advantage) * now.weight * now.ratio, 0),
        "changed most": np.abs(now.coefficient - view.recorded.coefficient),
    }[order]
    assert 0 < len(frame) <= 12 and frame["text"].iloc[0] == view.replay.frame["text"].iloc[now.row[np.argmax(key)]]
    assert frame["clipped"].all() or order != "clipped"


# ── escaping ─────────────────────────────────────────────────────────────────────────────────────────────────────


def tooltips(view):
    return [str(tip) for t in view.figure().data if t.customdata is not None for tip in t.customdata]


def test_explorer_escapes_the_text_of_rollouts(step):
    view = hk.widgets.explorer(step(text=HOSTILE))
    for shown in (view.html(), find(view.widget, "hk-explorer-table").value, *tooltips(view)):
        assert "<img" not in shown and "<a " not in shown and "$x" not in shown and "&lt;img" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["<b>x</b>", '<a href="http://x">"y"</a>', "$a$", "%{x}", "own", "a\u202eb\u061c", "z" * 300, "_a & 'b'"]
)
def test_explorer_escapes_the_names_of_agents(step, name):
    past = {name if k == "A" else k: v for k, v in PAST.history.items()}
    experience = step(capability=hk.Capability(5, past))
    for column in ("source", "learner"):
        experience.frame[column] = experience.frame[column].replace({"A": name})
    view = hk.widgets.explorer(experience)
    figure = view.figure()
    assert view.widget and figure.png()
    for text in map(str, (view.title, *(t.name for t in figure.data), *tooltips(view))):
        assert not set(text.replace("<br>", "")) & set("<>$\u202e\u061c"), text
        assert "&quot;" not in text  # plotly does not know this entity
    assert not any("%{x}, A" in str(t.hovertemplate) for t in figure.data)


def test_tooltip_text_is_short_and_counts_what_is_missing():
    text = tooltip_text("a\n" * 1000 + "x" * 100_000)
    assert text.count("<br>") < 12 and "(+101,985 characters)" in text


# ── the widget ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_explorer_sends_one_message_per_move(view, sent):
    messages = sent(view)
    moves = {"alpha": 2.0, "delta": 0.6, "delta_step": 0.1, "window": 1, "m": 3, "discrepancy": False}
    for name, value in moves.items():
        messages.clear()
        view._controls.of[name].value = value
        assert len(messages) == 1 and view.values[name] == value, name
    np.testing.assert_array_equal(view.now.coefficient, view.replay.at(view.config, updates_made=3).coefficient)
    same_figure(view._plot, view.figure())
    messages.clear()
    view.move(alpha=3.0, delta=0.7, m=1)
    assert len(messages) == 1 and view._controls.values() == view.values
    view._controls.reset.click()
    assert len(messages) == 2 and view.values == view.recorded_values == view._controls.values()


def same_figure(shown, expected):
    """Assert that the figure in the page equals one that is drawn from scratch."""
    for trace, fresh in zip(shown.data, expected.data, strict=True):
        np.testing.assert_array_equal(np.asarray(trace.y, float), np.asarray(fresh.y, float), err_msg=str(trace.name))
        np.testing.assert_array_equal(trace.customdata, fresh.customdata)
    assert shown.layout.title.text == expected.layout.title.text
    assert shown.layout.shapes[0].x0 == expected.layout.shapes[0].x0


def test_explorer_disables_controls_without_effect(view, step):
    assert view.widget
    view._controls.of["exponential"].value = view._controls.of["clipping"].value = False
    assert [n for n, w in view._controls.of.items() if w.disabled] == ["alpha", "delta", "delta_step"]
    alone = hk.widgets.explorer(step(config=hk.Config(share="none"), only_own=True))
    assert alone.widget and all(w.disabled for w in alone._controls.of.values())


@pytest.mark.parametrize(("name", "value"), [("alpha", 9.0), ("window", 50), ("delta_step", 0.9), ("m", 40)])
def test_explorer_sliders_reach_every_chosen_and_recorded_value(view, step, name, value):
    assert view.widget
    view.move(**{name: value})
    view._controls.of["discrepancy"].value = False  # a click on another control keeps the value
    assert view.values[name] == value == view._controls.values()[name]
    if name != "m":
        opened = {1: step(), 2: step(config=hk.Config(**{name: value}))}
        several = Explorer(opened.__getitem__, [1, 2], "A", 1)
        assert several.widget
        several._controls.step.index = 1
        several._controls.of["discrepancy"].value = False
        assert several.values[name] == value == several.config.to_dict()[name]


def test_explorer_keeps_its_state_when_a_move_fails(step, sent):
    past = hk.Capability().with_step({"A": 0.2, "B": 0.3}).with_step({"A": 0.5, "B": None})
    view = hk.widgets.explorer(step(capability=past))
    messages = sent(view)
    view._controls.of["window"].value = 1  # B has no reward in the last step
    assert not messages and "no scorable rollout" in view._summary.value
    assert view.values["window"] == 5 == view._controls.values()["window"]
    view._controls.of["window"].value = 2
    assert len(messages) == 1 and "rollouts" in view._summary.value


def test_explorer_keeps_its_state_when_a_step_cannot_be_opened(step, experience_of, sent):
    good, unused = step(), experience_of([1.0], [True])
    unused.frame["minibatch"] = pd.NA
    unknown = step(capability=hk.Capability().with_step({"A": 0.5, "B": None}))

    def load(number):
        if number == 4:
            raise ValueError("damaged <b>")
        return {1: good, 2: unused, 3: unknown}[number]

    view = Explorer(load, [1, 2, 3, 4], "A", 1)
    messages = sent(view)
    view.move(alpha=2.0)
    for number, reason in ((2, "used none of the 1 rollouts"), (3, "no scorable rollout"), (4, "damaged &lt;b&gt;")):
        view._controls.step.index = number - 1
        assert reason in view._summary.value
        assert (view.step, view._controls.step.value) == (1, "1") and view.experience is view.replay.experience is good
        assert view.values["alpha"] == 2.0 == view._controls.values()["alpha"]
    assert len(messages) == 1


# ── what it opens ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["naive", "gspo"])
def test_explorer_opens_without_capability(step, method):
    config = hk.Config.preset(method)
    view = hk.widgets.explorer(step(config=config, capability=hk.Capability(), only_own=method == "gspo", number=3))
    assert view.widget and view.figure().png() and view.panels.steps.tolist() == [3]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = hk.Config(prompts_per_step=4, n=4, minibatch=16)
    problems = hk.load_problems("arithmetic", split="train", size=40)
    agents = hk.load_agents("tiny-model-pair", device="cpu")
    return hk.train(agents, problems, config, 3, out=tmp_path_factory.mktemp("run") / "run", progress="off")


def test_explorer_opens_every_step_and_learner_of_a_run(run):
    view = hk.widgets.explorer(run.folder, agent="llama-differences", step=2)
    assert view.panels.agents == ["qwen3-sums", "llama-differences"]  # in the order of the run, as in other plots
    assert (view.step, view.learner) == (2, "llama-differences") and hk.widgets.explorer(run).step == 3
    view.move(alpha=3.0)
    assert view.widget
    view._controls.step.index = 0
    assert view.step == 1 and view.learner == "llama-differences" and view.values["alpha"] == 1.0
    assert "in step 1" in view._plot.layout.title.text
    view._controls.learner.value = "qwen3-sums"
    assert view.learner == "qwen3-sums"
    same_figure(view._plot, hk.widgets.explorer(run.folder, agent="qwen3-sums", step=1).figure())


def test_explorer_opens_a_pool_before_and_after_its_update(pair, problems):
    pool = hk.reward(hk.rollout(pair, problems[:4], n=4, progress=False))
    capability, config = hk.Capability().observe(pool), hk.Config(minibatch=8)
    before = hk.widgets.explorer(pool, pair[0], capability, config)
    assert before.step is None and before.widget and before.learner == pair[0].name
    before._controls.of["alpha"].value = 2.0
    assert before.values["alpha"] == 2.0 and "before the first update" in before.html()
    stats = hk.update(pair[0], hk.advantage(pool, pair[0], capability, config), config)
    after = hk.widgets.explorer(pool, pair[0], capability, config, stats=stats)
    assert "before the first update" not in after.html()
    assert after.now.clipped.sum() == stats.to_frame()["clipped"].sum()


def test_explorer_opens_the_last_step_of_a_run_without_a_folder():
    problems = hk.load_problems("arithmetic", split="train", size=40)
    agents = hk.load_agents("tiny-model-pair", device="cpu")
    change = lambda result: result.config.replace(alpha=3.0)  # noqa: E731  for the step that would follow
    config = hk.Config(prompts_per_step=4, n=4, minibatch=16)
    run = hk.train(agents, problems, config, 1, progress="off", callbacks=[change])
    view = hk.widgets.explorer(run)
    assert view.step == 1 and view.config.alpha == 1.0
    with pytest.raises(FileNotFoundError, match="record_every"):
        hk.widgets.explorer(run, step=7)


def test_explorer_refuses_arguments_that_do_not_fit(run, tmp_path, pair, problems):
    pool = hk.reward(hk.rollout(pair, problems[:2], n=2, progress=False))
    with pytest.raises(TypeError, match="learner and the capability"):
        hk.widgets.explorer(pool)
    with pytest.raises(TypeError, match="belong to a pool"):
        hk.widgets.explorer(run.folder, config=hk.Config())
    with pytest.raises(TypeError, match="source=3"):
        hk.widgets.explorer(3)
    with pytest.raises(FileNotFoundError, match="record_every"):
        hk.widgets.explorer(tmp_path)
    with pytest.raises(ValueError, match="'missing'"):
        hk.widgets.explorer(run.folder, agent="missing")
