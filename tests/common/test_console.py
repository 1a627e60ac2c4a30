"""Progress and Ctrl-C."""

import signal
import threading

import pytest

from hacpo_kit.common.console import Interrupt, progress_mode, step_progress


def test_progress_mode_takes_four_words_and_the_environment(monkeypatch):
    monkeypatch.setenv("HACPO_KIT_PROGRESS", "lines")
    assert [progress_mode(word) for word in ("bar", "lines", "off", "auto")] == ["bar", "lines", "off", "lines"]
    with pytest.raises(ValueError, match="progress='loud'"):
        progress_mode("loud")


def test_step_progress_prints_at_most_twenty_lines(capsys):
    with step_progress("lines", 100, 0) as report:
        for step in range(1, 101):
            report({"step": step, "agents": {"a": {"reward": 0.5}, "b": {}}})
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 20 and out.endswith("step 100/100: mean reward a 0.50\n") and not err


def test_interrupt_requests_a_stop_and_then_interrupts(capsys):
    before = signal.getsignal(signal.SIGINT)
    with Interrupt("stopping soon") as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.pressed and "stopping soon" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_changes_nothing_in_another_thread():
    handlers = []

    def work():
        with Interrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
