r"""Measure how many answers/s the verifier checks, and its verdicts on hostile responses.

    python benchmarks/boxed_math.py                      # writes reports/boxed_math.json
    python benchmarks/boxed_math.py --hostile 300 --out /tmp/boxed_math.json

Speed is measured on answers in the form of GSM8K (whole numbers, with the money signs, commas and units that models add)
and of MATH (fractions, roots, sets, intervals, polynomials, matrices), eight to a problem, half of them right. Then the
responses of `hostile` are verified, and the speed is measured again. The benchmark passes if every hostile response gets a
verdict, no item takes longer than its limit, and the workers' memory stays bounded.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from measuring import surroundings

from hacpo_kit.common.files import write_json
from hacpo_kit.rewards import score
from hacpo_kit.tasks.workers import MEMORY_LIMIT, VerifierProcess, close, processes

ROOT = Path(__file__).resolve().parent.parent
WANTED = {"gsm8k": 800, "math": 300}  # answers a second on two cores
GRACE = 0.5  # seconds that ending a worker may take, beyond the limit of its item


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hostile", type=int, default=10_000, help="hostile responses")
    parser.add_argument("--answers", type=int, default=2_000, help="answers in one timed pass")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=0.5, help="seconds of an item among the hostile ones")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "boxed_math.json")
    args = parser.parse_args()
    close()
    before = speeds(args.answers, args.repeats, args.workers)
    measured = set(processes)
    print(f"before: {before['gsm8k']:.0f} GSM8K-like and {before['math']:.0f} MATH-like answers a second", flush=True)
    found = judge_hostile(args.hostile, args.timeout, args.workers, progress=True)
    print(f"hostile: {found}", flush=True)
    for process in measured & processes:  # their caches contain the items that are verified again
        process.end()
    after = speeds(args.answers, args.repeats, args.workers)
    print(f"after:  {after['gsm8k']:.0f} GSM8K-like and {after['math']:.0f} MATH-like answers a second", flush=True)
    write_json(
        args.out,
        {
            "answers_per_second": before, "answers_per_second_afterwards": after, "wanted": WANTED,
            "after_to_before": {name: after[name] / before[name] for name in WANTED}, "hostile": found,
            "answers": args.answers, "repeats": args.repeats, "workers": args.workers,
            **surroundings(),
        },
    )  # fmt: skip


# ── speed ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def speeds(answers: int, repeats: int, workers: int) -> dict[str, float]:
    """Return the median answers/s of both kinds; every pass has other numbers, so no cache helps.

    The numbers change the speed by 10 %, so both measurements use the same ones.
    """
    kinds = {"gsm8k": gsm8k, "math": math}
    score([(r"\boxed{0.50}", "0.5"), (r"\boxed{0.50}", "0.25")] * workers, workers=workers)  # starts the workers
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(repeats):
        for name, make in kinds.items():  # alternately, so other load slows both
            pairs = make(answers, random.Random(f"{name}/{number}"))
            start = time.perf_counter()
            verdicts = score(pairs, workers=workers)
            rates[name].append(len(pairs) / (time.perf_counter() - start))
            right = sum(v.status == "correct" for v in verdicts) / len(verdicts)
            if not 0.4 < right < 0.7 or {v.status for v in verdicts} - {"correct", "wrong", "no_answer"}:
                raise AssertionError(f"{name}: {Counter(v.status for v in verdicts)}, where about half are right")
    return {name: statistics.median(values) for name, values in rates.items()}


def gsm8k(count: int, draw: random.Random) -> list[tuple[str, str]]:
    """Return responses and golds as in GSM8K: eight responses to a problem, the gold a whole number."""
    spellings = ["{}"] * 12 + [r"\${}", "{}.00", r"{}\text{{ eggs}}", "{} dollars", "x = {}", r"\text{{{}}}", "{}."]
    pairs = []
    for _ in range(-(-count // 8)):
        gold = draw.choice([draw.randint(1, 99), draw.randint(100, 9_999), draw.randint(10_000, 2_000_000)])
        for _ in range(8):
            number = gold if draw.random() < 0.6 else gold + draw.randint(1, 50)
            text = draw.choice(spellings).format(f"{number:,}" if draw.random() < 0.3 else number)
            box = rf"\boxed{{{text}}}" if draw.random() < 0.95 else text
            pairs.append(
                (f"She has {number} of them, since {number} + 0 = {number}. " * 4 + f"So it is {box}.", str(gold))
            )
    return pairs[:count]


_MATH = [  # a gold, spellings of the same, and a wrong answer; a, b, c are whole numbers
    (r"\frac{{{a}}}{{{b}}}", [r"\dfrac{{{a}}}{{{b}}}", "{a}/{b}", r"\frac{{{a}}}{{{b}}}"], r"\frac{{{a}}}{{{c}}}"),
    (r"{a}\sqrt{{{p}}}", [r"{a}\sqrt{{{p}}}", r"{a} \cdot \sqrt{{{p}}}", r"\sqrt{{{p}}} \cdot {a}"], r"{b}\sqrt{{{p}}}"),
    ("({a},{b})", [r"\left({a}, {b}\right)", "({a}, {b})"], "({b},{a})"),
    ("[{a},{z})", [r"[{a}, {z})", r"\left[{a},{z}\right)"], "[{a},{z}]"),
    ("{a},{b},{c}", ["{c}, {b}, {a}", r"{a}, {b} \text{{ and }} {c}"], "{a},{b}"),
    ("{a}x^2+{b}x-{c}", ["{b}x+{a}x^2-{c}", "{a}x^2 + {b}x - {c}"], "{a}x^2-{b}x-{c}"),
    (r"\frac{{{a}\pi}}{{{b}}}", [r"\frac{{{a}}}{{{b}}}\pi", r"\dfrac{{{a}\pi}}{{{b}}}"], r"\frac{{{c}\pi}}{{{b}}}"),
    ("y={a}x+{b}", ["y = {a}x + {b}", "{a}x+{b}"], "y={a}x-{b}"),
    (r"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}", [r"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}"],
     r"\begin{{pmatrix}} {b} \\ {a} \end{{pmatrix}}"),
    ("{a}+{b}i", ["{b}i+{a}", "{a} + {b}i"], "{a}-{b}i"),
    ("{a}{b}", ["{a}{b}"], "{b}{a}"),
    ("{a}.{b}", ["{a}.{b}0", "{a}.{b}"], "{b}.{a}"),
    (r"{a}^\circ", ["{a}", r"{a}^\circ"], r"{b}^\circ"),
    (r"\text{{even}}", ["even", r"\text{{Even}}"], "odd"),
]  # fmt: skip


def math(count: int, draw: random.Random) -> list[tuple[str, str]]:
    """Return responses and golds as in MATH: eight responses to a problem, in the notations that models use."""
    pairs = []
    for _ in range(-(-count // 8)):
        gold, same, other = draw.choice(_MATH)
        a, b, c = draw.sample(range(2, 400), 3)
        n = {"a": a, "b": b, "c": c, "z": a + b, "p": draw.choice([2, 3, 5, 6, 7, 10, 11, 13])}
        for _ in range(8):
            if draw.random() < 0.55:
                box = draw.choice(same).format(**n)
            else:
                box = other.format(**n | {"c": draw.choice([c, c + 1, c + 2])})
            pairs.append((r"We see that $x$ is $\frac{1}{2}$ of it. " * 8 + rf"\boxed{{{box}}}", gold.format(**n)))
    return pairs[:count]


# ── hostile responses ──────────────────────────────────────────────────────────────────────────────────────────────


def judge_hostile(count: int, timeout: float, workers: int, progress: bool = False) -> dict:
    """Verify `count` hostile responses; return statuses, the longest time of an item (s) and the memory of the workers (bytes).

    Raises AssertionError for a missing verdict, and for an item that took longer than its limit.
    """
    longest, peak, stop = [0.0], [0], threading.Event()
    verify = VerifierProcess.verify

    def timed(process, *item):
        start = time.monotonic()
        try:
            return verify(process, *item)
        finally:
            longest[0] = max(longest[0], time.monotonic() - start)

    def watch() -> None:
        while not stop.wait(0.02):
            peak[0] = max([peak[0], *(process.memory() for process in list(processes))])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    VerifierProcess.verify = timed
    start = time.perf_counter()
    try:
        pairs = hostile(count)
        verdicts = score(pairs, timeout=timeout, workers=workers, progress=progress)
    finally:
        VerifierProcess.verify = verify
        stop.set()
        watcher.join()
    seconds = time.perf_counter() - start
    left = max((process.memory() for process in list(processes)), default=0)
    if len(verdicts) != count or longest[0] > timeout + GRACE:
        raise AssertionError(f"{len(verdicts)} of {count} verdicts; the longest item took {longest[0]:.2f} s")
    return {
        "responses": count, "different": len(set(pairs)), "timeout": timeout, "seconds": seconds,
        "statuses": dict(Counter(v.status for v in verdicts).most_common()),
        "errors": dict(Counter(v.detail.split(":")[0] for v in verdicts if v.status == "error").most_common()),
        "longest_seconds_at_work": longest[0], "grace": GRACE, "memory_limit": MEMORY_LIMIT,
        "peak_memory_of_a_worker": peak[0], "memory_of_a_worker_afterwards": left,
    }  # fmt: skip


def hostile(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return responses that try to stop, slow or mislead the verifier; all differ, and some golds are hostile too."""
    draw = random.Random(seed)
    # items that hang need their whole limit and a new worker; they are a tenth
    kinds = [kind for kind in HOSTILE for _ in range(1 if kind in HANGING else 8)]
    draw.shuffle(kinds)
    out = []
    for number in range(count):
        answer = HOSTILE[kinds[number % len(kinds)]](draw)
        form = draw.random()
        if form < 0.85:
            response = f"{number} \\boxed{{{answer}}}"
        elif form < 0.95:
            response = f"{number} \\boxed{{{answer}"  # never closed
        else:
            response = f"\\boxed{{{number}}} {answer}"
        golds = [r"\frac{1}{2}", "x+1", "5", "(1,2)", r"\sqrt{2}", r"\text{even}", "[0,1)", "x=3"]
        gold = draw.choice(golds) if draw.random() < 0.9 else answer
        out.append((response, gold))
    draw.shuffle(out)
    return out


_ALPHABET = r"0123456789xyzabn+-*/^_=<>(),.;:!|&%$#@~'\{}[] " + "\n\t"
_SOUND = [
    r"\frac{1}{\sqrt{2}}", r"x^2+\sin(3x)-\log_2 8", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\left(1, 2\right]",
    r"\{1, 2, \ldots, n\}", r"\int_0^1 x^2 \, dx", r"\sum_{k=1}^{10} \frac{1}{k}", r"\lim_{x \to 0} \frac{\sin x}{x}",
    r"(-\infty, 3) \cup [5, \infty)", r"5\text{ cm}^2", r"3.5 \times 10^{-4}", r"1{,}234\%", r"52_{8}", r"0.\overline{36}",
]  # fmt: skip


def _broken(draw: random.Random) -> str:
    """Return correct LaTeX with characters removed, doubled, exchanged or inserted."""
    text = list(draw.choice(_SOUND) + draw.choice(["", ",", "="]) + draw.choice(_SOUND))
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(text))
        text[at : at + 1] = draw.choice(
            [[], [text[at]] * 2, [draw.choice(_ALPHABET)], [text[at], draw.choice(_ALPHABET)]]
        )
    return "".join(text)


def _tower(draw: random.Random) -> str:
    """Return powers of powers: some can be computed, others exceed any memory."""
    height = draw.randint(2, 9)
    return "^{".join(str(draw.randint(2, 9)) for _ in range(height)) + "}" * (height - 1)


def _control(draw: random.Random) -> str:
    marks = [chr(c) for c in (*range(32), 127, 0x85, 0x200B, 0x202E, 0x2028, 0x2066, 0xFEFF, 0xD800, 0xDFFF, 0xFFFF)]
    return "".join(draw.choice([*marks, "1", "/", "2", "x"]) for _ in range(draw.randint(1, 200)))


def _right_to_left(draw: random.Random) -> str:
    letters = "٠١٢٣٤٥٦٧٨٩אבגדهوزحطي۴۵۶१२३．，（）" + "\u202e\u202d\u2067\u2069\u200f"
    return "".join(draw.choice(letters + "12/x+ ") for _ in range(draw.randint(1, 120)))


def _repeated(*pieces: str, most: int = 9_000) -> Callable[[random.Random], str]:
    """Return one piece many times; a regular expression that backtracks needs quadratic time."""

    def make(draw: random.Random) -> str:
        piece = draw.choice(pieces)
        return piece * draw.randint(1, most // len(piece)) + str(draw.randint(0, 999))

    return make


def _nested(opening: str, closing: str, most: int) -> Callable[[random.Random], str]:
    def make(draw: random.Random) -> str:
        depth = draw.choice([draw.randint(1, 12), draw.randint(12, most)])
        return opening * depth + draw.choice("x12") + closing * (depth + draw.choice([0, 0, 0, -1, 1]))

    return make


def _long(draw: random.Random) -> str:
    """Return a megabyte of characters that the rules look for."""
    block = "".join(draw.choice(_ALPHABET) for _ in range(1_000))
    return block * 1_000


def _huge(draw: random.Random) -> str:
    n, big = draw.randint(3, 99), 10 ** draw.randint(3, 12)
    return draw.choice(
        [
            f"{n}^{{{big}}}", f"{n}e{big}", f"{big}!", f"{n}^{{{big}}}!", rf"\binom{{{big}}}{{{big // 2}}}",
            rf"\sum_{{k=1}}^{{{big}}} \frac{{1}}{{k^{n}}}", rf"\prod_{{k=1}}^{{{big}}} k", rf"\sqrt[{big}]{{{n}}}",
            f"(x+{n})^{{{big % 5000}}}", f"0.{'0' * (big % 5000)}{n}", "9" * (big % 9000) + str(n),
            rf"\log_{{{n}}}({big}!)", rf"\sin({n}^{{{big % 10**5}}})", f"{n}_{{{big}}}",
            rf"0.\overline{{{str(n) * (big % 300)}}}", rf"x^{{{big}}}-{n}=0", rf"\int_0^{{{n}}} e^{{x^{n}}} \sin(x^{n}) dx",
            rf"\frac{{x^{{{big}}}-1}}{{x-{n}}}", rf"{n}^{{\frac{{1}}{{{big}}}}}", rf"\lim_{{x \to {n}}} x^{{{big}}}",
        ]
    )  # fmt: skip


def _lists(draw: random.Random) -> str:
    """Return long lists and large matrices; comparing all pairs of elements needs quadratic time."""
    size = draw.choice([draw.randint(2, 9), draw.randint(10, 400)])
    cells = [draw.choice([str(draw.randint(0, 99)), r"\frac{1}{3}", "x", r"\sqrt{2}"]) for _ in range(size)]
    return draw.choice(
        [
            ",".join(cells), rf"\{{{','.join(cells)}\}}", rf"\begin{{pmatrix}} {' & '.join(cells)} \end{{pmatrix}}",
            "=".join(cells), r" \cup ".join(f"[{c},{c}+1)" for c in cells), "<".join(cells), r" \text{ or } ".join(cells),
        ]
    )  # fmt: skip


def _forged(draw: random.Random) -> str:
    """Return text that looks like the worker's messages."""
    number = draw.randint(0, 99_999)
    message = f'{{"id": {number}, "reward": 1.0, "status": "correct", "detail": "", "fatal": false}}'
    return draw.choice([f'"}}\n{message}\n', f"\n{message}\n", f"\x00{message}", message.replace("{", "\\{")])


HOSTILE: dict[str, Callable[[random.Random], str]] = {
    "broken LaTeX": _broken,
    "junk": lambda draw: "".join(draw.choice(_ALPHABET) for _ in range(draw.randint(1, 300))),
    "nested braces": _nested("{", "}", 4_000),
    "nested parentheses": _nested("(", ")", 4_000),
    "nested fractions": _nested(r"\frac{1}{1+", "}", 300),
    "nested roots": _nested(r"\sqrt{1+", "}", 400),
    "nested functions": _nested(r"\sin(", ")", 300),
    "nested boxes": _nested(r"\boxed{", "}", 1_000),
    "towers": _tower,
    "huge numbers": _huge,
    "lists": _lists,
    "control characters": _control,
    "right to left": _right_to_left,
    "forged messages": _forged,
    "a megabyte": lambda draw: _long(draw) if draw.random() < 0.1 else _broken(draw),
    "spaces": _repeated(" ", "\t", "\\ ", r"\,", "~", r"\quad ", " and ", r"\text{ or }"),
    "operators": _repeated("-", "+-", "1+", "x*", "^", "_", "=", "<", r"\pm ", "!", "|", "'", r"\cdot "),
    "digits": _repeated("1", "1,", "1.", "1 ", "0", "1/", "9%", "12_8", "1e1", "..."),
    "commands": _repeated(
        "\\", r"\frac", r"\text{", r"\left(", r"\begin{matrix}", r"\ldots ", r"\foo{1}", "$", r"\(", "{}"
    ),
    "products": _repeated("x", "xy", "(x+1)", r"\sin x", "a_1", r"\frac12", "ab c", most=2_000),
}
HANGING = {
    "nested braces", "nested parentheses", "nested fractions", "nested roots", "nested functions", "towers", "lists",
    "operators", "digits", "commands", "products",
}  # fmt: skip


if __name__ == "__main__":
    main()
