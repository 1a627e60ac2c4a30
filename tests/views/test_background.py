"""A training in a thread: pauses, changes and errors leave the result bit-identical, and nothing is lost."""

import signal
import threading
import warnings

import numpy as np
import pytest
import torch

import hacpo_kit as hk
from hacpo_kit.common.files import read_lines
from hacpo_kit.views.background import BackgroundTraining

pytestmark = pytest.mark.slow

CONFIG = hk.Config(prompts_per_step=4, n=4, minibatch=16)
OPTIONS = {"eval_every": 2, "save_every": 4}


def weights(agents):
    return {f"{a.name}.{k}": v for a in agents for k, v in a.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def problems(split="train", size=50):
    return hk.load_problems("arithmetic", split=split, size=size)


def training_in(folder, *, steps=6, config=CONFIG, after=None, **options):
    """A background training; `after` maps a step to what its callback does in the training's own thread."""
    after = after or {}
    agents = hk.load_agents("tiny-model-pair", device="cpu")

    def act(result):
        if action := after.get(result.metrics["step"]):
            action(made)

    made = BackgroundTraining(
        agents, problems(), config, steps, out=folder, test=problems("test", 6), callbacks=[act], **OPTIONS, **options
    )
    return made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same training by `train` alone; a callback changes settings after the second and the third step."""
    torch.set_num_threads(1)
    changes = {2: {"lr": 3e-5}, 3: {"delta": 0.5, "window": 3}}
    return hk.train(
        hk.load_agents("tiny-model-pair", device="cpu"), problems(), CONFIG, 6, test=problems("test", 6),
        out=tmp_path_factory.mktemp("runs") / "whole", progress="off", **OPTIONS,
        callbacks=[lambda result: result.config.replace(**changes.get(result.metrics["step"], {}))],
    )  # fmt: skip


def test_training_with_pauses_and_changes_is_bit_identical(undisturbed, tmp_path):
    """A change while it runs, one while it is paused, a stop, and a second process on the same folder."""
    after = {2: lambda t: t.change(lr=3e-5), 3: lambda t: t.pause(), 5: lambda t: t.stop()}
    training = training_in(tmp_path / "run", after=after)
    assert training.status == "ready" and not training.running
    run = training.start().wait(120)
    assert training.status == "paused" and run.stopped and training.step == training.saved_step == 3
    training.change(delta=0.5, window=3)
    assert training.pending == {"delta": 0.5, "window": 3} and training.config.delta == 0.2
    assert training.start().wait(120).state.step == 5 and training.status == "stopped"
    other = training_in(tmp_path / "run")  # as in another process
    assert other.status == "stopped" and other.step == 5 and other.config == undisturbed.config
    run = other.start().wait(120)
    assert other.status == "finished" and not run.stopped
    assert same(weights(run.agents), weights(undisturbed.agents)) and run.config == undisturbed.config
    for name in ("samples.jsonl", "changes.jsonl"):
        assert read_lines(run.folder / name) == read_lines(undisturbed.folder / name)
    assert other.changes == read_lines(run.folder / "changes.jsonl")
    assert [(c["setting"], c["old"], c["new"], c["from_step"]) for c in other.changes] == [
        ("lr", 1e-4, 3e-5, 3), ("window", 5, 3, 4), ("delta", 0.2, 0.5, 4)
    ]  # fmt: skip
    assert other.history == read_lines(run.folder / "metrics.jsonl")
    assert other.to_frame()["step"].max() == 6


def test_training_is_independent_of_other_random_numbers(undisturbed, tmp_path):
    """Other cells of the notebook may draw random numbers meanwhile."""
    changes = {2: {"lr": 3e-5}, 3: {"delta": 0.5, "window": 3}}

    def draw(training):
        torch.rand(3), np.random.rand(3)  # noqa: NPY002
        training.change(**changes.get(training.step, {}))

    run = training_in(tmp_path / "run", after=dict.fromkeys(range(1, 7), draw)).start().wait(120)
    assert same(weights(run.agents), weights(undisturbed.agents))


@pytest.mark.parametrize("fails_at", [1, 3])
def test_training_resumes_after_an_error(undisturbed, tmp_path, fails_at):
    errors = [MemoryError("no memory left")]

    def fail(_):
        if errors:
            raise errors.pop()

    after = {2: lambda t: t.change(lr=3e-5), fails_at: fail}
    training = training_in(tmp_path / "run", after=after).start()
    with pytest.raises(MemoryError, match="no memory left"):
        training.wait(120)
    assert training.status == "failed" and not training.running
    assert training.saved_step == (0 if fails_at == 1 else 2)  # the change after step 2 saved a checkpoint
    after[3] = lambda t: t.change(delta=0.5, window=3)
    run = training.start().wait(120)
    assert training.status == "finished" and training.error is None
    assert same(weights(run.agents), weights(undisturbed.agents))
    assert [line["step"] for line in training.history] == list(range(7))


def test_training_refuses_the_folder_of_another_run(undisturbed):
    training = training_in(undisturbed.folder, config=CONFIG.replace(seed=7)).start()
    with pytest.raises(ValueError, match="seed"):
        training.wait(120)
    assert training.status == "failed"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seed": 1}, ValueError, "seed"),
        ({"delta": 2}, ValueError, "delta=2"),
        ({"detla": 0.5}, TypeError, "'delta'"),
        ({"prompts_per_step": 51}, ValueError, "50"),
    ],
)
def test_training_refuses_an_invalid_change(tmp_path, change, error, message):
    training = training_in(tmp_path / "run")
    with pytest.raises(error, match=message):
        training.change(lr=1e-5, **change)
    assert training.pending == {}


def test_training_refuses_misuse(tmp_path):
    with pytest.raises(TypeError, match="'eval_evry'; did you mean 'eval_every'"):
        training_in(tmp_path, eval_evry=2)
    with pytest.raises(RuntimeError, match=r"start\(\)"):
        training_in(tmp_path / "run").wait()


def test_start_while_running_withdraws_a_pause(tmp_path):
    training = training_in(tmp_path / "run", steps=3, after={2: lambda t: (t.pause(), t.start(), t.start())})
    thread = training.start()._thread
    run = training.start().wait(120)
    assert training._thread is thread and not run.stopped and training.status == "finished"


def test_wait_ends_early_by_an_interrupt_or_a_timeout(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    gate = threading.Event()
    training = training_in(tmp_path / "run", after={1: lambda _: gate.wait(30)}).start()
    main = threading.main_thread().ident
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            training.wait(30)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        training.wait(0.1)
    assert training.running
    training.stop()
    gate.set()
    assert training.wait(120).stopped


def test_training_records_only_its_own_warnings(tmp_path):
    def warn(training):
        for count in (1, 2):
            warnings.warn(f"{count} answers were cut", stacklevel=1)

    training = training_in(tmp_path / "run", steps=1, after={1: warn})
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        training.start()
        warnings.warn("of this thread", stacklevel=1)
        training.wait(120)
    assert "of this thread" in [str(w.message) for w in others]
    assert training.warnings["# answers were cut"] == ("2 answers were cut", 2)
