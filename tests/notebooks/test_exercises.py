"""The exercises: every solution passes, every known mistake is recognised, and the notebooks are consistent."""

import inspect
import itertools
import math
import re
import sys
from functools import cache
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import torch

from hacpo_kit.advantages import capability_ratio, group_advantages

FOLDER = Path(__file__).resolve().parents[2] / "notebooks" / "exercises"
sys.path.insert(0, str(FOLDER))
import checks  # noqa: E402
from checks import e2_advantage, e3_ratio, e5_find_the_bug, e7_tune  # noqa: E402
from checks.catalogue import MESSAGES  # noqa: E402
from judge import Case, Exercise, Mistake, same  # noqa: E402

PATHS = sorted(FOLDER.glob("*.ipynb"))
EXERCISES = checks.EXERCISES
MISTAKES = [(e, m, f) for e in EXERCISES.values() for m in e.mistakes for f in m.functions]


def tags(cell):
    return cell.metadata.get("tags", [])


def output(cell):
    return "".join(o.get("text", "") for o in cell.outputs)


def unsolved(*_):
    raise NotImplementedError("your turn")


# ── the catalogue ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_exercise_accepts_the_reference_and_reports_a_stub_as_unsolved(exercise, capsys):
    verdict = exercise.judge(exercise.reference)
    assert verdict.solved and not verdict.mistake and verdict.text.startswith(f"✓ {exercise.label}: "), verdict.text
    exercise(unsolved, details=True)
    assert f"… {exercise.label}: not solved yet." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("exercise", "mistake", "function"), MISTAKES, ids=[f"{e.label}-{m.name}" for e, m, _ in MISTAKES]
)
def test_exercise_recognises_every_known_mistake(exercise, mistake, function):
    verdict = exercise.judge(function)
    assert not verdict.solved and verdict.mistake == mistake.name
    text = " ".join(verdict.text.split())
    assert " ".join(mistake.message.split()) in text and " ".join(mistake.hint.split()) in text


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_exercise_has_a_case_that_distinguishes_any_two_mistakes(exercise):
    results = {("reference", 0): [exercise.run(exercise.reference, c) for c in exercise.cases]}
    for mistake in exercise.mistakes:
        for i, function in enumerate(mistake.functions):
            results[mistake.name, i] = [exercise.run(function, c) for c in exercise.cases]
    for (a, first), (b, second) in itertools.combinations(results.items(), 2):
        assert a[0] == b[0] or not all(map(same, first, second)), f"{a} and {b} agree in every case"


def test_catalogue_has_messages_for_exactly_the_known_mistakes():
    assert set(MESSAGES) == {*EXERCISES, "E7"}
    for label, exercise in EXERCISES.items():
        assert set(MESSAGES[label]["mistakes"]) == {m.name for m in exercise.mistakes}


# The same mistakes, written in another way than in the catalogue.
def population(rewards):
    out = []
    for row in rewards:
        mean = sum(row) / len(row)
        sigma = (sum((r - mean) ** 2 for r in row) / len(row)) ** 0.5
        out.append(torch.stack([(r - mean) / (sigma + 1e-6) for r in row]) if max(row) - min(row) > 1e-6 else 0 * row)
    return torch.stack(out)


def normalised_batch(rewards):
    flat = rewards.reshape(-1)
    return ((flat - flat.mean()) / (flat.std() + 1e-6)).reshape(rewards.shape)


def ratio_of_sums(logp, mask, source_mean_logp):
    total = torch.stack([row[m].sum() for row, m in zip(logp, mask, strict=True)])
    return torch.exp(total - source_mean_logp * mask.sum(1))


def ratio_by_row_length(logp, mask, source_mean_logp):
    means = [row[m].sum() / len(row) for row, m in zip(logp, mask, strict=True)]
    return torch.exp(torch.stack(means)) / torch.exp(source_mean_logp)


def mean_of_batch_tokens(logp, mask, source_mean_logp):
    return (
        torch.exp(torch.stack([row[m].sum() for row, m in zip(logp, mask, strict=True)]) / mask.sum())
        / source_mean_logp.exp()
    )


def objective_without_stop(ratio, advantages, weights, lower, alpha):
    clipped = torch.clip(ratio, lower, 1.0)
    return clipped * torch.pow(clipped, alpha) * weights * advantages


def objective_filtered(ratio, advantages, weights, lower, alpha):
    inside = ((ratio >= lower) & (ratio <= 1.0)).float()
    return inside * ratio * ratio.detach() ** alpha * weights * advantages


def baseline_inverted(rewards, sources, learner, capability):
    total = torch.tensor(0.0)
    for reward, source in zip(rewards, sources, strict=True):
        total = total + reward * capability_ratio(capability, source, learner)
    return total / len(sources)


def baseline_weighted(rewards, sources, learner, capability):
    omega = torch.tensor([capability_ratio(capability, learner, j) for j in sources])
    return torch.sum(omega / omega.sum() * rewards)


def mask_by_search(ids, lengths, end_id):
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(ids.tolist()):
        mask[i, : row.index(end_id) + 1 if end_id in row else len(row)] = True
    return mask


def tokens_before_rollouts(logp, mask, source, advantages, weights, own, m, config):
    from hacpo_kit.objective import hacpo_loss

    objective = hacpo_loss(logp, mask, source, advantages, weights, own, m, config).objective
    return -(objective[:, None] * mask).sum() / mask.sum()


def micro_means(objective, sizes):
    parts = objective.split(sizes)
    return -torch.stack([p.mean() for p in parts]).mean()


WRITTEN = {
    "E1a": {
        "up_to_the_last_brace": lambda text: (
            text[text.find("boxed{") + 6 : text.rindex("}")] if "boxed{" in text else None
        )
    },
    "E1b": {"with_replacement": lambda n, correct, k: 1 - math.prod([(n - correct) / n] * k)},
    "E2a": {"population_std": population, "mean_of_batch": normalised_batch},
    "E2b": {"wrong_direction": baseline_inverted, "divided_by_sum_of_omega": baseline_weighted},
    "E2c": {"wrong_direction": lambda j, k, c: torch.tensor([capability_ratio(c, k, i) if i != k else 1.0 for i in j])},
    "E3a": {"sum": ratio_of_sums, "padded_length": ratio_by_row_length, "mean_over_batch": mean_of_batch_tokens},
    "E3b": {"up_to_first_end": mask_by_search, "from_ids": lambda ids, lengths, end_id: ~(ids == end_id)},
    "E4a": {"no_cap": lambda m, d, s: [1 - d + s * m, 1]},
    "E4b": {"not_stopped": objective_without_stop, "zero_outside": objective_filtered},
    "E4c": {"mean_over_tokens": tokens_before_rollouts},
    "E5a": {"mean_of_means": micro_means},
    "E6b": {"rounded_down": lambda delta, delta_step: delta // delta_step},
}


@pytest.mark.parametrize(
    ("label", "name", "function"),
    [(label, name, f) for label, ways in WRITTEN.items() for name, f in ways.items()],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_exercise_recognises_a_mistake_written_in_another_way(label, name, function):
    verdict = EXERCISES[label].judge(function)
    assert verdict.mistake == name, verdict.text


def test_exercise_names_one_of_two_mistakes_if_a_case_shows_it_alone():
    def population_and_nan(rewards):
        return (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True, correction=0)

    verdict = checks.group_advantage.judge(population_and_nan)
    assert verdict.mistake == "population_std" and "several mistakes" in verdict.text

    def inverted_and_padded(logp, mask, source_mean_logp):  # both mistakes change every case
        return (source_mean_logp - torch.where(mask, logp, 0.0).sum(-1) / logp.shape[-1]).exp()

    assert checks.importance_ratio.judge(inverted_and_padded).mistake == "unknown"


# ── problems of form ──────────────────────────────────────────────────────────────────────────────


def ratio_in_place(logp, mask, source_mean_logp):
    logp[~mask] = 0.0
    return (logp.sum(-1) / mask.sum(-1) - source_mean_logp).exp()


def weights_in_place(sources, learner, capability):
    out = checks.update_weights.reference(sources, learner, capability)
    sources.sort(reverse=True)
    return out


CORRECT_RATIO = checks.importance_ratio.reference
FORMS = {
    "crash": ("E3a", lambda logp, mask, source: logp @ source, "RuntimeError"),
    "shape": ("E3a", lambda logp, mask, source: CORRECT_RATIO(logp, mask, source)[:, None], "(2, 1); (2,)"),
    "dtype": ("E3b", lambda ids, lengths, end: e3_ratio.mask_from_lengths(ids, lengths, end).float(), "torch.bool"),
    "not_a_tensor": ("E2c", lambda j, k, c: e2_advantage.weights(j, k, c).tolist(), "a list"),
    "not_finite": ("E2b", lambda r, j, k, c: torch.tensor(torch.nan), "NaN"),
    "returned_none": ("E3a", lambda logp, mask, source: None, "None"),
    "no_gradient": ("E5a", lambda objective, sizes: -objective.mean().detach(), "No gradient"),
    "gradient": ("E5a", lambda objective, sizes: -(2 * objective - objective.detach()).mean(), "the gradient is not"),
    "changed_input": ("E3a", ratio_in_place, "argument 1 in place"),
    "type": ("E1a", lambda text: 95, "'95' is expected"),
    "unknown": ("E2b", lambda r, j, k, c: r.mean() + 0.123, "rewards = [0, 1, 0, 1], sources = ['A', 'A', 'B', 'B']"),
    "not_a_function": ("E2b", torch.tensor(0.75), "0.75"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_exercise_reports_a_problem_of_form(name):
    label, function, fragment = FORMS[name]
    verdict = EXERCISES[label].judge(function)
    assert (verdict.solved, verdict.mistake) == (False, name), verdict.text
    assert fragment in " ".join(verdict.text.split())


def test_exercise_reports_a_float_and_a_list_changed_in_place():
    verdict = checks.capability_baseline.judge(lambda *a: e2_advantage.baseline(*a).item())
    assert verdict.mistake == "not_a_tensor" and "a float" in verdict.text
    assert checks.update_weights.judge(weights_in_place).mistake == "changed_input"


def test_exercise_shows_the_learners_line_after_a_crash():
    def answer(rewards):
        return rewards.no_such_thing()

    text = checks.group_advantage.judge(answer).text
    assert "AttributeError" in text and "return rewards.no_such_thing()" in text and "judge.py" not in text


def test_exercise_gives_every_call_a_fresh_input():
    exercise = Exercise("X", lambda x: x.sum(), [Case("a", (torch.ones(2),)), Case("b", (torch.ones(2),))], [], "")
    assert exercise.judge(lambda x: x.mul_(2).sum()).mistake == "unknown"
    assert all(torch.equal(c.arguments[0], torch.ones(2)) for c in exercise.cases)


def test_exercise_shows_every_case_with_details(capsys):
    checks.clip_range(lambda m, d, s: (1 - d, 1.0), details=True)
    out = capsys.readouterr().out
    assert out.count("✓ ") == 1 and out.count("✗ ") == 4 and "updates_made = 19, delta = 0.2" in out


def test_exercise_does_not_recognise_a_mistake_by_an_error_alone():
    crash = Mistake("crashes_at_zero", [lambda x: 1 / x if x else 1 / 0], "It divides.", "zero")
    exercise = Exercise("X", lambda x: 1 / x if x else 0.0, [Case("one", (1,)), Case("zero", (0,))], [crash], "")
    assert exercise.judge(lambda x: 1 / x).mistake == "crashes_at_zero"
    assert exercise.judge(lambda x: 7.0 + 1 / x).mistake == "unknown"


# ── planted bugs and predictions ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("learner", ["A", "B", "C"])
def test_effective_advantages_has_only_the_planted_bug(learner):
    source = inspect.getsource(checks.effective_advantages)
    repaired = {}
    corrected = source.replace(e5_find_the_bug.PLANTED, e5_find_the_bug.REPAIRED)
    exec(corrected, vars(e5_find_the_bug) | {"__name__": "x"}, repaired)
    rewards, sources, capability = e2_advantage.SIX_REWARDS, e2_advantage.SIX_SOURCES, e2_advantage.TRIO
    group = group_advantages(rewards, ["p"] * 6, sources, learner, capability, binary_guard=False)
    expected = group.advantages * e2_advantage.weights(sources, learner, capability)
    arguments = (rewards, sources, learner, capability)
    assert torch.allclose(repaired["effective_advantages"](*arguments), expected)
    assert not torch.allclose(checks.effective_advantages(*arguments), expected)
    lines = source.splitlines()
    assert e5_find_the_bug.PLANTED in lines[checks.which_line.reference() - 1]
    assert source.count(e5_find_the_bug.PLANTED) == 1
    assert len(checks.which_line.mistakes) == len(lines) - 1  # a message for every other line


@pytest.mark.parametrize("seed", range(4))
def test_clip_curves_depend_on_the_ratios(seed):
    ratios = torch.tensor([0.3, 0.7, 0.85, 0.9, 0.97, 0.99, 1.2, 1.5])
    curves, exercise = checks.clip_curves(ratios, (0.05, 0.2, 0.8), 0.025, 8, seed)
    correct = curves.iloc[0].idxmin()
    assert exercise.judge(lambda: correct).solved and not exercise.judge(unsolved).solved
    named = {letter: exercise.judge(lambda letter=letter: letter).mistake for letter in curves}
    assert sorted(named.values()) == ["", "delta_0.05", "delta_0.2"] and named[curves.iloc[0].idxmax()] == "delta_0.05"
    assert exercise.judge(lambda: "Z").mistake == "unknown"
    # δ = 0.8 at m = 0: the range is [0.2, 1]; two of eight ratios lie above it
    assert curves[correct].iloc[0] == pytest.approx(2 / 8)
    assert curves[curves.iloc[0].idxmax()].iloc[2] == 1.0  # δ = 0.05 is closed from m = 2 on


# ── the run that fails ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "mistake", "fragment"),
    [
        ({}, "unchanged", "failing run"),
        ({"lr": 1e-3}, "unchanged", "failing run"),
        ({"n": 64}, "fixed_setting", " n:"),
        ({"lrr": 1e-4}, "invalid_setting", "lrr"),
        ({"lr": "fast"}, "invalid_setting", "fast"),
        (0.1, "type", "float"),
    ],
)
def test_tuning_checks_settings_before_training(settings, mistake, fragment, monkeypatch):
    monkeypatch.setattr(e7_tune.Tuning, "run", lambda *_: pytest.fail("it trained"))
    verdict = checks.tuning.judge(lambda: settings)
    assert (verdict.solved, verdict.mistake) == (False, mistake) and fragment in verdict.text, verdict.text
    assert checks.tuning.judge(unsolved).text == "… E7: not solved yet."


def history(accuracy, *rewards):
    rows = [{"step": 0, "agent": a, "avg@1": accuracy[0]} for a in "AB"]
    for step, pair in enumerate(rewards, 1):
        scores = {"avg@1": accuracy[1]} if step == len(rewards) else {}
        rows += [{"step": step, "agent": a, "reward": r, **scores} for a, r in zip("AB", pair, strict=True)]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("accuracy", "rewards", "lower", "mistake"),
    [
        ((0.1, 0.9), [(0.2, 0.2), (0.9, 0.9)], [0.8, 0.9], ""),
        ((0.1, 0.9), [(0.2, 0.2), (0.9, 0.9)], [0.8, 1.0], "range_closed"),
        ((0.1, 0.3), [(0.2, 0.2), (0.7, 0.3), (0.4, 0.3)], [0.8, 0.9], "reward_falls"),
        ((0.1, 0.12), [(0.2, 0.2), (0.25, 0.15)], [0.8, 0.9], "no_progress"),
        ((0.1, 0.6), [(0.2, 0.2), (0.5, 0.5)], [0.8, 0.9], "too_slow"),
    ],
)
def test_tuning_diagnoses_a_run_by_its_rewards_and_ranges(accuracy, rewards, lower, mistake, monkeypatch):
    monkeypatch.setattr(e7_tune.Tuning, "run", lambda *_: (history(accuracy, *rewards), pd.DataFrame({"lower": lower})))
    verdict = checks.tuning.judge(lambda: {"lr": 2e-4})
    assert (verdict.solved, verdict.mistake) == (not mistake, mistake), verdict.text
    assert f"Accuracy {accuracy[0]:.2f} → {accuracy[1]:.2f}" in verdict.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "mistake"),
    [({"delta_step": 0.025}, "reward_falls"), ({"lr": 1e-6}, "no_progress"), ({"lr": 1e-4}, "range_closed")],
)
def test_tuning_diagnoses_real_runs(settings, mistake):
    assert checks.tuning.judge(lambda: settings).mistake == mistake


# ── the notebooks ────────────────────────────────────────────────────────────────────────────────────────────────


def read(path):
    return nbformat.read(path, as_version=4)


HEADING = re.compile(
    r"## (E\d[a-z]?) · (.+)\n\n([●○]{3}) · (\d+) minutes · \*you practise\* .+ · \*belongs to\* \[\w+\]\(\.\./(\w+)\.ipynb\)\n"
)


def exercises_in(notebook):
    """Return heading match, stub, check and solution cell by label, in the order of the notebook."""
    found, label = {}, None
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## E"):
            match = HEADING.match(cell.source)
            assert match, f"title, difficulty, minutes, what is practised and the course notebook: {cell.source[:80]}"
            label = match[1]
            found[label] = {"heading": match}
        elif cell.cell_type == "code" and label:
            for tag in ("exercise", "check", "solution"):
                if tag in tags(cell):
                    assert tag not in found[label]
                    found[label][tag] = cell
    return found


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_exercise_notebook_has_stub_check_and_folded_solution(path):
    notebook = read(path)
    assert "parameters" in tags(notebook.cells[1]) and re.search(
        r"\*Takes\* about \d+ minutes", notebook.cells[0].source
    )
    found = exercises_in(notebook)
    assert found
    for parts in found.values():
        assert set(parts) == {"heading", "exercise", "check", "solution"}
        assert (
            'raise NotImplementedError("your turn")' in parts["exercise"].source and '"""' in parts["exercise"].source
        )
        assert "details=details" in parts["check"].source
        assert parts["solution"].metadata["jupyter"] == {"source_hidden": True, "outputs_hidden": True}
        name = re.search(r"def (\w+)\(", parts["exercise"].source)[1]
        assert f"def {name}_solution(" in parts["solution"].source  # running it leaves the learner's function alone
        assert re.search(r"\w\((\w+)_solution\)\s*$", parts["solution"].source)[1] == name
    above = [notebook.cells[i - 1].source for i, c in enumerate(notebook.cells) if "solution" in tags(c)]
    assert all("### Solution (unfold)" in text and "<details><summary>Hint</summary>" in text for text in above)


def test_readme_lists_the_exercises():
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    labels = []
    for path in PATHS:
        assert f"| **[{path.stem}]({path.name})** |" in table
        for label, parts in exercises_in(read(path)).items():
            _, title, dots, minutes, course = parts["heading"].groups()
            assert f"| {label} | {title} | {dots} | {minutes} | [{course[:2]}](../{course}.ipynb) |" in table
            labels.append(label)
    assert re.findall(r"^\| (E\d[a-z]?) \|", table, re.M) == labels == sorted([*EXERCISES, "E6a", "E7"])
    assert len(labels) >= 10


@cache
def executed(path, folder):
    """Execute a notebook in its own folder, as JupyterLab does."""
    import papermill

    out = Path(folder) / path.name
    papermill.execute_notebook(str(path), str(out), cwd=str(FOLDER), progress_bar=False, kernel_name="python3")
    return read(out)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("exercises"))
    return lambda path: executed(path, folder)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_exercise_notebook_runs_unsolved_and_its_solutions_pass(path, run):
    for notebook in (read(path), run(path)):  # as stored, and executed now
        for label, parts in exercises_in(notebook).items():
            assert output(parts["check"]).splitlines()[0] == f"… {label}: not solved yet."
            assert output(parts["solution"]).startswith(f"✓ {label}: "), output(parts["solution"])
        assert not [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs if o.get("name") == "stderr"]


def test_planted_function_of_E5a_is_a_mean_of_means():
    notebook = read(FOLDER / "E5_find_the_bug.ipynb")
    planted = next(c.source for c in notebook.cells if "planted" in tags(c))
    names = {"torch": torch, "Float": pytest.importorskip("jaxtyping").Float, "Tensor": torch.Tensor}
    exec(planted, names)
    assert checks.accumulate.judge(names["accumulate_as_found"]).mistake == "mean_of_means"


def test_exercise_notebook_names_a_mistake_in_the_stub(tmp_path):
    """The stub is replaced by the solution with a planted mistake; the notebook runs in another folder, with details."""
    import papermill

    notebook = read(FOLDER / "E3_ratio.ipynb")
    parts = exercises_in(notebook)["E3a"]
    solution = parts["solution"].source.replace("importance_ratio_solution", "importance_ratio")
    parts["exercise"].source = solution.replace(" / mask.sum(-1)", " / mask.shape[-1]").rsplit("\n\n\n", 1)[0]
    nbformat.write(notebook, tmp_path / "answer.ipynb")
    papermill.execute_notebook(
        str(tmp_path / "answer.ipynb"), str(tmp_path / "out.ipynb"), parameters={"details": True}, cwd=str(tmp_path),
        progress_bar=False, kernel_name="python3",
    )  # fmt: skip
    out = output(exercises_in(read(tmp_path / "out.ipynb"))["E3a"]["check"])
    assert "(padded_length)" in out and "input     logp = " in out
