"""hk.widgets.monitor without a browser: a training in a thread that can pause, change and stop, and loses nothing."""

import json
import threading
import time
import warnings
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import hacpo_kit as hk
from hacpo_kit.common.files import read_lines
from hacpo_kit.runs.checkpoints import checkpoints
from hacpo_kit.views.monitor import MOST_POINTS, Curve, Monitor

CONFIG = hk.Config(prompts_per_step=4, n=4, minibatch=16)
OPTIONS = {"eval_every": 2, "save_every": 4}


def weights(agents):
    return {f"{a.name}.{k}": v for a in agents for k, v in a.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def agents():
    return hk.load_agents("tiny-model-pair", device="cpu")


def problems(split="train", size=50):
    return hk.load_problems("arithmetic", split=split, size=size)


def made(folder, *, steps=6, config=CONFIG, **options):
    return hk.widgets.monitor(
        agents(), problems(), config, steps, out=folder, test=problems("test", 6), **OPTIONS, **options
    )


class At:
    """A callback that does something after a step, in the training's own thread: nothing depends on who is faster."""

    def __init__(self, **actions):
        self.actions = {int(name.removeprefix("step_")): action for name, action in actions.items()}
        self.monitor = None

    def __call__(self, result):
        if action := self.actions.get(result.metrics["step"]):
            action(self.monitor)


def scripted(folder, *, shown=False, steps=6, **actions):
    at = At(**actions)
    at.monitor = made(folder, steps=steps, callbacks=[at])
    if shown:
        at.monitor.widget  # noqa: B018
    return at.monitor


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same training by train alone, its settings changed by a callback after the second and the third step."""
    torch.set_num_threads(1)

    def change(result):
        step = result.metrics["step"]
        return result.config.replace(**{2: {"lr": 3e-5}, 3: {"delta": 0.5, "window": 3}}.get(step, {}))

    folder = tmp_path_factory.mktemp("runs") / "whole"
    return hk.train(agents(), problems(), CONFIG, 6, out=folder, test=problems("test", 6), callbacks=[change],
                    progress="off", **OPTIONS)  # fmt: skip


def test_a_monitored_run_with_pauses_and_changes_is_the_same_run(undisturbed, tmp_path):
    """Bit for bit: a change while running, one while paused, a stop, and another kernel's monitor on the same folder."""
    monitor = scripted(
        tmp_path / "run", shown=True, step_2=lambda m: m.change(lr=3e-5), step_3=lambda m: m.pause(), step_5=lambda m: m.stop()
    )  # fmt: skip
    assert monitor.status == "ready" and not monitor.running
    run = monitor.start().wait(120)
    assert monitor.status == "paused" and run.stopped and monitor.step == 3
    assert checkpoints(monitor.folder)[-1].name == "step-000003"
    monitor.change(delta=0.5, window=3)
    assert monitor.pending == {"delta": 0.5, "window": 3} and monitor.config.delta == 0.2
    assert monitor.start().wait(120).state.step == 5 and monitor.status == "stopped"
    other = made(tmp_path / "run")  # as after a restart of the kernel
    assert other.status == "stopped" and other.step == 5 and other.config == undisturbed.config
    assert other.curves["reward", "qwen3-sums", ""].points()[0] == [1, 2, 3, 4, 5]
    run = other.start().wait(120)
    assert other.status == "finished" and not run.stopped
    assert same(weights(run.agents), weights(undisturbed.agents)) and run.config == undisturbed.config
    assert read_lines(run.folder / "samples.jsonl") == read_lines(undisturbed.folder / "samples.jsonl")
    changes = read_lines(run.folder / "changes.jsonl")
    assert changes == read_lines(undisturbed.folder / "changes.jsonl") == other.changes
    assert [(c["setting"], c["old"], c["new"], c["from_step"]) for c in changes] == [
        ("lr", 1e-4, 3e-5, 3), ("window", 5, 3, 4), ("delta", 0.2, 0.5, 4)
    ]  # fmt: skip


def test_the_curves_are_the_records_and_what_was_changed_is_told(tmp_path):
    monitor = scripted(tmp_path / "run", steps=4, step_2=lambda m: m.change(lr=3e-5, alpha=2))
    monitor.start().wait(120)
    frame = monitor.to_frame()
    for name in ("qwen3-sums", "llama-differences"):
        mine = frame[frame["agent"] == name].set_index("step")
        for (panel, who), metric in {
            ("accuracy", ""): "avg@1", ("reward", ""): "reward", ("capability", ""): "capability",
            ("ratio", "own"): "own_ratio_mean", ("ratio", "peer"): "peer_ratio_mean",
        }.items():  # fmt: skip
            x, y = monitor.curves[panel, name, who].points()
            recorded = mine[metric].dropna()
            assert x == recorded.index.tolist() and y == recorded.tolist()
    assert monitor.curves["accuracy", "qwen3-sums", ""].points()[0] == [0, 2, 4]
    shapes = monitor.figure().layout.shapes
    assert len(shapes) == 4 and {s.x0 for s in shapes} == {2.5}
    text = monitor.changes_html()
    assert "from step 3: <code>lr</code> 0.0001 → 3e-05" in text and "<code>alpha</code> 1.0 → 2.0" in text
    assert "dotted: settings changed" in monitor.figure().layout.title.text
    assert monitor.figure().png()[:4] == b"\x89PNG"


def test_the_page_shows_what_the_monitor_knows(tmp_path):
    monitor = scripted(tmp_path / "run", shown=True, steps=4, step_3=lambda m: m.pause())
    view = monitor._view
    assert view.start.description == "Start" and view.pause.disabled and view.stop.disabled
    view.start.click()
    assert monitor.running
    monitor.wait(120)
    settled(monitor)
    assert view.start.description == "Resume" and view.pause.disabled and not view.start.disabled
    assert view.progress.value == 3 and "paused, saved" in view.status.value and "step 3 of 4" in view.status.value
    reward = next(t for t in view.curves.data if t.yaxis == "y2" and t.name == "qwen3-sums")
    assert list(reward.x) == [1, 2, 3]
    assert len(view.problem.options) == 4 and "gold answer" in view.rollouts.value
    view.inputs["delta"].value = 0.5
    view.inputs["lr"].value = 0.0
    view._do(view._apply)
    assert monitor.pending == {"delta": 0.5, "lr": 0.0} and "waits for the next step" in view.changes.value
    view.inputs["lr"].value = 1e-4  # put back before its step came
    view._do(view._apply)
    assert monitor.pending == {"delta": 0.5}
    view.start.click()
    monitor.wait(120)
    settled(monitor)
    assert (
        view.start.disabled
        and "finished" in view.status.value
        and "from step 4: <code>delta</code>" in view.changes.value
    )


def test_what_was_typed_may_come_after_the_click_on_apply(tmp_path):
    """The kernel's front end does not keep the order of messages of two widgets."""
    monitor = made(tmp_path / "run")
    view = monitor.widget and monitor._view
    apply = next(w for w in walk(view.root) if "hacpo-apply" in w._dom_classes)
    apply.click()
    view.inputs["delta"].value = 0.5
    deadline = time.monotonic() + 20
    while not monitor.pending and time.monotonic() < deadline:
        time.sleep(0.01)
    assert monitor.pending == {"delta": 0.5}


def walk(widget):
    """The widget and all in it."""
    yield widget
    for child in getattr(widget, "children", ()):
        yield from walk(child)


def settled(monitor):
    """Waits for the painter, which draws once more after the training has ended."""
    for thread in threading.enumerate():
        if thread.name == "monitor":
            thread.join(20)


def test_a_held_step_stays_while_training_goes_on(tmp_path):
    monitor = scripted(tmp_path / "run", shown=True, steps=3, step_2=lambda m: m.pause())
    monitor.start().wait(120)
    settled(monitor)
    view = monitor._view
    view.hold.value = True
    view.problem.index = 3
    before = view.rollouts.value
    assert "step 2:" in before and "step 2:" in monitor.rollouts_html()
    monitor.start().wait(120)
    settled(monitor)
    assert view.rollouts.value == before and "step 3:" in monitor.rollouts_html()
    view.hold.value = False
    assert "step 3:" in view.rollouts.value


def test_side_by_side_shows_every_answer_with_what_each_learner_made_of_it(tmp_path):
    monitor = scripted(tmp_path / "run", step_1=lambda m: m.stop())
    monitor.start().wait(120)
    result = monitor.last
    html = monitor.rollouts_html(1)
    asked = result.pool.problems[1]
    mine = [(i, r) for i, r in enumerate(result.pool) if r.problem == asked.id]
    assert len(mine) == 8 and html.count("border-left") == 8
    for name, batch in result.batches.items():
        values = dict(zip(batch.index, batch.advantages.tolist(), strict=True))
        ratios = {i: s for mb in result.stats[name].minibatches for i, s in zip(mb.index, mb.ratio, strict=True)}
        for i, _ in mine:
            assert f"{name}: A {values[i]:+.2f}, s {ratios[i]:.3f}" in html
    clipped = sum(int(hit) for s in result.stats.values() for mb in s.minibatches
                  for i, hit in zip(mb.index, mb.clipped, strict=True) if i in dict(mine))  # fmt: skip
    assert html.count(", clipped") == clipped


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text, self.inside = set(), [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data):
        self.text.append(data)


HOSTILE = "<img src=x onerror=alert(1)>$\\frac{1}{2}$</code><script>1</script>\u202e <b>x"


def test_chat_prompts_are_shown_as_text(tmp_path, pair):
    messages = [{"role": "user", "content": "<b>1+1</b>="}]
    asked = hk.load_problems(
        [{"prompt": [{**messages[0], "content": f"<b>1+{i}</b>="}], "gold": "2"} for i in range(4)]
    )
    for agent in pair:
        agent.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        agent.chat = True
    monitor = hk.widgets.monitor(pair, asked, CONFIG, 1, out=tmp_path / "run", save_first=False)
    monitor.widget  # noqa: B018
    monitor.start().wait(120)
    settled(monitor)
    assert monitor.error is None and "&lt;b&gt;1+" in monitor.rollouts_html()
    assert '"content": "<b>1+' in monitor._view.problem.options[0]


def test_hostile_text_is_text(tmp_path, pair, say):
    for agent in pair:
        say(agent, [HOSTILE, r"\boxed{<svg/onload=1>}"])
    asked = hk.load_problems([{"prompt": f"<i>1+{i}</i>=$x$", "gold": "<u>2</u>"} for i in range(4)])
    config = CONFIG.replace(max_new_tokens=200, n=2, minibatch=8)
    monitor = hk.widgets.monitor(pair, asked, config, 1, out=tmp_path / "<run>", save_first=False)
    monitor.widget  # noqa: B018
    monitor.start().wait(120)
    settled(monitor)
    monitor._warned("<script>warned</script>")
    monitor.error = ValueError("<script>failed</script>")
    shown = [
        monitor.html(),
        monitor.rollouts_html(2),
        monitor._view.rollouts.value,
        monitor.status_html(),
        monitor.notes_html(),
    ]
    for html in shown:
        tags = Tags()
        tags.feed(html)
        assert not tags.tags & {"img", "script", "svg", "i", "u"}
        assert "\u202e" not in html and "$" not in html.replace("&#36;", "")
    tags = Tags()
    tags.feed(monitor.rollouts_html())
    assert "<img src=x onerror=alert(1)>" in "".join(tags.text) and "<i>1+" in "".join(tags.text)
    assert monitor._view.problem.options[0].startswith("1. <i>1+")  # an option of a list is text by itself


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_fault_is_shown_and_nothing_is_lost(undisturbed, tmp_path, fails_at):
    faults = [MemoryError("no memory left")]

    def fail(monitor):
        if faults:
            raise faults.pop()

    actions = {"step_2": lambda m: m.change(lr=3e-5), f"step_{fails_at}": fail}
    monitor = scripted(tmp_path / "run", shown=True, **actions)
    monitor.start()
    with pytest.raises(MemoryError, match="no memory left"):
        monitor.wait(120)
    settled(monitor)
    assert monitor.status == "failed" and not monitor.running
    saved = 0 if fails_at == 1 else 2  # the change after step 2 saved a checkpoint
    told = monitor._view.status.value
    assert (
        "The training failed" in told and "MemoryError: no memory left" in told and f"goes on from step {saved}" in told
    )
    assert not monitor._view.start.disabled
    third = monitor._thread
    monitor.callbacks[0].actions[3] = lambda m: m.change(delta=0.5, window=3)
    run = monitor.start().wait(120)
    assert monitor._thread is not third and monitor.status == "finished" and monitor.error is None
    assert same(weights(run.agents), weights(undisturbed.agents))
    assert monitor.curves["reward", "qwen3-sums", ""].points()[0] == [1, 2, 3, 4, 5, 6]


def test_a_folder_of_another_run_is_refused_in_place(undisturbed):
    monitor = made(undisturbed.folder, config=CONFIG.replace(seed=7))
    monitor.start()
    with pytest.raises(ValueError, match=r"holds a run with other settings \(seed"):
        monitor.wait(120)
    assert "holds a run with other settings" in monitor.status_html()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seed": 1}, ValueError, "cannot change during"),
        ({"delta": 2}, ValueError, "between 0 and 1"),
        ({"temperature": 0}, ValueError, "above 0"),
        ({"detla": 0.5}, TypeError, "did you mean 'delta'"),
        ({"prompts_per_step": 51}, ValueError, "only 50 problems"),
    ],
)
def test_a_change_that_cannot_be_is_refused_and_told(tmp_path, change, error, message):
    monitor = made(tmp_path / "run")
    with pytest.raises(error, match=message):
        monitor.change(lr=1e-5, **change)
    assert monitor.pending == {}  # nothing of it
    monitor.widget  # noqa: B018
    monitor._view._do(lambda: monitor.change(**change))
    assert "Not changed:" in monitor._view.refused.value
    monitor._view._do(lambda: None)
    assert monitor._view.refused.value == ""


def test_misuse_is_told(tmp_path):
    with pytest.raises(TypeError, match="no option 'eval_evry'; did you mean 'eval_every'"):
        hk.widgets.monitor([], problems(), CONFIG, 1, out=tmp_path, eval_evry=2)
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        made(tmp_path / "run").wait()


def test_start_while_running_and_a_withdrawn_pause_change_nothing(tmp_path):
    monitor = scripted(tmp_path / "run", steps=3, step_2=lambda m: (m.pause(), m.start(), m.start()))
    monitor.start()
    thread = monitor._thread
    run = monitor.start().wait(120)
    assert monitor._thread is thread and not run.stopped and monitor.status == "finished"


def test_an_interrupt_of_the_waiting_leaves_the_training_alone(tmp_path):
    gate = threading.Event()
    monitor = scripted(tmp_path / "run", steps=2, step_1=lambda m: gate.wait(30))
    monitor.start()

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    join, monitor._thread.join = monitor._thread.join, interrupted
    with pytest.raises(KeyboardInterrupt):
        monitor.wait()
    assert monitor.running
    gate.set()
    monitor._thread.join = join
    assert monitor.wait(120).state.step == 2


def test_waiting_can_end_early(tmp_path):
    gate = threading.Event()
    monitor = scripted(tmp_path / "run", step_1=lambda m: gate.wait(30))
    monitor.start()
    with pytest.raises(TimeoutError, match=r"still runs after 0\.3 s, in step"):
        monitor.wait(0.3)
    monitor.stop()
    gate.set()
    assert monitor.wait(120).stopped


def test_other_random_numbers_meanwhile_change_nothing(undisturbed, tmp_path):
    """The page stays usable: what other cells draw does not reach the training."""
    at = {2: lambda m: m.change(lr=3e-5), 3: lambda m: m.change(delta=0.5, window=3)}

    def draw(monitor, step):
        torch.rand(3), np.random.rand(3)  # noqa: NPY002
        if step in at:
            at[step](monitor)

    actions = {f"step_{i}": lambda m, i=i: draw(m, i) for i in range(1, 7)}
    run = scripted(tmp_path / "run", **actions).start().wait(120)
    assert same(weights(run.agents), weights(undisturbed.agents))


def test_warnings_of_the_training_are_shown_and_those_of_others_are_not_taken(tmp_path):
    warn = lambda m: warnings.warn("the band is <closed>", stacklevel=1)  # noqa: E731
    monitor = scripted(tmp_path / "run", steps=1, step_1=warn)
    with warnings.catch_warnings(record=True) as mine:
        warnings.simplefilter("always")
        monitor.start()
        warnings.warn("of this thread", stacklevel=1)
        monitor.wait(120)
    assert any("of this thread" in str(w.message) for w in mine)
    assert "warning: <code>the band is &lt;closed&gt;</code>" in monitor.notes_html()
    for i in range(3):
        monitor._warned(f"{i} answers were cut")
    assert "warning (3 times, the last): <code>2 answers were cut</code>" in monitor.notes_html()
    for i in range(60):
        monitor._warned(f"warning {chr(97 + i % 26)}{chr(97 + i // 26)}")
    assert "42 further warnings are not shown" in monitor.notes_html()


def test_curves_are_thinned_evenly_and_keep_the_newest():
    curve = Curve(most=10)
    for x in range(1000):
        curve.add(x, 2 * x)
    x, y = curve.points()
    assert len(x) <= 11 and x[0] == 0 and x[-1] == 999 and y == [2 * v for v in x]
    assert set(np.diff(x[:-1])) == {curve.every} and curve.every == 128
    curve.add(500, 0.0)  # a fault at step 1000, the newest checkpoint at 499
    x, y = curve.points()
    assert x[-1] == 500 and y[-1] == 0.0 and x == sorted(set(x))


def test_the_figure_says_that_points_are_left_out(tmp_path):
    monitor = made(tmp_path / "run", steps=1000)
    for step in range(1, 501):
        monitor._take({"step": step, "agents": {"qwen3-sums": {"reward": 0.5}}})
    assert f"at most {MOST_POINTS} points a line are drawn, here every 4th" in monitor.figure().layout.title.text
    assert max(len(t.x) for t in monitor.figure().data) <= MOST_POINTS + 1


def test_where_nobody_can_click_it_shows_its_picture(tmp_path, monkeypatch):
    """As under papermill: no widget is made, nothing starts by itself."""
    monitor = scripted(tmp_path / "run", step_2=lambda m: m.stop())
    shown = []
    monkeypatch.setattr("hacpo_kit.views.live.unattended", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda *objects, **_: shown.extend(objects))
    monitor._ipython_display_()
    assert not monitor.running and monitor.status == "ready"
    monitor.start().wait(120)
    shown.clear()
    monitor._ipython_display_()
    assert "widget" not in vars(monitor) and isinstance(shown[0], type(monitor.figure()))
    assert "Rollouts of the last step" in shown[1].data and "step 2 of 6" in shown[1].data


def test_a_page_opened_later_is_sent_the_curves_as_they_are(tmp_path):
    monitor = scripted(tmp_path / "run", shown=True, step_2=lambda m: m.stop())
    monitor.start().wait(120)
    settled(monitor)
    sent = monitor._view.curves.get_state()["_widget_data"]
    rewards = next(t for t in sent if t["yaxis"] == "y2" and t["name"] == "qwen3-sums")
    assert list(rewards["x"]) == [1, 2] and "step 2 of 6" in json.dumps(
        monitor._view.curves.get_state()["_widget_layout"], default=str
    )


def test_autostart_starts(tmp_path):
    monitor = made(tmp_path / "run", steps=1, autostart=True)
    assert isinstance(monitor, Monitor) and monitor.wait(120).state.step == 1
