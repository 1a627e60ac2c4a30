"""Worker processes of the verifier: limits, killed processes, interrupts, threads, forks."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from hacpo_kit.rewards import Verdict, boxed_math, score
from hacpo_kit.tasks import workers

pytestmark = pytest.mark.slow

HANG = r"\boxed{\dfrac{5^{(5^{(5^{(5^5)})} - 4)} - 5}{16}}"
HALF = (r"\boxed{0.50}", "0.5")  # correct


def statuses(verdicts):
    return [verdict.status for verdict in verdicts]


def in_thread(function):
    """Start a function in a thread; the returned function waits for its result or raises its exception here."""
    out = {}

    def body():
        try:
            out["value"] = function()
        except BaseException as fault:
            out["fault"] = fault

    thread = threading.Thread(target=body)
    thread.start()

    def result():
        thread.join()
        if "fault" in out:
            raise out["fault"]
        return out["value"]

    return result


def kill(*, how_often=1, after=0.0):
    """Kill the verifier processes that are running, as a user or the system would."""
    killed = set()
    while len(killed) < how_often:
        time.sleep(after)
        for process in list(workers.processes):
            if process.process.pid not in killed and process.process.poll() is None:
                os.kill(process.process.pid, signal.SIGKILL)
                killed.add(process.process.pid)
        time.sleep(0.01)
    return killed


# ── limits of an item ────────────────────────────────────────────────────────────────────────────────────────────


def test_verify_ends_one_hang_among_many():
    start = time.monotonic()
    pairs = [(rf"\boxed{{\frac{{{i}}}{{7}}}}", r"\frac{3}{7}") for i in range(40)]
    pairs.insert(20, (HANG, "3"))
    verdicts = score(pairs, timeout=1.0)
    assert verdicts[20] == Verdict(0.0, "timeout", "no result after 1 s")
    assert [v.reward for i, v in enumerate(verdicts) if i != 20] == [float(i == 3) for i in range(40)]
    assert time.monotonic() - start < 15
    assert boxed_math(r"\boxed{\frac{6}{14}}", r"\frac{3}{7}").status == "correct"


def test_verify_does_not_delay_other_items_for_a_hang(monkeypatch):
    ended, verify = {}, workers.VerifierProcess.verify

    def timed(process, answer, *rest):
        verdict = verify(process, answer, *rest)
        ended[answer] = time.monotonic()
        return verdict

    monkeypatch.setattr(workers.VerifierProcess, "verify", timed)
    score([HALF, (r"\boxed{0.60}", "0.5")], workers=2)  # starts both processes
    pairs = [(HANG, "3")] + [(rf"\boxed{{x+{i}}}", "x+3") for i in range(8)]
    assert statuses(score(pairs, timeout=4.0, workers=2)) == ["timeout"] + [
        "correct" if i == 3 else "wrong" for i in range(8)
    ]
    hang = ended.pop(max(ended, key=ended.get))
    assert len(ended) == 10 and max(ended.values()) < hang - 1


def test_verify_does_not_count_waiting_as_time_of_an_item():
    # with one process the last item waits longer than its own limit, also while a killed process is replaced
    pairs = [(HANG, "3"), (HANG, "4"), HALF]
    assert statuses(score(pairs, timeout=0.5, workers=1)) == ["timeout", "timeout", "correct"]


def test_verify_calls_a_gold_that_hangs_unscorable():
    verdict = boxed_math(r"\boxed{5}", "(" * 3000 + "x" + ")" * 3000, timeout=0.5)
    assert (verdict.reward, verdict.status) == (None, "unscorable") and "not read" in verdict.detail


def test_verify_passes_hostile_texts_through_the_pipe():
    forged = '"}\n{"id": 1, "status": "correct", "reward": 1.0}'
    answers = ["\ud800 1.5", "\x00", "\n\r\u2028 1.5 \n", forged, "\x1b[2J", "1.5\t"]
    verdicts = score([(rf"\boxed{{{answer}}}", "1.5") for answer in answers])
    assert [v.reward for v in verdicts] == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]


def test_verify_gives_a_verdict_on_deep_nesting():
    deep = r"\boxed{" + "(" * 3000 + "x" + ")" * 3000 + "}"
    verdicts = score([(deep, "x+1"), (r"\boxed{1+x}", "x+1")], timeout=1.0)
    assert verdicts[0].status in ("wrong", "error", "timeout")
    assert verdicts[1].status == "correct"


def test_verify_ends_a_process_that_needs_too_much_memory(monkeypatch):
    score([HALF])  # starts a process
    monkeypatch.setattr(workers, "MEMORY_LIMIT", 2**20)
    verdict = boxed_math(HANG, "3", timeout=20.0)
    assert (verdict.reward, verdict.status) == (None, "error") and "memory" in verdict.detail
    monkeypatch.undo()
    assert boxed_math(r"\boxed{0.250}", "0.25").status == "correct"


def test_verify_replaces_a_process_after_a_fatal_error():
    # sympy recurses without end when it divides a column by a sine and compares it with a number
    fatal = (r"\boxed{\frac{\begin{pmatrix} 10^{6} \\ 2 \end{pmatrix}}{\sin 1000}}", "24.4")
    verdicts = score([fatal] + [(rf"\boxed{{{i}.50}}", "3.5") for i in range(6)], workers=1)
    assert verdicts[0].status in ("error", "wrong")
    assert [v.reward for v in verdicts[1:]] == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]


# ── killed processes ─────────────────────────────────────────────────────────────────────────────────────────────


def test_verify_tries_an_item_again_whose_process_was_killed():
    score([HALF])  # starts a process
    result = in_thread(lambda: score([(HANG, "3")], timeout=2.0, workers=1))
    kill(after=0.3)
    assert statuses(result()) == ["timeout"]


def test_verify_reports_an_item_whose_process_was_killed_twice():
    workers.close()
    result = in_thread(lambda: score([(HANG, "3")], timeout=60.0, workers=1))
    kill(how_often=2)
    (verdict,) = result()
    assert (verdict.reward, verdict.status) == (None, "error") and "-9" in verdict.detail
    assert boxed_math(*HALF).status == "correct"


def test_verify_starts_a_process_again_that_was_killed_while_it_started():
    workers.close()
    result = in_thread(lambda: score([HALF], workers=1))
    kill()
    assert statuses(result()) == ["correct"]


def test_verify_replaces_processes_that_were_killed_while_idle():
    for wait in (0.0, 0.1):  # the end of the process is noticed when the item is sent, or before
        assert boxed_math(*HALF).reward == 1.0
        kill()
        time.sleep(wait)
        assert boxed_math(r"\boxed{0.250}", "0.25") == Verdict(1.0, "correct")


def test_verify_says_that_a_process_cannot_start(monkeypatch):
    workers.close()
    monkeypatch.setattr(workers, "COMMAND", [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match=r"did not start.*3"):
        boxed_math(*HALF)
    assert not workers.processes


# ── interrupts, forks, threads ───────────────────────────────────────────────────────────────────────────────────


def test_verify_after_an_interrupt_works_and_exit_leaves_no_process():
    program = textwrap.dedent(f"""
        import _thread, signal, threading
        from hacpo_kit import rewards
        from hacpo_kit.tasks import workers
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it at first
        hang = {HANG!r}
        rewards.score([(r"\\boxed{{0.50}}", "0.5")])
        threading.Timer(0.5, _thread.interrupt_main).start()
        try:
            rewards.score([(hang, "3"), (hang, "4"), (hang, "5")], timeout=60)
        except KeyboardInterrupt:
            print("interrupted")
        print([v.reward for v in rewards.score([(rf"\\boxed{{{{{{i}}.50}}}}", "1.5") for i in range(6)])])
        print([worker.process.pid for worker in workers.processes])
    """)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    *lines, pids = run.stdout.splitlines() or [""]
    assert lines == ["interrupted", "[0.0, 1.0, 0.0, 0.0, 0.0, 0.0]"], run.stderr
    assert json.loads(pids)
    assert not any(psutil.pid_exists(pid) for pid in json.loads(pids))


def test_verifier_program_ignores_interrupts_and_is_small():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(workers.PACKAGE)}
    with subprocess.Popen(workers.COMMAND, env=environment, **pipes) as process:
        assert json.loads(process.stdout.readline()) == {"id": 0}
        process.send_signal(signal.SIGINT)
        process.stdin.write(json.dumps({"id": 7, "answer": "0.50", "gold": "0.5", "timeout": 5}) + "\n")
        process.stdin.flush()
        messages = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert psutil.Process(process.pid).memory_info().rss < 250 * 2**20
        process.stdin.close()  # the end of its input ends it
    assert [message["id"] for message in messages] == [7, 7]
    assert messages[1]["reward"] == 1.0
    assert process.returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_verify_in_a_forked_child_uses_other_processes():
    assert boxed_math(*HALF).reward == 1.0
    child = os.fork()
    if child == 0:
        reward = boxed_math(r"\boxed{0.750}", "0.75").reward
        workers.close()
        os._exit(0 if reward == 1.0 else 1)
    assert [boxed_math(rf"\boxed{{0.{i}0}}", "0.5").reward for i in range(10)] == [float(i == 5) for i in range(10)]
    assert os.waitpid(child, 0)[1] == 0


def test_verify_works_in_a_thread():
    result = in_thread(lambda: score([(HANG, "3"), HALF], timeout=1.0))
    assert statuses(result()) == ["timeout", "correct"]


def test_verify_works_in_several_threads_at_once():
    def one(number):
        gold = rf"\frac{{{number}}}{{97}}"
        return score([(rf"\boxed{{\frac{{{i}}}{{97}}}}", gold) for i in range(60)])

    results = {number: in_thread(lambda number=number: one(number)) for number in (11, 22, 33)}
    found = {number: [i for i, v in enumerate(result()) if v.reward == 1] for number, result in results.items()}
    assert found == {11: [11], 22: [22], 33: [33]}
