"""The exercises: every solution passes, every known mistake is named and confused with no other, the notebooks hold together."""

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
from judge import Case, Exercise, Mistake, same  # noqa: E402

PATHS = sorted(FOLDER.glob("*.ipynb"))
EXERCISES = checks.EXERCISES
MISTAKES = [(e, m, way) for e in EXERCISES.values() for m in e.mistakes for way in m.ways]


def tags(cell):
    return cell.metadata.get("tags", [])


def output(cell):
    return "".join(o.get("text", "") for o in cell.outputs)


def unsolved(*_):
    raise NotImplementedError("your turn")


# ── the catalogue ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_the_right_function_passes_and_a_stub_is_not_solved_yet(exercise, capsys):
    verdict = exercise.judge(exercise.reference)
    assert verdict.solved and not verdict.mistake and verdict.text.startswith(f"✓ {exercise.label}: right"), (
        verdict.text
    )
    exercise(unsolved, details=True)
    assert f"… {exercise.label}: not solved yet." in capsys.readouterr().out


@pytest.mark.parametrize(("exercise", "mistake", "way"), MISTAKES, ids=[f"{e.label}-{m.name}" for e, m, _ in MISTAKES])
def test_every_planted_mistake_is_named(exercise, mistake, way):
    verdict = exercise.judge(way)
    assert not verdict.solved and verdict.mistake == mistake.name
    words = " ".join(verdict.text.split())
    assert "I recognise this" in words and " ".join(mistake.told.split()) in words and "Look at: " in words


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_two_mistakes_are_never_confused(exercise):
    """Some case tells any two mistakes apart, and each from what is right."""
    done = {("right", 0): [exercise.outcome(exercise.reference, c) for c in exercise.cases]}
    for mistake in exercise.mistakes:
        for i, way in enumerate(mistake.ways):
            done[mistake.name, i] = [exercise.outcome(way, c) for c in exercise.cases]
    for (a, seen), (b, other) in itertools.combinations(done.items(), 2):
        assert a[0] == b[0] or not all(map(same, seen, other)), f"{a} and {b} do the same in every case"


def test_every_mistake_has_words_and_all_words_a_mistake():
    assert set(checks.WORDS) == set(EXERCISES)
    for label, exercise in EXERCISES.items():
        assert set(checks.WORDS[label]["mistakes"]) == {m.name for m in exercise.mistakes}
        assert all(len(m.told) > 20 and m.look for m in exercise.mistakes)


# As a learner would write them: none of this is code of the catalogue.
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


def baseline_upside_down(rewards, sources, learner, capability):
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
    "E2a": {"population_std": population, "whole_batch": normalised_batch},
    "E2b": {"wrong_direction": baseline_upside_down, "divided_by_the_weights": baseline_weighted},
    "E2c": {"wrong_direction": lambda j, k, c: torch.tensor([capability_ratio(c, k, i) if i != k else 1.0 for i in j])},
    "E3a": {"sum": ratio_of_sums, "padded_length": ratio_by_row_length, "mean_over_the_batch": mean_of_batch_tokens},
    "E3b": {"up_to_the_first_end": mask_by_search, "from_ids": lambda ids, lengths, end_id: ~(ids == end_id)},
    "E4a": {"no_cap": lambda m, d, s: [1 - d + s * m, 1]},
    "E4b": {"not_stopped": objective_without_stop, "filtered": objective_filtered},
    "E4c": {"mean_over_tokens": tokens_before_rollouts},
    "E5a": {"mean_of_means": micro_means},
    "E6b": {"rounded_down": lambda delta, delta_step: delta // delta_step},
}


@pytest.mark.parametrize(
    ("label", "name", "function"),
    [(label, name, f) for label, ways in WRITTEN.items() for name, f in ways.items()],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_mistakes_are_recognised_however_they_are_written(label, name, function):
    verdict = EXERCISES[label].judge(function)
    assert verdict.mistake == name, verdict.text


def test_of_two_mistakes_at_once_one_is_named_and_the_other_announced():
    def population_and_nan(rewards):
        return (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True, correction=0)

    verdict = checks.group_advantage.judge(population_and_nan)
    assert verdict.mistake == "population_std" and "there is something else besides" in verdict.text

    def upside_down_and_padded(logp, mask, source_mean_logp):  # both show in every case: honestly unknown
        return (source_mean_logp - torch.where(mask, logp, 0.0).sum(-1) / logp.shape[-1]).exp()

    assert checks.importance_ratio.judge(upside_down_and_padded).mistake == "unknown"


# ── what can go wrong with the form ──────────────────────────────────────────────────────────────────────────────


def ratio_in_place(logp, mask, source_mean_logp):
    logp[~mask] = 0.0
    return (logp.sum(-1) / mask.sum(-1) - source_mean_logp).exp()


def weights_in_place(sources, learner, capability):
    out = checks.update_weights.reference(sources, learner, capability)
    sources.sort(reverse=True)
    return out


RIGHT_RATIO = checks.importance_ratio.reference
FORMS = {
    "crash": ("E3a", lambda logp, mask, source: logp @ source, "RuntimeError"),
    "shape": ("E3a", lambda logp, mask, source: RIGHT_RATIO(logp, mask, source)[:, None], "shape (2, 1), (2,) is right"),
    "dtype": ("E3b", lambda ids, lengths, end: checks._mask(ids, lengths, end).float(), "float32, and should be torch.bool"),
    "not_a_tensor": ("E2c", lambda j, k, c: checks._weights(j, k, c).tolist(), "you returned a list"),
    "not_finite": ("E2b", lambda r, j, k, c: torch.tensor(torch.nan), "NaN or infinity"),
    "returned_none": ("E3a", lambda logp, mask, source: None, "is its last line a return?"),
    "no_gradient": ("E5a", lambda objective, sizes: -objective.mean().detach(), "no gradient flows"),
    "gradient": ("E5a", lambda objective, sizes: -(2 * objective - objective.detach()).mean(), "their gradient is not"),
    "changed_input": ("E3a", ratio_in_place, "changed its first input"),
    "type": ("E1a", lambda text: 95, "returns a number; '95' is right here"),
    "unknown": ("E2b", lambda r, j, k, c: r.mean() + 0.123, "rewards = [0, 1, 0, 1], sources = ['A', 'A', 'B', 'B']"),
    "not_a_function": ("E2b", torch.tensor(0.75), "without parentheses"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_faults_of_form_are_said_clearly(name):
    label, function, told = FORMS[name]
    verdict = EXERCISES[label].judge(function)
    assert (verdict.solved, verdict.mistake) == (False, name), verdict.text
    assert told in " ".join(verdict.text.split())


def test_a_python_float_for_a_tensor_is_told_and_a_list_changed_in_place_too():
    verdict = checks.capability_baseline.judge(lambda *a: checks._baseline(*a).item())
    assert verdict.mistake == "not_a_tensor" and "you returned a float" in verdict.text
    assert checks.update_weights.judge(weights_in_place).mistake == "changed_input"


def test_a_crash_names_the_learners_own_line():
    def mine(rewards):
        return rewards.no_such_thing()

    text = checks.group_advantage.judge(mine).text
    assert "AttributeError" in text and "return rewards.no_such_thing()" in text and "judge.py" not in text


def test_an_input_is_never_changed_for_the_next_case():
    exercise = Exercise("X", lambda x: x.sum(), [Case("a", (torch.ones(2),)), Case("b", (torch.ones(2),))], [], "")
    assert exercise.judge(lambda x: x.mul_(2).sum()).mistake == "unknown"
    assert all(torch.equal(c.arguments[0], torch.ones(2)) for c in exercise.cases)


def test_details_show_every_case(capsys):
    checks.band(lambda m, d, s: (1 - d, 1.0), details=True)
    out = capsys.readouterr().out
    assert out.count("✓ ") == 1 and out.count("✗ ") == 4 and "updates_made = 19, delta = 0.2" in out


def test_a_mistake_is_recognised_by_values_and_not_by_being_an_error():
    """Two functions that crash alike have not made the same mistake: an error proves nothing about one of two faults."""
    crash = Mistake("crashes_at_zero", lambda x: 1 / x if x else 1 / 0, "it divides", "zero")
    exercise = Exercise("X", lambda x: 1 / x if x else 0.0, [Case("one", (1,)), Case("zero", (0,))], [crash], "")
    assert exercise.judge(lambda x: 1 / x).mistake == "crashes_at_zero"
    assert exercise.judge(lambda x: 7.0 + 1 / x).mistake == "unknown"


# ── planted bugs and predictions ─────────────────────────────────────────────────────────────────────────────────


def effective(rewards, sources, learner, capability):
    group = group_advantages(rewards, ["p"] * len(rewards), sources, learner, capability, binary_guard=False)
    return group.advantages * checks._weights(sources, learner, capability)


@pytest.mark.parametrize("learner", ["A", "B", "C"])
def test_the_planted_line_is_the_only_fault(learner):
    import inspect

    source = inspect.getsource(checks.effective_advantages)
    repaired = {}
    exec(source.replace(checks.PLANTED, checks.REPAIRED), vars(checks) | {"__name__": "x"}, repaired)
    given = (checks._GRADED, checks._SIX, learner, checks.TRIO)
    assert torch.allclose(repaired["effective_advantages"](*given), effective(*given))
    assert not torch.allclose(checks.effective_advantages(*given), effective(*given))
    lines = source.splitlines()
    assert checks.PLANTED in lines[checks.which_line.reference() - 1] and source.count(checks.PLANTED) == 1
    assert len(checks.which_line.mistakes) == len(lines) - 1  # every other line says why it is right


@pytest.mark.parametrize("seed", range(4))
def test_the_prediction_is_computed_from_the_ratios(seed):
    ratios = torch.tensor([0.3, 0.7, 0.85, 0.9, 0.97, 0.99, 1.2, 1.5])
    curves, exercise = checks.clip_curves(ratios, (0.05, 0.2, 0.8), 0.025, 8, seed)
    right = curves.iloc[0].idxmin()
    assert exercise.judge(lambda: right).solved and not exercise.judge(unsolved).solved
    named = {letter: exercise.judge(lambda letter=letter: letter).mistake for letter in curves}
    assert sorted(named.values()) == ["", "delta_0.05", "delta_0.2"] and named[curves.iloc[0].idxmax()] == "delta_0.05"
    assert exercise.judge(lambda: "Z").mistake == "unknown"
    # δ = 0.8 at m = 0: the band is [0.2, 1]; two of eight ratios lie above it
    assert curves[right].iloc[0] == pytest.approx(2 / 8)
    assert curves[curves.iloc[0].idxmax()].iloc[2] == 1.0  # δ = 0.05 is closed from m = 2 on


# ── the run that fails ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "mistake", "told"),
    [
        ({}, "unchanged", "Change something"),
        ({"lr": 1e-3}, "unchanged", "Change something"),
        ({"n": 64}, "another_budget", "leave n as it is"),
        ({"lrr": 1e-4}, "refused", "did you mean 'lr'?"),
        ({"lr": "fast"}, "refused", "takes a number"),
        (0.1, "type", "a dictionary"),
    ],
)
def test_settings_are_checked_before_anything_is_trained(settings, mistake, told, monkeypatch):
    monkeypatch.setattr(checks.Tuning, "run", lambda *_: pytest.fail("it trained"))
    verdict = checks.tuning.judge(lambda: settings)
    assert (verdict.solved, verdict.mistake) == (False, mistake) and told in verdict.text
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
        ((0.1, 0.9), [(0.2, 0.2), (0.9, 0.9)], [0.8, 1.0], "band_closed"),
        ((0.1, 0.3), [(0.2, 0.2), (0.7, 0.3), (0.4, 0.3)], [0.8, 0.9], "overshoots"),
        ((0.1, 0.12), [(0.2, 0.2), (0.25, 0.15)], [0.8, 0.9], "asleep"),
        ((0.1, 0.6), [(0.2, 0.2), (0.5, 0.5)], [0.8, 0.9], "too_slow"),
    ],
)
def test_a_run_is_diagnosed_by_what_it_shows(accuracy, rewards, lower, mistake, monkeypatch):
    monkeypatch.setattr(checks.Tuning, "run", lambda *_: (history(accuracy, *rewards), pd.DataFrame({"lower": lower})))
    verdict = checks.tuning.judge(lambda: {"lr": 2e-4})
    assert (verdict.solved, verdict.mistake) == (not mistake, mistake), verdict.text
    assert f"accuracy {accuracy[0]:.2f} → {accuracy[1]:.2f}" in verdict.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "mistake"),
    [({"delta_step": 0.025}, "overshoots"), ({"lr": 1e-6}, "asleep"), ({"lr": 1e-4}, "band_closed")],
)
def test_real_runs_show_what_they_are_said_to_show(settings, mistake):
    assert checks.tuning.judge(lambda: settings).mistake == mistake


# ── the notebooks ────────────────────────────────────────────────────────────────────────────────────────────────


def read(path):
    return nbformat.read(path, as_version=4)


HEADING = re.compile(
    r"## (E\d[a-z]?) · (.+)\n\n([●○]{3}) · (\d+) minutes · \*you practise\* .+ · \*belongs to\* \[\w+\]\(\.\./(\w+)\.ipynb\)\n"
)


def exercises_in(notebook):
    """Label → (heading match, stub, check and solution cell), in the order of the notebook."""
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
def test_every_exercise_is_complete_and_its_solution_is_folded(path):
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


def test_the_table_of_the_readme_is_that_of_the_notebooks():
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
    """The notebook run from top to bottom, in its own folder as JupyterLab does."""
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
def test_notebooks_run_top_to_bottom_unsolved_and_every_solution_passes(path, run):
    for notebook in (read(path), run(path)):  # as it is stored, and as it runs now
        for label, parts in exercises_in(notebook).items():
            assert output(parts["check"]).splitlines()[0] == f"… {label}: not solved yet."
            assert output(parts["solution"]).startswith(f"✓ {label}: "), output(parts["solution"])
        assert not [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs if o.get("name") == "stderr"]


def test_the_planted_function_of_E5a_is_the_mistake_it_is_meant_to_be():
    notebook = read(FOLDER / "E5_find_the_bug.ipynb")
    planted = next(c.source for c in notebook.cells if "planted" in tags(c))
    names = {"torch": torch, "Float": pytest.importorskip("jaxtyping").Float, "Tensor": torch.Tensor}
    exec(planted, names)
    assert checks.accumulate.judge(names["accumulate_as_found"]).mistake == "mean_of_means"


def test_a_solved_notebook_says_so(tmp_path):
    """What a learner sees: the stub replaced by the solution, the check passes; by a mistake, it is named."""
    import papermill

    notebook = read(FOLDER / "E3_ratio.ipynb")
    parts = exercises_in(notebook)["E3a"]
    solution = parts["solution"].source.replace("importance_ratio_solution", "importance_ratio")
    parts["exercise"].source = solution.replace(" / mask.sum(-1)", " / mask.shape[-1]").rsplit("\n\n\n", 1)[0]
    nbformat.write(notebook, tmp_path / "mine.ipynb")
    papermill.execute_notebook(
        str(tmp_path / "mine.ipynb"), str(tmp_path / "out.ipynb"), parameters={"details": True}, cwd=str(tmp_path),
        progress_bar=False, kernel_name="python3",
    )  # fmt: skip
    out = output(exercises_in(read(tmp_path / "out.ipynb"))["E3a"]["check"])
    assert (
        "✗ E3a, not yet (padded_length)." in out and "input     logp = " in out
    )  # also from another folder, with details
