"""hk.widgets.monitor in a real JupyterLab: clicked on, looked at, reloaded, interrupted, saved and exported."""

import base64
import json

import pytest
from nbconvert import HTMLExporter

from . import jupyter

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
    jupyter.run_all(page)
    page.locator(".hacpo-start").wait_for()
    return page


def test_monitor_start_pause_change_resume_and_stop(open_cells, lab):
    page = opened(open_cells, "training")
    jupyter.wait_text(page, "hacpo-status", "ready")
    before = saved_png(page, lab, "training")
    page.locator(".hacpo-start").click()
    jupyter.wait_text(page, "hacpo-status", "running")
    jupyter.wait_points(page, "hacpo-curves", 2, REWARD)
    jupyter.screenshot(page, "monitor-running-light")

    # the page is usable meanwhile: a cell runs, and the curves grow
    jupyter.run_cell(page, "print(sum(range(10)), monitor.running)")
    assert jupyter.last_output(page).strip() == "45 True"
    jupyter.wait_points(page, "hacpo-curves", len(jupyter.plot_data(page, "hacpo-curves", REWARD)) + 2, REWARD)

    # an interrupt ends what a cell does, not the training
    jupyter.run_cell(
        page, "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('interrupted')", wait=False
    )
    jupyter.menu(page, "Kernel", "Interrupt Kernel")
    jupyter.wait_idle(page)
    assert jupyter.last_output(page).strip() == "interrupted"
    jupyter.wait_points(page, "hacpo-curves", len(jupyter.plot_data(page, "hacpo-curves", REWARD)) + 2, REWARD)
    jupyter.wait_text(page, "hacpo-status", "running")

    page.evaluate("document.querySelector('.hacpo-monitor').original = true")
    page.locator(".hacpo-pause").click()
    jupyter.wait_text(page, "hacpo-status", "paused, saved")
    assert page.locator(".hacpo-start").inner_text() == "Resume"
    paused = jupyter.plot_data(page, "hacpo-curves", REWARD, "x")[-1]
    assert (lab.folder / "run-training" / "checkpoints" / f"step-{paused:06d}").is_dir()

    page.get_by_text("Settings for the next step").click()
    page.locator(".hacpo-set-delta input").fill("0.5")
    page.locator(".hacpo-set-delta input").press("Enter")
    page.locator(".hacpo-apply").click()
    jupyter.wait_text(page, "hacpo-changes", "pending: delta 0.2 → 0.5")
    # a new picture for the saved notebook does not recreate the widget that is in use
    before = changed_png(page, lab, "training", before)
    assert page.evaluate("document.querySelector('.hacpo-monitor').original") is True
    assert not page.locator(PICTURE).is_visible()
    jupyter.screenshot(page, "monitor-settings-light")
    page.locator(".hacpo-start").click()
    jupyter.wait_text(page, "hacpo-changes", f"from step {paused + 1}: delta 0.2 → 0.5")
    jupyter.wait_points(page, "hacpo-curves", paused + 2, REWARD)
    drawn = jupyter.plot_data(page, "hacpo-curves", REWARD, "x")
    assert drawn == list(range(1, len(drawn) + 1))  # every step once

    # while it runs, another change
    page.locator(".hacpo-set-lr input").fill("0.00003")
    page.locator(".hacpo-set-lr input").press("Enter")
    page.locator(".hacpo-apply").click()
    jupyter.wait_text(page, "hacpo-changes", "lr 0.0001 → 3e-05")
    jupyter.theme(page, "dark")
    jupyter.screenshot(page, "monitor-settings-dark")

    # after the tab was closed and opened again, it shows the training, which did not stop
    jupyter.save(page, lab, "training")
    jupyter.reopen(page)
    jupyter.wait_points(page, "hacpo-curves", paused + 4, REWARD)
    assert jupyter.plot_data(page, "hacpo-curves", REWARD, "x")[0] == 1
    jupyter.wait_text(page, "hacpo-changes", f"from step {paused + 1}: delta 0.2 → 0.5")
    jupyter.wait_text(page, "hacpo-status", "running")
    jupyter.wait_points(page, "hacpo-curves", len(jupyter.plot_data(page, "hacpo-curves", REWARD)) + 1, REWARD)
    page.get_by_text("Rollouts of the last step").click()
    assert page.locator(".hacpo-rollouts code").count() >= 2 + 2 * 2  # prompt, answer, two rollouts of two agents
    jupyter.screenshot(page, "monitor-rollouts-dark")

    page.locator(".hacpo-stop").click()
    jupyter.wait_text(page, "hacpo-status", "stopped, saved")
    jupyter.no_errors(page)
    changes = [json.loads(line) for line in (lab.folder / "run-training" / "changes.jsonl").read_text().splitlines()]
    assert [(c["setting"], c["old"], c["new"]) for c in changes] == [("delta", 0.2, 0.5), ("lr", 1e-4, 3e-5)]
    assert changes[0]["from_step"] == paused + 1

    # displayed again, the exported page has the final curves instead of the widget
    jupyter.run_cell(page, "monitor")
    after = saved_png(page, lab, "training", cell=-1)
    assert after != before
    html, _ = HTMLExporter().from_filename(str(lab.folder / "training.ipynb"))
    assert f"data:image/png;base64,{base64.b64encode(after).decode()}" in html


@pytest.mark.quick_browser
def test_monitor_in_a_saved_notebook_without_its_kernel_is_a_picture(open_cells, lab):
    page = opened(open_cells, "later", steps=2)
    page.locator(".hacpo-start").click()
    jupyter.wait_text(page, "hacpo-status", "finished")
    assert not page.locator(PICTURE).is_visible()
    assert jupyter.save(page, lab, "later").cells[0].outputs
    page.evaluate("void window.jupyterapp.commands.execute('notebook:restart-kernel')")
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    page.wait_for_timeout(1000)
    jupyter.wait_idle(page)
    jupyter.reopen(page)
    page.locator(PICTURE).wait_for()
    jupyter.screenshot(page, "monitor-without-kernel")
    assert not page.locator(".hacpo-monitor").count()


def saved_png(page, lab, name, cell=0):
    """Return the picture below the widget in the saved notebook."""
    widget, picture = (output["data"] for output in jupyter.save(page, lab, name).cells[cell].outputs)
    assert "application/vnd.jupyter.widget-view+json" in widget
    return base64.b64decode(picture["image/png"])


def changed_png(page, lab, name, before):
    """Wait for another picture than `before`, which is drawn after the last step, and return it."""
    for _ in range(40):
        if (now := saved_png(page, lab, name)) != before:
            return now
        page.wait_for_timeout(1000)
    raise AssertionError("the picture below the widget did not change")


def test_monitor_resumes_in_a_restarted_kernel_and_is_the_same_in_a_second_cell(open_cells, lab):
    page = opened(open_cells, "again", steps=15)
    page.locator(".hacpo-start").click()
    jupyter.wait_points(page, "hacpo-curves", 1, REWARD)
    page.locator(".hacpo-stop").click()
    jupyter.wait_text(page, "hacpo-status", "stopped, saved")
    steps = len((lab.folder / "run-again" / "metrics.jsonl").read_text().splitlines()) - 1
    jupyter.wait_points(page, "hacpo-curves", steps, REWARD)  # the picture may come after the text
    stopped = jupyter.plot_data(page, "hacpo-curves", REWARD)
    page.evaluate("void window.jupyterapp.commands.execute('notebook:restart-run-all')")  # it waits for the dialogue
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    page.wait_for_timeout(1000)
    jupyter.wait_idle(page)
    jupyter.wait_points(page, "hacpo-curves", len(stopped), REWARD)
    assert jupyter.plot_data(page, "hacpo-curves", REWARD) == stopped  # read from the run folder
    page.locator(".hacpo-start").click()
    jupyter.wait_text(page, "hacpo-status", "finished")
    jupyter.run_cell(page, "monitor")
    page.locator(".hacpo-monitor").nth(1).wait_for()
    assert page.locator(".hacpo-status", has_text="finished").count() == 2
    assert jupyter.plot_data(page, "hacpo-curves", REWARD, "x") == list(range(1, 16))
    jupyter.no_errors(page)
