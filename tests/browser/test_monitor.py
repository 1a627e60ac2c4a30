"""hk.widgets.monitor in a real JupyterLab: clicked on, looked at, reloaded, interrupted, saved and exported."""

import base64
import json

import pytest
from nbconvert import HTMLExporter

from . import jupyter as lab_

SETUP = """
import torch
import hacpo_kit as hk
torch.set_num_threads(1)
config = hk.Config(prompts_per_step=2, n=2, minibatch=8, max_new_tokens=24)
train, test = (hk.load_problems("arithmetic", split=s, size=k) for s, k in (("train", 50), ("test", 4)))
monitor = hk.widgets.monitor(
    hk.load_agents("tiny-model-pair", device="cpu"), train, config, {steps}, out="{out}", test=test, eval_every=3
)
monitor
"""
PICTURE = ".jp-OutputArea-child .jp-RenderedImage img"
REWARD = 2  # the trace: two of accuracy stand before it


def opened(open_cells, name, steps=400):
    page = open_cells(name, [SETUP.format(steps=steps, out=f"run-{name}")])
    lab_.run_all(page)
    page.locator(".hacpo-start").wait_for()
    return page


def test_start_pause_change_resume_and_stop(open_cells, lab):
    page = opened(open_cells, "training")
    lab_.wait_text(page, "hacpo-status", "ready")
    before = saved_png(page, lab, "training")
    page.locator(".hacpo-start").click()
    lab_.wait_text(page, "hacpo-status", "running")
    lab_.wait_points(page, "hacpo-curves", 2, REWARD)
    lab_.screenshot(page, "monitor-running-light")

    # the page is usable meanwhile: a cell runs, and the curves grow
    lab_.run_cell(page, "print(sum(range(10)), monitor.running)")
    assert lab_.last_output(page).strip() == "45 True"
    lab_.wait_points(page, "hacpo-curves", len(lab_.plot_data(page, "hacpo-curves", REWARD)) + 2, REWARD)

    # an interrupt ends what a cell does, not the training
    lab_.run_cell(
        page, "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('interrupted')", wait=False
    )
    lab_.menu(page, "Kernel", "Interrupt Kernel")
    lab_.wait_idle(page)
    assert lab_.last_output(page).strip() == "interrupted"
    lab_.wait_points(page, "hacpo-curves", len(lab_.plot_data(page, "hacpo-curves", REWARD)) + 2, REWARD)
    lab_.wait_text(page, "hacpo-status", "running")

    page.evaluate("document.querySelector('.hacpo-monitor').seen = true")
    page.locator(".hacpo-pause").click()
    lab_.wait_text(page, "hacpo-status", "paused, saved")
    assert page.locator(".hacpo-start").inner_text() == "Resume"
    paused = lab_.plot_data(page, "hacpo-curves", REWARD, "x")[-1]
    assert (lab.folder / "run-training" / "checkpoints" / f"step-{paused:06d}").is_dir()

    page.get_by_text("Settings for the next step").click()
    page.locator(".hacpo-set-delta input").fill("0.5")
    page.locator(".hacpo-set-delta input").press("Enter")
    page.locator(".hacpo-apply").click()
    lab_.wait_text(page, "hacpo-changes", "pending: delta 0.2 → 0.5")
    # when the picture for the saved notebook changes, the widget that somebody is using is not made anew
    before = changed_png(page, lab, "training", before)
    assert page.evaluate("document.querySelector('.hacpo-monitor').seen") is True
    assert not page.locator(PICTURE).is_visible()
    lab_.screenshot(page, "monitor-settings-light")
    page.locator(".hacpo-start").click()
    lab_.wait_text(page, "hacpo-changes", f"from step {paused + 1}: delta 0.2 → 0.5")
    lab_.wait_points(page, "hacpo-curves", paused + 2, REWARD)
    drawn = lab_.plot_data(page, "hacpo-curves", REWARD, "x")
    assert drawn == list(range(1, len(drawn) + 1))  # no step twice, none left out

    # while it runs, another change
    page.locator(".hacpo-set-lr input").fill("0.00003")
    page.locator(".hacpo-set-lr input").press("Enter")
    page.locator(".hacpo-apply").click()
    lab_.wait_text(page, "hacpo-changes", "lr 0.0001 → 3e-05")
    lab_.theme(page, "dark")
    lab_.screenshot(page, "monitor-settings-dark")

    # the tab is closed and opened again: the training has gone on, and everything is there
    lab_.save(page, lab, "training")
    lab_.reopen(page)
    lab_.wait_points(page, "hacpo-curves", paused + 4, REWARD)
    assert lab_.plot_data(page, "hacpo-curves", REWARD, "x")[0] == 1
    lab_.wait_text(page, "hacpo-changes", f"from step {paused + 1}: delta 0.2 → 0.5")
    lab_.wait_text(page, "hacpo-status", "running")
    lab_.wait_points(page, "hacpo-curves", len(lab_.plot_data(page, "hacpo-curves", REWARD)) + 1, REWARD)
    page.get_by_text("Rollouts of the last step").click()
    assert page.locator(".hacpo-rollouts code").count() >= 2 + 2 * 2  # prompt, answer, two rollouts of two agents
    lab_.screenshot(page, "monitor-rollouts-dark")

    page.locator(".hacpo-stop").click()
    lab_.wait_text(page, "hacpo-status", "stopped, saved")
    lab_.no_errors(page)
    changes = [json.loads(line) for line in (lab.folder / "run-training" / "changes.jsonl").read_text().splitlines()]
    assert [(c["setting"], c["old"], c["new"]) for c in changes] == [("delta", 0.2, 0.5), ("lr", 1e-4, 3e-5)]
    assert changes[0]["from_step"] == paused + 1

    # shown again, the exported page has the final curves in the widget's place
    lab_.run_cell(page, "monitor")
    after = saved_png(page, lab, "training", cell=-1)
    assert after != before
    html, _ = HTMLExporter().from_filename(str(lab.folder / "training.ipynb"))
    assert f"data:image/png;base64,{base64.b64encode(after).decode()}" in html


@pytest.mark.quick_browser
def test_a_saved_notebook_opened_without_its_kernel_shows_the_picture(open_cells, lab):
    page = opened(open_cells, "later", steps=2)
    page.locator(".hacpo-start").click()
    lab_.wait_text(page, "hacpo-status", "finished")
    assert not page.locator(PICTURE).is_visible()
    assert lab_.save(page, lab, "later").cells[0].outputs
    page.evaluate("void window.jupyterapp.commands.execute('notebook:restart-kernel')")
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    page.wait_for_timeout(1000)
    lab_.wait_idle(page)
    lab_.reopen(page)
    page.locator(PICTURE).wait_for()
    lab_.screenshot(page, "monitor-without-kernel")
    assert not page.locator(".hacpo-monitor").count()


def saved_png(page, lab, name, cell=0):
    """The picture that the saved notebook has below the widget."""
    widget, picture = (output["data"] for output in lab_.save(page, lab, name).cells[cell].outputs)
    assert "application/vnd.jupyter.widget-view+json" in widget
    return base64.b64decode(picture["image/png"])


def changed_png(page, lab, name, before):
    """As `saved_png`, once it is another one than before: it is drawn after the last step."""
    for _ in range(40):
        if (now := saved_png(page, lab, name)) != before:
            return now
        page.wait_for_timeout(1000)
    raise AssertionError("the picture below the widget did not change")


def test_a_restarted_kernel_goes_on_and_a_second_place_shows_the_same(open_cells, lab):
    page = opened(open_cells, "again", steps=15)
    page.locator(".hacpo-start").click()
    lab_.wait_points(page, "hacpo-curves", 1, REWARD)
    page.locator(".hacpo-stop").click()
    lab_.wait_text(page, "hacpo-status", "stopped, saved")
    steps = len((lab.folder / "run-again" / "metrics.jsonl").read_text().splitlines()) - 1
    lab_.wait_points(page, "hacpo-curves", steps, REWARD)  # the picture may come after the text
    stopped = lab_.plot_data(page, "hacpo-curves", REWARD)
    page.evaluate("void window.jupyterapp.commands.execute('notebook:restart-run-all')")  # it waits for the dialogue
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    page.wait_for_timeout(1000)
    lab_.wait_idle(page)
    lab_.wait_points(page, "hacpo-curves", len(stopped), REWARD)
    assert lab_.plot_data(page, "hacpo-curves", REWARD) == stopped  # read from the run folder
    page.locator(".hacpo-start").click()
    lab_.wait_text(page, "hacpo-status", "finished")
    lab_.run_cell(page, "monitor")
    page.locator(".hacpo-monitor").nth(1).wait_for()
    assert page.locator(".hacpo-status", has_text="finished").count() == 2
    assert lab_.plot_data(page, "hacpo-curves", REWARD, "x") == list(range(1, 16))
    lab_.no_errors(page)
