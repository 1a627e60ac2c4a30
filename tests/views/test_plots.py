"""Plots: what they show, that they also exist as static pictures, and what they refuse."""

import base64
import io

import matplotlib.image
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch

import hacpo_kit as hk
from hacpo_kit.experiments.statistics import interval
from hacpo_kit.models.memory import Estimate, Phase, usable
from hacpo_kit.records import Batch, MiniBatch, Pool, Rollout, StepStats
from hacpo_kit.views.plots import MAX_POINTS, Figure

HOSTILE = (
    "</code></td></table><script>alert(1)</script><img src=x onerror=alert(2)> $x^2$ &amp; \x1b[31m\u202e" + "9" * 500
)


def stats(count=200, minibatches=3):
    """Half own rollouts near 1, half peer ones, some of them outside the band."""
    rng, out = np.random.default_rng(0), []
    for m in range(minibatches):
        own = np.arange(count) % 2 == 0
        ratio = np.where(own, rng.normal(1, 0.001, count), rng.uniform(0.6, 1.2, count)).astype(np.float32)
        lower = 0.8 + 0.025 * m
        clipped = np.where(own, ratio > 1.0004, (ratio < lower) | (ratio > 1))
        ones = np.ones(count, np.float32)
        out.append(MiniBatch(m, lower, np.arange(count), own, ratio, clipped, ones, ones, 0.0, 1.0, 1e-4, None))
    return StepStats("A", tuple(out), {}, tuple("AB"[i % 2] for i in range(count)))


def curves():
    rows = [
        {"method": m, "agent": a, "run": f"{m}{seed}", "step": s, "rollouts": 512 * s,
         "avg@1": 0.1 * s + 0.01 * seed + 0.2 * (m == "hacpo")}
        for m in ("hacpo", "gspo") for a in "AB" for seed in range(3) for s in range(4)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def figures():
    c = hk.Capability().with_step({"A": 0.2, "B": 0.4}).with_step({"A": 0.3, "B": 0.1})
    history = [{"step": 0, "agents": {"A": {"avg@1": 0.1}}}]
    for s in (1, 2):
        keys = {
            f"{who}_ratio_{k}": v for who in ("own", "peer") for k, v in (("mean", 1.0), ("min", 0.9), ("max", 1.1))
        }
        history.append({"step": s, "agents": {"A": keys}})
    return {
        "importance_ratios": hk.plots.importance_ratios(stats()),
        "capability_ratios": hk.plots.capability_ratios(c),
        "learning_curves": hk.plots.learning_curves(curves()),
        "ratio_history": hk.plots.ratio_history(history, "A"),
        "lines": lines_figure(),
        "capability_matrix": hk.plots.capability_matrix(c),
        "advantages": hk.plots.advantages([batch("A"), batch("B")]),
        "clip_bands": hk.plots.clip_bands({"0.2": hk.Config(), "0.8": hk.Config(delta=0.8)}, stats=stats()),
        "gradient_shares": hk.plots.gradient_shares(pd.DataFrame({"own": [0.9, 0.4], "B": [0.1, 0.6]})),
        "memory": hk.plots.memory(needs()),
    }


def needs():
    """Two agents, one of which needs more than there is."""
    phases = (
        Phase("A", "rollout", weights=2**30, cache=2 * 2**30, others=2**30),
        Phase("$B$", "update", weights=2**30, optimizer=6 * 2**30, work=3 * 2**30),
    )
    return Estimate(phases, {"A": 1, "$B$": 1}, {"A": 1, "$B$": 1}, False, 8 * 2**30, ())


def batch(learner, advantages=(1.5, -0.5, -0.5, 1.0, -1.5, 0.0)):
    """Six rollouts, three of each agent, whose texts would do harm if a page took them for markup."""
    own = torch.tensor([s == learner for s in "AAABBB"])
    rollouts = [
        Rollout("p", s, i % 3, HOSTILE, (1,), (2, 3), np.array([-0.1, -0.2]), True, reward=float(i % 2), status="wrong")
        for i, s in enumerate("AAABBB")
    ]
    pool = Pool(tuple(rollouts), (hk.Problem("p", "1+1=", "2"),), ("A", "B"), 3)
    ones = torch.ones(6)
    weights = torch.where(own, 1.0, 2.0)
    ids = tuple((1,) for _ in range(6))
    return Batch(learner, ids, ids, -ones, torch.tensor(advantages), weights, own, tuple(range(6)), pool)


def lines_figure(**options):
    frame = pd.DataFrame({"a": [1.0, 0.1], "b": [2.0, np.nan]}, index=pd.Index([1, 10], name="window K (steps)"))
    band = {"a": (frame["a"] - 0.05, frame["a"] + 0.05)}
    return hk.plots.lines(
        frame, title="Two", y="bias", **{"log": "xy", "bands": band, "dashes": ["solid", "dot"], **options}
    )


@pytest.mark.parametrize(
    "name",
    ["importance_ratios", "capability_ratios", "learning_curves", "ratio_history", "lines", "capability_matrix", "advantages",
     "clip_bands", "gradient_shares", "memory"],
)  # fmt: skip
def test_every_plot_has_labels_and_a_static_picture(name):
    figure = figures()[name]
    assert figure.layout.title.text and figure.layout.xaxis.title.text and figure.layout.yaxis.title.text
    assert len(figure.data) >= 1
    bundle = figure._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png", "application/vnd.plotly.v1+json"}
    assert bundle["application/vnd.plotly.v1+json"]["data"]
    image = matplotlib.image.imread(io.BytesIO(base64.b64decode(bundle["image/png"])))
    assert image.shape[1] > 700 and image.shape[2] == 4
    assert image[0, 0, 3] == 0  # transparent: it stands on a light and on a dark page
    assert (image[..., 3] > 0).mean() > 0.01  # and something is drawn


def test_importance_ratios_tell_own_from_peer_and_clipped():
    figure = hk.plots.importance_ratios(stats())
    frame = stats().to_frame()
    counts = {trace.name: len(trace.x) for trace in figure.data}
    assert counts == {
        "own": int((frame["own"] & ~frame["clipped"]).sum()),
        "own, clipped: no gradient": int((frame["own"] & frame["clipped"]).sum()),
        "peer, in the band": int((~frame["own"] & ~frame["clipped"]).sum()),
        "peer, clipped: no gradient": int((~frame["own"] & frame["clipped"]).sum()),
    }
    assert [(round(s.y0, 3), s.y1) for s in figure.layout.shapes] == [(0.8, 1.0), (0.825, 1.0), (0.85, 1.0)]


def test_many_points_are_thinned_and_the_title_says_so():
    figure = hk.plots.importance_ratios(stats(count=8 * MAX_POINTS, minibatches=1))
    assert max(len(t.x) for t in figure.data) == MAX_POINTS and f"{MAX_POINTS:,} points" in figure.layout.title.text


def test_capability_ratio_of_every_pair():
    c = hk.Capability().with_step({"A": 0.2, "B": 0.4, "C": 0.4})
    figure = hk.plots.capability_ratios(c)
    assert {t.name: t.y[0] for t in figure.data} == {"ω(A, B)": 0.5, "ω(A, C)": 0.5, "ω(B, C)": 1.0}


def test_intervals_are_over_runs_and_not_over_agents():
    figure = hk.plots.learning_curves(curves(), x="rollouts")
    lines = {t.name: t for t in figure.data if t.name}
    assert list(lines["hacpo"].x) == [0, 512, 1024, 1536]
    np.testing.assert_allclose(lines["hacpo"].y, [0.21, 0.31, 0.41, 0.51])
    assert "95 % interval over 3 runs each" in figure.layout.title.text
    values = pd.Series([0.1, 0.2, 0.3], index=pd.MultiIndex.from_product([[1], list("abc")], names=["step", "run"]))
    row = interval(values, "step").loc[1]
    assert (row["mean"], row["runs"]) == (pytest.approx(0.2), 3)
    assert row["high"] - row["mean"] == pytest.approx(
        4.302653 * 0.1 / np.sqrt(3), rel=1e-5
    )  # t with 2 degrees of freedom


def test_missing_columns_and_unknown_traces_are_named():
    with pytest.raises(KeyError, match="no column 'best@9'"):
        hk.plots.learning_curves(curves(), metric="best@9")
    with pytest.raises(NotImplementedError, match="pie"):
        Figure(data=[go.Pie(values=[1])]).png()


def test_colour_tells_the_first_column_and_dash_the_second():
    figure = hk.plots.learning_curves(curves(), by=("agent", "method"))
    styles = {t.name: (t.line.color, t.line.dash) for t in figure.data if t.name}
    assert styles["A · hacpo"][0] == styles["A · gspo"][0] != styles["B · gspo"][0]
    assert styles["A · hacpo"][1] == styles["B · hacpo"][1] != styles["B · gspo"][1]


def test_names_are_never_read_as_formulas_or_hidden():
    """Dollar signs begin a formula in matplotlib, and a leading underscore hides a line from its legend."""
    c = hk.Capability().with_step({"_a": 0.2, r"b$\bad{$": 0.4})
    assert len(hk.plots.capability_ratios(c).png()) > 1000
    frame = curves().assign(method=lambda f: f["method"].map({"hacpo": "_hidden", "gspo": "$x$"}))
    assert len(hk.plots.learning_curves(frame, title=r"$\frac{$").png()) > 1000


def test_lines_have_logarithmic_axes_and_refuse_what_has_no_place_there():
    figure = lines_figure(level=1.0)
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")
    assert figure.layout.xaxis.title.text == "window K (steps)"
    assert [t.name for t in figure.data if t.showlegend] == ["a", "b"] and len(figure.data) == 3  # one band
    assert figure.png() != lines_figure(log="", level=1.0).png()
    frame = pd.DataFrame({"a": [0.0, 1.0]}, index=[1, 2])
    with pytest.raises(ValueError, match="y values of 'Zero' are not all above 0"):
        hk.plots.lines(frame, title="Zero", y="bias", log="y")


def test_lines_keep_the_names_of_categories_in_the_static_picture(monkeypatch):
    from matplotlib.figure import Figure

    seen, legend = [], Figure.legend
    monkeypatch.setattr(Figure, "legend", lambda fig, *a, **k: (seen.extend(fig.axes), legend(fig, *a, **k))[1])
    hk.plots.lines(pd.DataFrame({"a": [1.0, 2.0]}, index=["right", "wrong"]), title="T", x="answers", y="cosine").png()
    assert [label.get_text() for label in seen[0].get_xticklabels()] == ["right", "wrong"]


def test_advantages_count_every_rollout_once_by_source():
    figure = hk.plots.advantages([batch("A"), batch("B")])
    bars = {(t.xaxis or "x", t.name): t for t in figure.data}
    assert set(bars) == {("x", "A"), ("x", "B"), ("x2", "A"), ("x2", "B")}
    assert all(sum(t.y) == 3 for t in figure.data) and figure.layout.barmode == "stack"
    here = {name: [round(x, 1) for x, y in zip(t.x, t.y, strict=True) if y] for (_, name), t in list(bars.items())[:2]}
    assert here == {"A": [-0.5, 1.5], "B": [-1.5, 0.0, 1.0]}
    weighted = hk.plots.advantages(batch("A"), weighted=True)
    assert "ω·A" in weighted.layout.xaxis.title.text and max(weighted.data[1].x) > 2.5
    assert len(hk.plots.advantages(batch("A", (0.0,) * 6)).png()) > 1000


def test_memory_bars_add_up_to_what_each_phase_holds_and_a_line_says_what_there_is():
    figure = hk.plots.memory(needs())
    assert {bar.name: list(bar.x) for bar in figure.data} == {
        "weights": [1, 1], "optimizer": [0, 6], "cache": [2, 0], "work": [0, 3], "others": [1, 0]
    }  # fmt: skip
    assert [shape.x0 for shape in figure.layout.shapes] == [usable(8 * 2**30) / 2**30]


def test_clip_bands_narrow_with_every_update_and_end_at_one():
    figure = hk.plots.clip_bands(hk.Config(), updates=10)
    line = next(t for t in figure.data if t.name and t.showlegend)
    np.testing.assert_allclose(line.y, [0.8, 0.825, 0.85, 0.875, 0.9, 0.925, 0.95, 0.975, 1, 1, 1])
    with_points = hk.plots.clip_bands(hk.Config(), stats=stats(count=8 * MAX_POINTS, minibatches=1))
    assert max(len(t.x) for t in with_points.data) == MAX_POINTS and "points of a kind" in with_points.layout.title.text


def test_gradient_shares_are_percent_of_the_whole_and_may_pull_back():
    figure = hk.plots.gradient_shares(pd.DataFrame({"own": [1.1, np.nan], "B": [-0.1, np.nan]}))
    assert [t.y[0] for t in figure.data] == pytest.approx([110, -10]) and figure.layout.barmode == "relative"
    assert len(figure.png()) > 1000
    with pytest.raises(ValueError, match=r"the shares of 0 add up to 1\.300, not 1"):
        hk.plots.gradient_shares(pd.DataFrame({"own": [0.9], "B": [0.4]}))


def test_capability_matrix_has_every_pair_in_both_directions():
    c = hk.Capability().with_step({"A": 0.2, "B": 0.4, "C": None})
    cells = hk.plots.capability_matrix(c).data[0]
    assert list(cells.x) == list(cells.y) == ["A", "B"]  # C had nothing scorable
    assert [list(row) for row in cells.text] == [["1.00", "0.50"], ["2.00", "1.00"]]


def test_capability_matrix_tells_small_ratios_apart_and_leaves_equal_agents_pale():
    near = hk.plots.capability_matrix(hk.Capability().with_step({"A": 0.32, "B": 0.25})).data[0]
    limit = np.log10(0.32 / 0.25)
    assert (near.zmin, near.zmax) == (-0.15, 0.15) and np.asarray(near.z)[0, 1] == pytest.approx(limit)
    far = hk.plots.capability_matrix(hk.Capability().with_step({"A": 0.1, "B": 0.2})).data[0]
    assert far.zmax == -far.zmin == pytest.approx(np.log10(2))
    assert np.asarray(far.z).max() == pytest.approx(far.zmax)  # the strongest shade is used


@pytest.mark.parametrize("current", [None, 1, 2, 3, 4])
def test_the_four_stages_are_a_picture(current):
    picture = hk.plots.stages(current)
    image = matplotlib.image.imread(io.BytesIO(picture._repr_png_()))
    assert image.shape[1] > 900 and image[0, 0, 3] == 0 and (image[..., 3] > 0).mean() > 0.02
    assert "① rollout → ② reward → ③ advantage → ④ update" in repr(picture)
    # only a marked stage is filled
    tinted = np.isclose(image[..., 3], 0.1, atol=0.03).mean()
    assert (tinted > 0.1) == (current is not None)


def test_there_are_four_stages():
    with pytest.raises(ValueError, match="current=5: the stages are 1"):
        hk.plots.stages(5)


# ── what a model writes ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_table_of_rollouts_shows_text_and_never_markup():
    page = hk.plots.rollout_table(batch("A").pool, limit=4)._repr_html_()
    assert "<script" not in page and "<img" not in page and page.count("</table>") == 1 and "$" not in page
    assert "&lt;script&gt;alert(1)" in page and "&amp;amp;" in page and "&#36;x^2&#36;" in page
    assert "\\u001b[31m" in page and "\\u202e" in page and "\x1b" not in page and "\u202e" not in page
    assert "characters)" in page and "2 more rows are not shown" in page
    assert "mathjax_ignore" in page


def test_a_table_takes_what_it_is_given():
    rows = [{"text": "a", "reward": None, "ended": True, "length": 3, "mean_logp": -0.123456}]
    page = hk.plots.rollout_table(rows, ["text", "reward", "ended", "length", "mean_logp"])._repr_html_()
    assert ">–<" in page and ">yes<" in page and ">3<" in page and ">-0.1235<" in page and "more rows" not in page
    with pytest.raises(KeyError, match="no column 'txt'; there are text"):
        hk.plots.rollout_table(rows, ["txt"])


def test_every_kind_of_bar_has_a_static_picture():
    """Stacked, beside each other, lying, with names or numbers: each is drawn differently."""
    pictures = set()
    for mode in ("stack", "group", "overlay", "relative"):
        for x in ([1, 2, 3], ["a", "$b$", "_c"]):
            for lying in (False, True):
                fig = hk.plots.figure("T", "x", "y", barmode=mode)
                for y, name in (([1, 2, -1], "one"), ([2, 1, -1], "two")):
                    sides = {"x": y, "y": x, "orientation": "h"} if lying else {"x": x, "y": y}
                    fig.add_bar(**sides, name=name, marker_color="#1f83c4", opacity=0.5)
                pictures.add(fig.png())
    assert len(pictures) >= 12  # overlay and group differ; relative and stack agree on bars of one sign only


def test_annotations_stand_in_the_static_picture():
    fig = hk.plots.figure("T", "x", "y").add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", line={"color": "#1f83c4", "shape": "hv"}
    )
    bare = fig.png()
    for x, y, refs in ((0.5, 0.5, {}), (0.5, 0.9, {"xref": "paper", "yref": "paper"}), (0.2, 1.0, {"yref": "paper"})):
        before = fig.png()
        fig.add_annotation(x=x, y=y, text="half<br>way", showarrow=False, **refs)
        assert fig.png() not in (bare, before)


@pytest.mark.parametrize("yref", ["y", "y domain"])
def test_a_rectangle_has_an_outline_in_the_static_picture_only_if_it_is_given_one(yref):
    def shown(**line):
        fig = hk.plots.figure("T", "x", "y").add_scatter(x=[0, 1], y=[0, 1], mode="lines", line={"color": "#1f83c4"})
        at = {"x0": 0.2, "x1": 0.8, "y0": 0.2, "y1": 0.8, "yref": yref, "fillcolor": "rgba(0,158,115,0.14)"}
        fig.add_shape(type="rect", **at, **line)
        image = matplotlib.image.imread(io.BytesIO(fig.png()))
        orange = np.abs(image[..., :3] - np.array([0xD5, 0x5E, 0x00]) / 255).max(axis=-1) < 0.05
        return int((orange & (image[..., 3] > 0.5)).sum())

    assert shown() == shown(line={"width": 0, "color": "#D55E00"}) == 0
    assert shown(line={"width": 1, "color": "#D55E00"}) > 300


def test_the_static_picture_has_the_ticks_that_dtick_asks_for(monkeypatch):
    seen = []
    small = hk.pictures._small_png
    monkeypatch.setattr(
        hk.pictures, "_small_png", lambda canvas: seen.append(canvas.axes[0].get_xticks()) or small(canvas)
    )
    fig = hk.plots.figure("T", "m", "y").add_scatter(
        x=[0, 1, 2, 3], y=[0, 1, 2, 3], mode="lines", line={"color": "#1f83c4"}
    )
    fig.png()
    fig.update_xaxes(dtick=1).png()
    assert 0.5 in seen[0] and set(np.diff(seen[1])) == {1.0}


# ── what has nothing to show, or what would harm ─────────────────────────────────────────────────────────────────


def test_a_learner_without_an_update_has_an_empty_picture():
    none = StepStats("A", (), {"unscorable": 4}, ())
    assert none.to_frame().dtypes.equals(stats().to_frame().iloc[:0].dtypes)
    figure = hk.plots.importance_ratios(none)
    assert "no update" in figure.layout.title.text and figure.png()
    assert hk.plots.clip_bands(hk.Config(), stats=none).png()


def test_what_is_empty_or_not_finite_is_said():
    with pytest.raises(ValueError, match="no batch"):
        hk.plots.advantages([])
    with pytest.raises(ValueError, match="1 advantages of learner 'A' are not finite"):
        hk.plots.advantages(batch("A", (float("nan"), 1, 1, 1, 1, 1)))
    assert not hk.plots.gradient_shares(pd.DataFrame()).data
    assert hk.plots.gradient_shares(pd.DataFrame({"own": [], "B": []})).png()
    with pytest.raises(ValueError, match="shares of 'x' add up to nan"):
        hk.plots.gradient_shares(pd.DataFrame({"own": [np.inf], "B": [-np.inf]}, index=["x"]))


def test_a_matrix_names_whom_it_leaves_out():
    past = hk.Capability().with_step({"A": None, "B": None, "1": None}).with_step({"A": 0.5, "B": None, "1": 0.25})
    figure = hk.plots.capability_matrix(past)
    assert figure.data[0].x == ("A", "1") and "without B" in figure.layout.title.text
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "category"  # "1" is a name
    for nothing in (hk.Capability(), past.at(1)):
        with pytest.raises(ValueError, match="no capability yet"):
            hk.plots.capability_matrix(nothing)
    for step in (-1, 3):
        with pytest.raises(ValueError, match="the steps 1 to 2"):
            hk.plots.capability_matrix(past, step)


@pytest.mark.parametrize("method", ["naive", "gspo", "grpo"])
def test_a_method_without_a_band_has_no_picture_of_it(method):
    with pytest.raises(ValueError, match="has no band for peer rollouts"):
        hk.plots.clip_bands({"mine": hk.Config.preset(method)})
    with pytest.raises(ValueError, match="updates=-1"):
        hk.plots.clip_bands(hk.Config(), updates=-1)


def test_every_source_stands_in_the_legend_once():
    """Those that learn alone appear in one panel each."""
    alone = [batch(name).part(range(3 * i, 3 * i + 3)) for i, name in enumerate("AB")]
    for many in (alone, [batch("A"), batch("B")]):
        shown = [t.name for t in hk.plots.advantages(many).data if t.showlegend]
        assert shown == ["A", "B"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["<b>x</b>", "$a$", "_hidden", "y" * 100, "long " * 20, "a &amp; 'b' \"c\""])
def test_names_are_literal_and_leave_room_for_the_picture(name):
    c = hk.Capability().with_step({name: 0.5, "B": 0.25})
    shares = pd.DataFrame({name: [0.5], "B": [0.5]})
    for figure in (
        hk.plots.capability_matrix(c), hk.plots.capability_ratios(c), hk.plots.gradient_shares(shares),
        hk.plots.clip_bands({name: hk.Config()}),
    ):  # fmt: skip
        shown = [str(t.name) for t in figure.data] + list(figure.data[0].x)
        assert not any("<b" in str(text) or "$" in str(text) for text in shown)
        image = matplotlib.image.imread(io.BytesIO(figure.png()))
        assert (image[..., 3] > 0).mean() > 0.01


def test_a_static_picture_shows_characters_instead_of_entities():
    from hacpo_kit.views.pictures import _literal

    assert _literal(hk.plots.plain('<b> $x$ "q" %{y}')) == r'<b> \$x\$ "q" %{y}'


def test_a_table_in_a_terminal_sends_it_no_commands():
    text = repr(hk.plots.rollout_table([{"text": HOSTILE + "x" * 100_000, "reward": 1.0}]))
    assert "\x1b" not in text and "\u202e" not in text and "characters)" in text and len(text) < 1000


@pytest.mark.parametrize("hidden", ["\u061c", "\u2060", "\u00ad", "\ud83d", "\ufff9", "\U000e0041"])
def test_what_cannot_be_seen_or_sent_is_named(hidden):
    assert hk.plots.escaped(hidden) == hidden.encode("unicode_escape").decode().replace("\\x", "\\u00")
