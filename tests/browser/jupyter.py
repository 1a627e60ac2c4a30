"""A separate JupyterLab server and a headless Chromium, for tests and benchmarks of the widgets.

    with server(folder) as lab, browser(folder / "browser") as context:
        page = open_notebook(context, lab, notebook("slider.ipynb", ["import ipywidgets; ipywidgets.IntSlider()"], lab))
        run_all(page)
        no_errors(page)

Chromium is `HACPO_KIT_CHROMIUM` or the one on the path. No request leaves this machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
from playwright.sync_api import BrowserContext, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60_000  # of one wait (ms), long enough for a busy machine
IDLE = re.compile(r"^Python 3 \(ipykernel\) \| Idle$")  # the execution indicator says idle before there is a kernel
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-precise-memory-info",
)  # fmt: skip
NO_NEWS = '{"fetchNews": "false", "checkForUpdates": false}'  # no dialogue that asks whether to fetch them


def chromium() -> str | None:
    """The browser's program, or None."""
    named = os.environ.get("HACPO_KIT_CHROMIUM")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab server."""

    url: str
    token: str
    folder: Path  # its notebooks
    process: psutil.Process

    def kernels(self) -> list[psutil.Process]:
        """The processes of its kernels, oldest first."""
        children = self.process.children(recursive=True)
        found = [p for p in children if p.is_running() and "ipykernel_launcher" in " ".join(p.cmdline())]
        return sorted(found, key=lambda p: p.create_time())

    def kernel_memory(self) -> float:
        """Resident memory of all its kernels (MiB)."""
        return sum(p.memory_info().rss for p in self.kernels()) / 2**20


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Lab]:
    """Start a JupyterLab server on a free port, with its settings and data under `folder`; end it and its kernels."""
    folder = Path(folder)
    home, token = folder / "notebooks", uuid.uuid4().hex
    home.mkdir(parents=True)
    folders = {"JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
               "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR"}  # fmt: skip
    own = {name: str(folder / name.lower()) for name in folders}
    news = (
        Path(own["JUPYTERLAB_SETTINGS_DIR"]) / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    )
    news.parent.mkdir(parents=True)
    news.write_text(NO_NEWS)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **own, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"ServerApp.ip": "127.0.0.1", "ServerApp.port": port, "ServerApp.port_retries": 0,
               "IdentityProvider.token": token, "ServerApp.root_dir": home}  # fmt: skip
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
    with (folder / "server.log").open("w") as log:
        started = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=home,
        )  # fmt: skip
    lab = Lab(f"http://127.0.0.1:{port}", token, home, psutil.Process(started.pid))
    try:
        _wait_for_server(lab, started, folder / "server.log")
        yield lab
    finally:
        started.send_signal(signal.SIGTERM)  # ends the kernels too
        try:
            started.wait(timeout=20)
        except subprocess.TimeoutExpired:
            started.kill()


def _wait_for_server(lab: Lab, started: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE / 1000
    while time.monotonic() < deadline and started.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{lab.url}/api/status?token={lab.token}", timeout=5):
            return
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


@contextlib.contextmanager
def browser(folder: Path, *, width: int = 1280, height: int = 1500) -> Iterator[BrowserContext]:
    """A headless Chromium with an empty profile in `folder`; its requests to other machines fail.

    While it is open, Playwright's event loop runs in this thread: close it before other code uses one.
    """
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(folder), headless=True, executable_path=chromium(), args=list(FLAGS),
            viewport={"width": width, "height": height},
        )  # fmt: skip
        context.set_default_timeout(PATIENCE)
        context.route(
            lambda url: not url.startswith(("http://127.0.0.1:", "data:", "blob:")), lambda route: route.abort()
        )
        yield context
        context.close()


def notebook(name: str, cells: Sequence[str], lab: Lab) -> str:
    """Write a notebook with these code cells into the server's folder and return its name."""
    content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    content.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    nbformat.write(content, lab.folder / name)
    return name


def open_notebook(context: BrowserContext, lab: Lab, name: str) -> Page:
    """Open the notebook in a new tab and wait for its kernel."""
    page = context.new_page()
    page.goto(f"{lab.url}/doc/tree/{name}?token={lab.token}")
    wait_idle(page)
    return page


def save(page: Page, lab: Lab, name: str) -> nbformat.NotebookNode:
    """Save the notebook, as JupyterLab does every two minutes, and read the file."""
    path = lab.folder / f"{name}.ipynb"
    before, deadline = path.stat().st_mtime_ns, time.monotonic() + PATIENCE / 1000
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    while path.stat().st_mtime_ns == before:
        assert time.monotonic() < deadline, f"{path} was not saved"
        page.wait_for_timeout(100)
    return nbformat.read(path, as_version=4)


def reopen(page: Page) -> None:
    """Load the tab again, as after closing and opening it. The kernel keeps running; unsaved changes are lost."""
    page.once("dialog", lambda dialog: dialog.accept())  # "leave this page?"
    page.reload()
    wait_kernel(page)


def wait_kernel(page: Page) -> None:
    """Wait until the page is connected to its kernel, idle or busy."""
    page.get_by_role("button", name=re.compile(r"^Python 3 \(ipykernel\) \| (Idle|Busy)$")).wait_for()


def wait_idle(page: Page) -> None:
    """Wait until the kernel is idle."""
    page.get_by_role("button", name=IDLE).wait_for()


def run_all(page: Page) -> None:
    """Run all cells and wait for the last one."""
    menu(page, "Run", "Run All Cells")
    page.wait_for_timeout(300)  # the cells wait only once the first one has reached the kernel
    # the status bar says idle between two cells too
    waiting = "() => ![...document.querySelectorAll('.jp-InputPrompt')].some(p => p.textContent.includes('*'))"
    page.wait_for_function(waiting, timeout=4 * PATIENCE)
    wait_idle(page)


def menu(page: Page, *path: str) -> None:
    """Choose an item of the menu bar, as menu(page, "Kernel", "Interrupt Kernel")."""
    bar, *items = path
    page.get_by_role("menubar").get_by_role("menuitem", name=bar, exact=True).first.click()
    for item in items:
        entry = page.locator(".lm-Menu").get_by_role("menuitem", name=re.compile(rf"^{re.escape(item)}")).last
        entry.hover()
        if item == items[-1]:
            entry.click()


def run_cell(page: Page, source: str, *, wait: bool = True) -> None:
    """Add a cell with this code at the end, run it, and wait for its end, or without `wait` for its start."""
    count = page.locator(".jp-CodeCell").count()
    page.locator(".jp-CodeCell .cm-content").last.click()
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    page.locator(".jp-CodeCell").nth(count).wait_for()
    page.keyboard.press("Enter")
    page.keyboard.insert_text(source)
    page.keyboard.press("Control+Enter")
    prompt = page.locator(".jp-CodeCell").nth(count).locator(".jp-InputPrompt")
    number = r"\d+" if wait else r"\*"
    page.wait_for_function(f"p => /\\[{number}\\]/.test(p.textContent)", arg=prompt.element_handle())


def last_output(page: Page) -> str:
    """Text of the last cell's output."""
    return page.locator(".jp-CodeCell").last.locator(".jp-OutputArea-output").first.inner_text()


def no_errors(page: Page) -> None:
    """Raise AssertionError with the text of an error or a warning in the output of a cell."""
    kinds = ("application/vnd.jupyter.stderr", "application/vnd.jupyter.error")
    for kind in kinds:
        texts = page.locator(f".jp-OutputArea-output[data-mime-type='{kind}']").all_inner_texts()
        assert not texts, f"a cell failed or printed a warning: {texts}"
    broken = page.locator(".jupyter-widgets-error-widget").all_inner_texts()
    assert not broken, f"a widget could not be drawn: {broken}"


def press(page: Page, css_class: str, key: str = "ArrowRight", times: int = 1) -> None:
    """Focus the slider in the widget with this class and press a key, 60 ms apart."""
    handle = page.locator(f".{css_class} .noUi-handle").first
    handle.focus()
    for _ in range(times):
        handle.press(key, delay=10)
        page.wait_for_timeout(50)


def readout(page: Page, css_class: str) -> str:
    """The number that a slider shows."""
    return page.locator(f".{css_class} .widget-readout").first.inner_text()


def plot_data(page: Page, css_class: str, trace: int = 0, key: str = "y") -> list[float]:
    """Return one array of one trace of the first plotly figure in the widget with this class."""
    script = """([css, trace, key]) => Array.from(
        document.querySelector(`.${css} .js-plotly-plot, .${css}.js-plotly-plot`)._fullData[trace][key] ?? [])"""
    page.locator(f".{css_class} .js-plotly-plot, .{css_class}.js-plotly-plot").first.wait_for()
    return page.evaluate(script, [css_class, trace, key])


def theme(page: Page, name: str) -> None:
    """Switch to the "light" or the "dark" theme."""
    wanted = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}[name]
    # the page of a single document has no such menu
    page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", wanted)
    page.wait_for_selector(f"body[data-jp-theme-name='{wanted}']", state="attached")
    page.wait_for_timeout(500)  # the style sheet follows


def page_memory(page: Page) -> dict[str, float]:
    """The page after a garbage collection: JavaScript heap (MiB), DOM nodes, event listeners."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    session.send("HeapProfiler.collectGarbage")
    values = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return {
        "heap_mib": values["JSHeapUsedSize"] / 2**20,
        "nodes": values["Nodes"],
        "listeners": values["JSEventListeners"],
    }


def wait_text(page: Page, css_class: str, text: str) -> None:
    """Wait until the widget with this class shows the text."""
    page.locator(f".{css_class}", has_text=text).first.wait_for()


def wait_points(page: Page, css_class: str, count: int, trace: int = 0) -> None:
    """Wait until a trace of the plotly figure in the widget with this class has at least so many points."""
    script = """([css, trace, count]) => {
        const plot = document.querySelector(`.${css} .js-plotly-plot, .${css}.js-plotly-plot`);
        return plot?._fullData?.[trace]?.y?.length >= count; }"""
    page.wait_for_function(script, arg=[css_class, trace, count])


def screenshot(page: Page, name: str) -> Path | None:
    """Save a picture of the page in the folder `HACPO_KIT_SCREENSHOTS`, if it is set."""
    if not (folder := os.environ.get("HACPO_KIT_SCREENSHOTS")):
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    page.screenshot(path=Path(folder) / f"{name}.png")
    return Path(folder) / f"{name}.png"
