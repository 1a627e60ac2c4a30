"""hk.widgets.monitor without a browser: what its page shows of a training, escaping, and the commands of its widgets."""

import json
import threading
import time
from html.parser import HTMLParser

import pytest
from parts import find

import hacpo_kit as hk
from hacpo_kit.views import monitor_panes as panes
from hacpo_kit.views.monitor import Monitor

CONFIG = hk.Config(prompts_per_step=4, n=4, minibatch=16)
HOSTILE = "<img src=x onerror=alert(1)>$\\frac{1}{2}$</code><script>1</script>\u202e <b>x"


def problems(split="train", size=50):
    return hk.load_problems("arithmetic", split=split, size=size)


def monitor_in(folder, *, steps=6, after=None, displayed=True, agents=None, train=None, config=CONFIG, **options):
    """A monitor with its widget; `after` maps a step to what its callback does in the training's own thread."""
    after, agents = after or {}, agents or hk.load_agents("tiny-model-pair", device="cpu")

    def act(result):
        if action := after.get(result.metrics["step"]):
            action(made)

    options = {"test": problems("test", 6), "eval_every": 2, "save_every": 4, **options}
    made = hk.widgets.monitor(agents, train or problems(), config, steps, out=folder, callbacks=[act], **options)
    assert not displayed or made.widget
    return made


def finished(monitor):
    """Start, wait, and let the drawing thread draw for the last time."""
    monitor.start().wait(120)
    for thread in threading.enumerate():
        if thread.name == "monitor":
            thread.join(20)
    return monitor


def test_monitor_figure_shows_the_recorded_metrics(tmp_path):
    monitor = finished(monitor_in(tmp_path / "run", steps=4, after={2: lambda m: m.change(lr=3e-5, alpha=2)}))
    figure, frame = monitor.figure(), monitor.to_frame()
    for name in ("qwen3-sums", "llama-differences"):
        recorded = frame[frame["agent"] == name].set_index("step")
        for axis, dash, metric in (
            ("y", "solid", "avg@1"), ("y2", "solid", "reward"), ("y3", "solid", "capability"),
            ("y4", "solid", "own_ratio_mean"), ("y4", "dash", "peer_ratio_mean"),
        ):  # fmt: skip
            (curve,) = [t for t in figure.data if (t.yaxis, t.line.dash, t.name) == (axis, dash, name)]
            expected = recorded[metric].dropna()
            assert list(curve.x) == expected.index.tolist() and list(curve.y) == expected.tolist()
    assert [list(t.x) for t in figure.data[:2]] == [[0, 2, 4]] * 2  # accuracy is evaluated every second step
    assert len(figure.layout.shapes) == 4 and {s.x0 for s in figure.layout.shapes} == {2.5}
    assert "dotted" in figure.layout.title.text and figure.png()[:4] == b"\x89PNG"
    assert "from step 3: <code>lr</code> 0.0001 → 3e-05" in monitor.html()
    table = panes.table_html(monitor)  # with the agents in the order of the run
    assert "accuracy (step 4)" in table and table.index("qwen3-sums") < table.index("llama-differences")


def test_monitor_figure_limits_the_points_of_a_curve(tmp_path):
    monitor = monitor_in(tmp_path / "run", steps=1000, displayed=False)
    monitor.history = [{"step": step, "agents": {"qwen3-sums": {"reward": 0.5}}} for step in range(501)]
    (reward,) = [t for t in monitor.figure().data if t.yaxis == "y2" and t.name == "qwen3-sums"]
    assert list(reward.x) == [*range(0, 500, 4), 500] and len(reward.x) <= panes.MAX_POINTS + 1
    assert "every 4th step" in monitor.figure().layout.title.text


def test_monitor_widget_follows_the_training(tmp_path):
    monitor = monitor_in(tmp_path / "run", steps=4, after={3: lambda m: m.pause()})
    start, pause, stop = (find(monitor.widget, f"hacpo-{name}") for name in ("start", "pause", "stop"))
    assert start.description == "Start" and pause.disabled and stop.disabled
    start.click()
    assert monitor.running
    finished(monitor)
    assert start.description == "Resume" and pause.disabled and not start.disabled
    status = monitor._html["status"].value
    assert monitor._progress.value == 3 and "paused" in status and "step 3 of 4" in status
    (reward,) = [t for t in monitor._curves.data if t.yaxis == "y2" and t.name == "qwen3-sums"]
    assert list(reward.x) == [1, 2, 3] and len(monitor._problem.options) == 4
    # a page that is opened later gets the current state
    state = monitor._curves.get_state()
    (sent,) = [t for t in state["_widget_data"] if (t["yaxis"], t["name"]) == ("y2", "qwen3-sums")]
    assert list(sent["x"]) == [1, 2, 3] and "step 3 of 4" in json.dumps(state["_widget_layout"], default=str)
    monitor.change(delta=0.5)
    assert "pending: <code>delta</code> 0.2 → 0.5" in monitor._html["changes"].value
    finished(monitor)
    assert start.disabled and "finished" in monitor._html["status"].value
    assert "from step 4: <code>delta</code>" in monitor._html["changes"].value
    assert len(monitor._curves.layout.shapes) == 4


def test_monitor_widget_applies_settings(tmp_path):
    monitor = monitor_in(tmp_path / "run")

    def apply(**values):
        for name, value in values.items():
            monitor._inputs[name].value = value
        monitor._do(monitor._apply_inputs)

    apply(delta=0.5, lr=0.0)
    assert monitor.pending == {"delta": 0.5, "lr": 0.0}
    apply(lr=1e-4)  # set back before its step
    assert monitor.pending == {"delta": 0.5}
    apply(delta=2.0)
    assert monitor.pending == {"delta": 0.5} and "delta=2" in monitor._html["refused"].value
    apply(delta=0.2)
    assert monitor.pending == {} and monitor._html["refused"].value == ""
    find(monitor.widget, "hacpo-apply").click()
    monitor._inputs["delta"].value = 0.7  # this message may arrive after that of the click
    deadline = time.monotonic() + 20
    while not monitor.pending and time.monotonic() < deadline:
        time.sleep(0.01)
    assert monitor.pending == {"delta": 0.7}


def test_monitor_widget_holds_a_step(tmp_path):
    monitor = finished(monitor_in(tmp_path / "run", steps=3, after={2: lambda m: m.pause()}))
    monitor._hold.value = True
    monitor._problem.index = 3
    held = monitor._html["rollouts"].value
    assert "step 2:" in held
    finished(monitor)
    assert monitor._html["rollouts"].value == held
    monitor._hold.value = False
    assert "step 3:" in monitor._html["rollouts"].value


def test_monitor_shows_an_error(tmp_path):
    def fail(_):
        raise MemoryError("no memory left")

    monitor = monitor_in(tmp_path / "run", after={2: lambda m: m.change(lr=3e-5), 3: fail})
    with pytest.raises(MemoryError):
        finished(monitor)
    status = panes.status_html(monitor)
    assert "failed" in status and "MemoryError: no memory left" in status and "step 2." in status


def test_rollouts_html_shows_what_each_learner_made_of_a_rollout(tmp_path):
    result = finished(monitor_in(tmp_path / "run", steps=1, displayed=False)).last
    html = panes.rollouts_html(result, 1)
    rows = {i for i, r in enumerate(result.pool) if r.problem == result.pool.problems[1].id}
    assert len(rows) == 8 and html.count("border-left") == 8
    clipped = 0
    for name, batch in result.batches.items():
        advantages = dict(zip(batch.index, batch.advantages.tolist(), strict=True))
        for part in result.stats[name].minibatches:
            for i, ratio, hit in zip(part.index, part.ratio, part.clipped, strict=True):
                if i in rows:
                    assert f"{name}: A {advantages[i]:+.2f}, s {ratio:.3f}" in html
                    clipped += hit
    assert html.count(", clipped") == clipped


class Tags(HTMLParser):
    """The elements and the text of a page; no attribute may run a script."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data):
        self.text += data


def test_monitor_escapes_every_text(tmp_path, pair, say):
    for agent in pair:
        say(agent, [HOSTILE, r"\boxed{<svg/onload=1>}"])
    train = hk.load_problems([{"prompt": f"<i>1+{i}</i>=$x$", "gold": "<u>2</u>"} for i in range(4)])
    config = CONFIG.replace(max_new_tokens=200, n=2, minibatch=8)
    options = {"agents": pair, "train": train, "config": config, "test": None}
    monitor = finished(monitor_in(tmp_path / "<run>", steps=1, save_first=False, **options))
    monitor.warnings["<script>"] = ("<script>warning</script>", 1)
    monitor.error = ValueError("<script>failed</script>")
    monitor._draw()
    for html in (
        monitor.html(),
        panes.rollouts_html(monitor.last, 2),
        *(part.value for part in monitor._html.values()),
    ):
        assert not Tags(html).tags & {"img", "script", "svg", "i", "u"}
        assert "\u202e" not in html and "$" not in html.replace("&#36;", "")
    text = Tags(panes.rollouts_html(monitor.last)).text
    assert "<img src=x onerror=alert(1)>" in text and "<i>1+" in text
    assert monitor._problem.options[0].startswith("1. <i>1+")  # the page shows an option as text


def test_monitor_shows_chat_prompts_as_text(tmp_path, pair):
    train = hk.load_problems(
        [{"prompt": [{"role": "user", "content": f"<b>1+{i}</b>="}], "gold": "2"} for i in range(4)]
    )
    for agent in pair:
        agent.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        agent.chat = True
    monitor = finished(monitor_in(tmp_path / "run", steps=1, agents=pair, train=train, test=None, save_first=False))
    assert "&lt;b&gt;1+" in panes.rollouts_html(monitor.last)
    assert '"content": "<b>1+' in monitor._problem.options[0]


def test_monitor_autostart_needs_no_widget(tmp_path):
    monitor = monitor_in(tmp_path / "run", steps=1, displayed=False, autostart=True)
    assert isinstance(monitor, Monitor) and monitor.wait(120).state.step == 1
    assert (
        "widget" not in vars(monitor)
        and "step 1 of 1" in monitor.html()
        and "Rollouts of the last step" in monitor.html()
    )
