"""train(), save and resume: what is recorded, and that a stopped run ends as if it had never stopped."""

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hacpo_kit as hk
from hacpo_kit.common.files import Lines, read_lines
from hacpo_kit.models.offload import Offload
from hacpo_kit.runs.checkpoints import checkpoints, restore_newest
from hacpo_kit.runs.metrics import METRICS

CONFIG = hk.Config(prompts_per_step=4, n=4, minibatch=16)
OPTIONS = {"eval_every": 2, "save_every": 2, "progress": "off"}
TIMES = ("seconds",)


def weights(agents):
    return {f"{a.name}.{k}": v for a in agents for k, v in a.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def without_times(lines):
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


def agents():
    return hk.load_agents("tiny-model-pair", device="cpu")


def problems(split, size):
    return hk.load_problems("arithmetic", split=split, size=size)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of six steps that nobody stopped."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return hk.train(agents(), problems("train", 50), CONFIG, 6, test=problems("test", 6), out=folder, **OPTIONS)


def test_the_run_folder_holds_what_a_reader_needs(undisturbed):
    folder = undisturbed.folder
    assert hk.Config.from_dict(json.loads((folder / "config.json").read_text())) == CONFIG
    record = json.loads((folder / "run.json").read_text())
    assert record["seed"] == 0 and record["versions"]["torch"] == torch.__version__
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(7))
    assert [line["step"] for line in lines if "avg@1" in line["agents"]["qwen3-sums"]] == [0, 2, 4, 6]
    assert lines[-1]["rollouts"] == 6 * 4 * 4 * 2
    assert lines == list(undisturbed.history)
    assert [c.name for c in checkpoints(folder)] == ["step-000004", "step-000006"]
    samples = read_lines(folder / "samples.jsonl")
    assert {s["step"] for s in samples} == set(range(1, 7))
    assert all(set(s["advantage"]) == {"qwen3-sums", "llama-differences"} for s in samples if s["reward"] is not None)
    assert not list(folder.rglob("*.tmp"))
    frame = undisturbed.to_frame()
    assert len(frame) == 14 and {"step", "agent", "reward", "capability", "avg@1"} <= set(frame.columns)


def test_every_metric_is_in_the_glossary_and_the_reverse(undisturbed, fresh_agent, reporting_engine):
    """With a second run that has a KL, something left out, an engine with log-probs and parts that move: every name occurs."""
    odd = [fresh_agent("qwen3-sums"), fresh_agent("llama-differences")]
    odd[0].engine, odd[0].offload = reporting_engine(0), Offload("cpu")
    config = CONFIG.replace(beta=0.1, exclude_solved=True)
    run = hk.train(odd, problems("train", 20), config, 1, test=problems("test", 3),
                   tests={"sums": hk.load_problems("sums", split="test", size=2)}, eval_k=2, progress="off")  # fmt: skip
    assert "its gradient is not" in METRICS["loss"]  # about zero on policy: who reads the value alone is misled
    emitted = set()
    for line in (*undisturbed.history, *run.history):
        emitted |= set(line) - {"agents"}
        for values in line["agents"].values():
            emitted |= set(values)

    def name(metric):
        for suffix in ("_min", "_max"):
            metric = metric.removesuffix(suffix) + "_mean" if metric.endswith(suffix) else metric
        metric = {"clip_own_high": "clip_own_low", "clip_peer_high": "clip_peer_low"}.get(metric, metric)
        for prefix, general in (
            ("status_", "status_*"),
            ("excluded_", "excluded_*"),
            ("avg@", "avg@k"),
            ("best@", "best@k"),
        ):
            further = "/*" if "/" in metric else ""
            metric = f"{general}{further}" if metric.startswith(prefix) else metric
        return metric

    assert {name(m) for m in emitted} | {"excluded_*"} == set(METRICS)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", "{", r"run\.json is not JSON"),
        ("run.json", '{"steps": 6}', r"run\.json has no reward_function, agents, .*another version"),
        ("config.json", '{"version": 2, "epsilon": 0.2}', r"config\.json: unknown setting 'epsilon'"),
        ("config.json", '{"version": 0}', r"config\.json: .*version 0"),
    ],
)
def test_a_record_from_elsewhere_is_refused_with_its_file_and_the_reason(undisturbed, tmp_path, file, content, message):
    for name in ("run.json", "config.json"):
        shutil.copy(undisturbed.folder / name, tmp_path / name)
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        hk.resume(tmp_path)


def test_trained_agents_load_with_plain_transformers(undisturbed):
    folder = checkpoints(undisturbed.folder)[-1]
    for agent in undisturbed.agents:
        model = AutoModelForCausalLM.from_pretrained(folder / "agents" / agent.name)
        assert same(model.state_dict(), agent.model.state_dict())
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert tied == agent.model.config.tie_word_embeddings
        assert (
            AutoTokenizer.from_pretrained(folder / "agents" / agent.name)("37+58=").input_ids
            == agent.tokenizer("37+58=").input_ids
        )
        loaded = hk.load_agent(folder / "agents" / agent.name)
        assert loaded.name == agent.name and loaded.end_ids == agent.end_ids


@pytest.mark.parametrize("stop_at", [1, 3, 4])
def test_a_stopped_run_ends_in_the_same_weights(undisturbed, tmp_path, stop_at):
    folder = tmp_path / "stopped"
    stop = lambda result: result.metrics and len(read_lines(folder / "metrics.jsonl")) > stop_at  # noqa: E731
    first = hk.train(
        agents(), problems("train", 50), CONFIG, 6, test=problems("test", 6), out=folder, callbacks=[stop], **OPTIONS
    )
    assert first.stopped and first.state.step == stop_at
    again = hk.resume(folder, progress="off")
    assert not again.stopped and same(weights(again.agents), weights(undisturbed.agents))
    assert without_times(read_lines(folder / "metrics.jsonl")) == without_times(undisturbed.history)
    assert again.capability == undisturbed.capability
    assert read_lines(folder / "samples.jsonl") == read_lines(undisturbed.folder / "samples.jsonl")


SCRIPT = """
import sys, torch
import hacpo_kit as hk
torch.set_num_threads(1)
config = hk.Config(prompts_per_step=4, n=4, minibatch=16)
train, test = (hk.load_problems("arithmetic", split=s, size=k) for s, k in (("train", 50), ("test", 6)))
run = hk.train(hk.load_agents("tiny-model-pair", device="cpu"), train, config, 6, test=test, out=sys.argv[1],
               eval_every=2, save_every=2, progress="lines")
print("stopped" if run.stopped else "finished", run.state.step)
"""


def start(folder):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "the run did not get there"
        time.sleep(0.02)


def test_ctrl_c_ends_after_the_step_with_a_checkpoint(undisturbed, tmp_path):
    folder = tmp_path / "interrupted"
    process = start(folder)
    wait_for(lambda: len(read_lines(folder / "metrics.jsonl")) > 1, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "stopping after this step" in out and "the same call" in out, out
    done = int(out.split("stopped after step ")[1].split()[0])
    assert json.loads((checkpoints(folder)[-1] / "state.json").read_text())["step"] == done < 6
    assert same(weights(hk.resume(folder, progress="off").agents), weights(undisturbed.agents))


def test_a_finished_run_is_not_trained_again_and_can_be_made_longer(undisturbed, tmp_path):
    folder = tmp_path / "short"
    settings = {"test": problems("test", 6), "out": folder, **OPTIONS}
    hk.train(agents(), problems("train", 50), CONFIG, 4, **settings)
    before = (folder / "metrics.jsonl").read_bytes()
    again = hk.train(agents(), problems("train", 50), CONFIG, 4, **settings)
    assert (folder / "metrics.jsonl").read_bytes() == before and again.last is None and not again.stopped
    longer = hk.resume(folder, steps=6, progress="off")
    assert same(weights(longer.agents), weights(undisturbed.agents))


def test_save_and_restore_by_hand(fresh_agent, tmp_path):
    """The whole state: weights, optimiser, KL reference, random generators, capability, position."""
    agent = fresh_agent("qwen3-sums")
    config = CONFIG.replace(beta=0.01)
    draw = problems("train", 50)
    first = hk.step([agent], draw.batch(0, 4), hk.Capability(window=3), config)
    state = hk.State(step=1, capability=first.capability, position=4)
    hk.save(tmp_path / "point", [agent], state)
    expected = (torch.rand(3), np.random.rand(3), random.random())  # noqa: NPY002
    hk.step([agent], draw.batch(4, 4), first.capability, config)
    other = fresh_agent("qwen3-sums")
    restored = hk.restore(tmp_path / "point", [other])
    assert restored == state
    got = (torch.rand(3), np.random.rand(3), random.random())  # noqa: NPY002
    assert torch.equal(got[0], expected[0]) and (got[1] == expected[1]).all() and got[2] == expected[2]
    hk.step([other], draw.batch(restored.position, 4), restored.capability, config)
    assert same(agent.model.state_dict(), other.model.state_dict())
    assert same(agent.reference.state_dict(), other.reference.state_dict())
    slots, restored_slots = (a.optimizer.state_dict()["state"] for a in (agent, other))
    assert slots.keys() == restored_slots.keys()
    assert all(same(slots[i], restored_slots[i]) for i in slots)


def test_the_reference_of_the_kl_says_the_same_after_restore_in_half_precision(tmp_path):
    """Buffers that no file holds, such as rotary frequencies, stay in float32."""
    agent = hk.load_agent("qwen3-sums", device="cpu", dtype="bfloat16")
    hk.step([agent], problems("train", 4), hk.Capability(window=3), CONFIG.replace(beta=0.01))
    asked = [agent.encode_prompt("37+58=")], [(5, 6, 7)]
    before = agent.reference_logprobs(*asked)
    assert not torch.equal(before, agent.logprobs(*asked)[0])
    hk.save(tmp_path / "point", [agent], hk.State(capability=hk.Capability(window=3)))
    hk.restore(tmp_path / "point", [agent])
    assert torch.equal(agent.reference_logprobs(*asked), before)


def test_evaluation_in_training_samples_no_more_answers_at_once_than_training(fresh_agent, monkeypatch):
    from hacpo_kit.models.engines import transformers as engine

    sampled, at_once = engine.sample, []
    monkeypatch.setattr(engine, "sample", lambda a, p, **how: at_once.append(len(p)) or sampled(a, p, **how))
    config = CONFIG.replace(rollout_batch=8)
    hk.train([fresh_agent("qwen3-sums")], problems("train", 20), config, 1, test=problems("test", 20), progress="off")
    assert max(at_once) == 8


def test_restore_refuses_what_is_no_checkpoint_of_these_agents(fresh_agent, tmp_path):
    agent = fresh_agent("qwen3-sums")
    with pytest.raises(FileNotFoundError, match=r"state\.json is missing"):
        hk.restore(tmp_path, [agent])
    hk.save(tmp_path / "point", [agent], hk.State())
    with pytest.raises(ValueError, match="holds agents"):
        hk.restore(tmp_path / "point", [fresh_agent("llama-differences")])


def test_a_failed_save_leaves_the_old_checkpoint(fresh_agent, tmp_path, monkeypatch):
    agent = fresh_agent("qwen3-sums")
    hk.save(tmp_path / "point", [agent], hk.State(step=1))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hacpo_kit.runs.checkpoints.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        hk.save(tmp_path / "point", [agent], hk.State(step=2))
    assert [p.name for p in tmp_path.iterdir()] == ["point"]
    assert hk.restore(tmp_path / "point", [agent]).step == 1


def test_a_folder_with_another_run_is_refused(undisturbed, tmp_path):
    folder = undisturbed.folder
    with pytest.raises(ValueError, match=r"other settings \(alpha: 1\.0 → 2\.0\)"):
        hk.train(agents(), problems("train", 50), CONFIG.replace(alpha=2), 6, test=problems("test", 6), out=folder)
    with pytest.raises(ValueError, match="problems: "):
        hk.train(agents(), problems("train", 51), CONFIG, 6, test=problems("test", 6), out=folder)
    with pytest.raises(ValueError, match=r"agents: \['qwen3-sums', 'llama-differences'\]"):
        hk.train(agents()[:1], problems("train", 50), CONFIG, 6, test=problems("test", 6), out=folder)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty and holds no run"):
        hk.train(agents(), problems("train", 50), CONFIG, 1, out=tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(FileNotFoundError, match=r"run\.json is missing"):
        hk.resume(tmp_path)


def test_a_run_whose_agent_got_another_chat_template_is_refused(undisturbed, tmp_path):
    """The weights come from the checkpoint, the template from the folder where the agent came from."""
    folder, options = tmp_path / "run", {"test": problems("test", 6), "out": tmp_path / "run", "progress": "off"}
    shutil.copytree(undisturbed.folder, folder)
    other = agents()
    other[0].tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}!"
    with pytest.raises(ValueError, match=r"chat_template of qwen3-sums: \w+ → '\w{16}'"):
        hk.train(other, problems("train", 50), CONFIG, 7, **options)
    record = json.loads((folder / "run.json").read_text())  # of a version that did not record it
    for agent in record["agents"]:
        del agent["chat_template"]
    (folder / "run.json").write_text(json.dumps(record))
    assert hk.train(agents(), problems("train", 50), CONFIG, 7, **options).state.step == 7
    assert all("chat_template" in agent for agent in json.loads((folder / "run.json").read_text())["agents"])


def test_a_run_with_another_reward_or_prompt_format_is_refused(undisturbed):
    folder = undisturbed.folder
    data = {"test": problems("test", 6), "out": folder}
    with pytest.raises(ValueError, match=r"reward_function: 'boxed_math' → 'generous'"):
        hk.train(agents(), problems("train", 50), CONFIG, 6, reward_function=generous, **data)
    other = agents()
    other[0].template["enable_thinking"] = False
    with pytest.raises(ValueError, match=r"template of qwen3-sums: \{\} → \{'enable_thinking': False\}"):
        hk.train(other, problems("train", 50), CONFIG, 6, **data)


def test_other_versions_are_said(tmp_path):
    hk.train(agents(), problems("train", 20), CONFIG, 1, out=tmp_path, progress="off")
    record = json.loads((tmp_path / "run.json").read_text())
    record["versions"]["torch"] = "1.0"
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.warns(UserWarning, match=r"started with other torch: '1\.0' → "):
        hk.train(agents(), problems("train", 20), CONFIG, 2, out=tmp_path, progress="off")


def generous(response, gold):
    return 1.0


@pytest.mark.parametrize("name", ["eval_every", "eval_k", "save_every", "steps"])
@pytest.mark.parametrize("value", [0, 2.5, True, "3"])
def test_an_interval_that_is_no_whole_number_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}: "):
        hk.train(agents(), problems("train", 20), CONFIG, **{"steps": 1, name: value})


def test_numpys_whole_numbers_are_whole_numbers(tmp_path):
    run = hk.train(
        agents()[0], problems("train", 20), CONFIG, np.int64(1), save_every=np.int64(1), out=tmp_path, progress="off"
    )
    assert run.state.step == 1 and json.loads((tmp_path / "run.json").read_text())["steps"] == 1


def test_an_agent_without_any_reward_is_excluded_and_the_others_learn(monkeypatch):
    """Its P̂ cannot be compared with the others': once a KeyError for every learner."""
    pool = hk.rollout(agents(), problems("train", 4), n=4, max_new_tokens=8, progress=False)
    first = pool.agents[0]
    rewards = [None if r.source == first else float(r.sample % 2) for r in pool]
    pool = pool.with_rewards(rewards, ["error" if r is None else "correct" for r in rewards])
    capability = hk.Capability().observe(pool)
    batches = [hk.advantage(pool, agent, capability, CONFIG) for agent in agents()]
    assert [len(b) for b in batches] == [0, 16]
    assert [b.excluded for b in batches] == [{"unscorable": 16, "no_capability": 16}, {"unscorable": 16}]
    assert (batches[1].advantages != 0).all()
    naive = hk.advantage(pool, agents()[0], capability, hk.Config.preset("naive"))  # which compares nobody
    assert len(naive) == 16 and naive.excluded == {"unscorable": 16}
    monkeypatch.setattr("hacpo_kit.training.reward", lambda pool, function: pool.with_rewards(rewards, ["error"] * 32))
    with pytest.warns(UserWarning, match=rf"{first}.* no rollouts.*no_capability"):
        result = hk.step(agents(), problems("train", 4), hk.Capability(), CONFIG)
    assert [len(s.minibatches) > 0 for s in result.stats.values()] == [False, True]


def test_one_agent_and_a_plain_list_of_problems():
    agent = agents()[0]
    run = hk.train(agent, list(problems("train", 20)), CONFIG, 1, progress="off")
    result = hk.step(agent, list(problems("train", 4)), run.capability, CONFIG)
    assert agent.steps == 2 and set(result.stats) == {agent.name}
    assert len(repr(run)) < 200 and len(repr(result)) < 300


def test_agents_from_memory_have_to_be_given_again(tmp_path):
    loaded = agents()[0]
    mine = hk.Agent(loaded.model, loaded.tokenizer, name="mine")
    hk.train(mine, problems("train", 20), CONFIG, 1, out=tmp_path / "run", progress="off")
    with pytest.raises(ValueError, match=r"'mine'.* pass agents="):
        hk.resume(tmp_path / "run", steps=2)
    assert hk.resume(tmp_path / "run", steps=2, agents=[mine], progress="off").state.step == 2


def test_a_test_set_without_a_usable_gold_leaves_the_accuracy_out(tmp_path):
    """NaN is not JSON: it used to end the run."""
    test = hk.load_problems([{"prompt": "1+1=", "gold": "1/0"}])
    run = hk.train(agents(), problems("train", 20), CONFIG, 1, test=test, out=tmp_path / "run", progress="off")
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 2
    assert not any(key.startswith("avg@") for line in run.history for a in line["agents"].values() for key in a)


def test_ctrl_c_in_a_callback_keeps_the_step(tmp_path):
    """Between the look at the key and the loop's own no step may be lost: what ends a run has been saved."""
    press = [lambda result: signal.raise_signal(signal.SIGINT)]
    options = {"out": tmp_path / "run", "callbacks": press, "save_every": 100, "progress": "off"}
    run = hk.train(agents(), problems("train", 20), CONFIG, 5, **options)
    assert run.stopped and run.state.step == 1
    assert [c.name for c in checkpoints(tmp_path / "run")] == ["step-000001"]


def test_trained_agents_do_not_start_a_new_run(undisturbed, tmp_path):
    with pytest.raises(ValueError, match="load them again"):
        hk.train(undisturbed.agents, problems("train", 50), CONFIG, 1, out=tmp_path / "new")


def test_what_the_folder_cannot_name_has_to_be_given_again(tmp_path):
    drawn = hk.load_problems([{"prompt": f"{i}+{i}=", "gold": str(2 * i)} for i in range(10, 30)])
    hk.train(agents(), drawn, CONFIG, 1, out=tmp_path / "own", reward_function=generous, progress="off")
    with pytest.raises(ValueError, match="pass reward_function="):
        hk.resume(tmp_path / "own", steps=2)
    with pytest.raises(ValueError, match="pass problems="):
        hk.resume(tmp_path / "own", steps=2, reward_function=generous)
    run = hk.resume(tmp_path / "own", steps=2, reward_function=generous, problems=drawn, progress="off")
    assert run.state.step == 2 and run.history[-1]["agents"]["qwen3-sums"]["reward"] == 1.0


def test_progress_lines_and_unknown_modes(capsys, monkeypatch):
    monkeypatch.delenv("HACPO_KIT_PROGRESS", raising=False)
    monkeypatch.setattr("hacpo_kit.common.console.unattended", lambda: True)  # as under papermill
    for mode in ("lines", "auto"):
        hk.train(agents(), problems("train", 20), CONFIG, 2, progress=mode)
        out, bars = capsys.readouterr()
        assert "step 1/2: mean reward qwen3-sums" in out and "step 2/2" in out and not bars
    with pytest.raises(ValueError, match="'auto', 'bar', 'lines' or 'off'"):
        hk.train(agents(), problems("train", 20), CONFIG, 2, progress="loud")


def test_evaluation_does_not_change_training(undisturbed):
    alone = hk.train(agents(), problems("train", 50), CONFIG, 6, progress="off")
    assert same(weights(alone.agents), weights(undisturbed.agents))


def test_in_a_thread(undisturbed):
    """As a widget starts it: no signal handler, no event loop."""
    import threading

    out = []
    thread = threading.Thread(
        target=lambda: out.append(hk.train(agents(), problems("train", 50), CONFIG, 2, progress="off"))
    )
    thread.start()
    thread.join(120)
    assert out and out[0].state.step == 2


def test_import_is_light():
    code = "import sys, hacpo_kit; print([m for m in ('transformers', 'vllm', 'plotly', 'ipywidgets') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert out.stdout.strip() == "[]"


def test_a_step_in_which_nothing_can_be_scored_is_counted_and_passed_over(fresh_agent):
    """Unusable golds pay nobody, and the run goes on."""
    both = [fresh_agent("qwen3-sums"), fresh_agent("llama-differences")]
    with pytest.warns(UserWarning, match="no reference answer"):
        nobody = hk.load_problems([{"prompt": "10+11=", "gold": ""}, {"prompt": "12+13=", "gold": ""}])
    with pytest.warns(UserWarning, match="could not be scored"):
        result = hk.step(both, nobody, hk.Capability(), CONFIG)
    assert result.metrics["omega"] == {}
    mine = result.metrics["agents"]["qwen3-sums"]
    assert (mine["updates"], mine["excluded_unscorable"]) == (0, 16) and not {"capability", "reward"} & set(mine)
    usable = problems("train", 20)
    after = hk.step(both, usable[:4], result.capability, CONFIG)
    assert after.metrics["agents"]["qwen3-sums"]["capability"] > 0
    figure = hk.plots.capability_ratios(after.capability)
    assert figure.data[0].y[0] is None and figure.data[0].y[1] > 0


def test_names_instead_of_agents_say_what_to_do():
    with pytest.raises(TypeError, match=r"load them first with hk\.load_agents\('tiny-model-pair'\)"):
        hk.train("tiny-model-pair", problems("train", 20), CONFIG, 1)


def test_memory_settings_may_change_on_resume_with_a_warning(tmp_path):
    hk.train(agents(), problems("train", 20), CONFIG, 1, out=tmp_path / "run", progress="off")
    smaller = CONFIG.replace(microbatch_tokens=512)
    with pytest.warns(UserWarning, match="microbatch_tokens: 16384 → 512"):
        run = hk.train(agents(), problems("train", 20), smaller, 2, out=tmp_path / "run", progress="off")
    assert run.state.step == 2


def test_callbacks_see_the_step_and_its_totals(tmp_path):
    seen = []
    hk.train(agents(), problems("train", 20), CONFIG, 2, callbacks=[lambda r: seen.append(r.metrics)], progress="off")
    assert [(m["step"], m["rollouts"]) for m in seen] == [(1, 32), (2, 64)]


@pytest.mark.slow
def test_together_they_learn_faster_than_alone():
    """The claim of the README in small: four steps, equal rollouts, one seed; over five seeds the lead was 35 to 38 points."""
    accuracy = {}
    for method in ("hacpo", "gspo"):
        run = hk.train(agents(), hk.load_problems("arithmetic"), hk.Config.preset(method), 4, progress="off")
        result = hk.evaluate(run.agents, problems("test", 100), progress=False)
        accuracy[method] = sum(result[a.name]["avg@1"] for a in run.agents) / 2
    assert accuracy["hacpo"] > accuracy["gspo"] + 0.15


# ── what an attacker tried ───────────────────────────────────────────────────────────────────────────────────────


def test_save_never_deletes_what_is_no_checkpoint(fresh_agent, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match="not empty and not a checkpoint"):
        hk.save(tmp_path / "mine", [fresh_agent("qwen3-sums")], hk.State())
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"


def test_infinite_settings_survive_the_run_folder(tmp_path):
    config = CONFIG.replace(max_grad_norm=float("inf"), eps_high=float("inf"))
    hk.train(agents(), problems("train", 20), config, 1, out=tmp_path / "run", progress="off")
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["max_grad_norm"] == "inf" and hk.Config.from_dict(stored) == config


def test_a_second_process_on_one_run_is_refused(tmp_path):
    folder = tmp_path / "run"
    process = start(folder)
    wait_for(lambda: len(read_lines(folder / "metrics.jsonl")) > 1, process)
    process.send_signal(signal.SIGSTOP)  # at work however slow this process is
    with pytest.raises(ValueError, match=r"another process is working on run .*run"):
        hk.train(agents(), problems("train", 50), CONFIG, 6, test=problems("test", 6), out=folder, **OPTIONS)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert hk.resume(folder, steps=2, progress="off").state.step >= 2  # a killed process holds no lock


@pytest.mark.parametrize("damage", ["cut model", "empty optimizer", "cut state", "no model"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(undisturbed, tmp_path, damage):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed.folder, folder)
    (folder / "checkpoints" / "step-best").mkdir()  # whoever makes it, it is none of ours
    last = checkpoints(folder)[-1]
    assert last.name == "step-000006"
    victim = {
        "cut model": last / "agents" / "qwen3-sums" / "model.safetensors",
        "empty optimizer": last / "optimizers" / "qwen3-sums.safetensors",
        "cut state": last / "state.json",
        "no model": last / "agents" / "llama-differences" / "model.safetensors",
    }[damage]
    content = victim.read_bytes()
    if damage == "no model":
        victim.unlink()
    else:
        victim.write_bytes(b"" if damage.startswith("empty") else content[: len(content) // 2])
    with pytest.warns(UserWarning, match="step-000006 cannot be read"):
        again = hk.resume(folder, progress="off")
    assert again.state.step == 6 and same(weights(again.agents), weights(undisturbed.agents))


def test_a_finished_run_without_checkpoints_is_refused_and_keeps_its_record(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed.folder, folder)
    shutil.rmtree(folder / "checkpoints")
    before = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock"}
    with pytest.raises(ValueError, match="all its 6 steps and has no checkpoint"):
        hk.resume(folder, steps=8, progress="off")
    assert {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock"} == before


def test_a_stopped_run_without_checkpoints_begins_anew_and_says_so(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed.folder, folder)
    shutil.rmtree(folder / "checkpoints")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:4]))
    with pytest.warns(UserWarning, match="no checkpoint: .*its 3 steps are repeated"):
        again = hk.resume(folder, progress="off")
    assert same(weights(again.agents), weights(undisturbed.agents))


def test_a_checkpoint_that_lost_its_state_gives_way_to_the_one_made_again(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed.folder, folder)
    (folder / "checkpoints" / "step-000006" / "state.json").unlink()
    with pytest.warns(UserWarning, match="going back to step-000004"):
        again = hk.resume(folder, progress="off")
    assert same(weights(again.agents), weights(undisturbed.agents))
    assert restore_newest(folder, agents()).step == 6


def test_weights_that_are_not_finite_are_not_saved(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed.folder, folder)

    def spoil(result):
        spoiled[0].model.get_input_embeddings().weight.data[0, 0] = float("nan")

    spoiled = agents()
    with pytest.raises(FloatingPointError, match=r"'qwen3-sums' has weights that are not finite \(1 tensors"):
        hk.resume(folder, steps=7, agents=spoiled, callbacks=[spoil], progress="off")
    assert [c.name for c in checkpoints(folder)][-1] == "step-000006"


def test_when_no_checkpoint_can_be_read_nothing_starts_over(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed.folder, folder)
    for checkpoint in checkpoints(folder):
        (checkpoint / "state.json").write_text("{")
    before = (folder / "metrics.jsonl").read_bytes()
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(ValueError, match=r"cannot be read"),
    ):
        hk.resume(folder, progress="off")
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".", "..", "_x", "nul\0", "x" * 101, "ends."])
def test_names_that_are_no_folders_are_refused_before_anything_runs(fresh_agent, tmp_path, name):
    agent = fresh_agent("qwen3-sums")
    agent.name = name
    with pytest.raises(ValueError, match="becomes a folder"):
        hk.train(agent, problems("train", 20), CONFIG, 1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_names_that_look_like_files_of_another_do_not_collide(fresh_agent, tmp_path):
    config = CONFIG.replace(beta=0.1)
    runs = {}
    for stop in (2, 1):
        both = [fresh_agent("qwen3-sums"), fresh_agent("qwen3-sums")]
        both[0].name, both[1].name = "a", "a.reference"
        out = tmp_path / f"stop{stop}"
        hk.train(both, problems("train", 20), config, stop, out=out, progress="off", save_every=1)
        fresh = [fresh_agent("qwen3-sums"), fresh_agent("qwen3-sums")]
        fresh[0].name, fresh[1].name = "a", "a.reference"
        runs[stop] = hk.train(fresh, problems("train", 20), config, 2, out=out, progress="off", save_every=1)
    assert same(weights(runs[1].agents), weights(runs[2].agents))
    fresh[1].name = "A"
    with pytest.raises(ValueError, match="ignoring case"):
        hk.train(fresh, problems("train", 20), config, 1)


def test_too_few_problems_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="problems"):
        hk.train(agents(), problems("train", 3), CONFIG, 1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_numpy_rewards_in_a_verdict_are_written_as_numbers(tmp_path):
    from hacpo_kit.rewards import Verdict

    half = lambda response, gold: Verdict(np.float32(0.5), "correct")  # noqa: E731
    hk.train(agents(), problems("train", 20), CONFIG, 1, out=tmp_path / "run", reward_function=half, progress="off")
    assert {s["reward"] for s in read_lines(tmp_path / "run" / "samples.jsonl")} == {0.5}


def test_a_local_model_is_found_again_from_another_directory(tmp_path, monkeypatch, fresh_agent):
    fresh_agent("qwen3-sums").save(tmp_path / "models" / "mine")
    monkeypatch.chdir(tmp_path / "models")
    hk.train(hk.load_agents(["mine"]), problems("train", 20), CONFIG, 1, out=tmp_path / "run", progress="off")
    monkeypatch.chdir(tmp_path)
    assert hk.resume(tmp_path / "run", steps=2, progress="off").state.step == 2


def test_negative_mean_rewards_are_said(fresh_agent):
    pool = hk.rollout(fresh_agent("qwen3-sums"), problems("train", 1), n=2, progress=False)
    with pytest.warns(UserWarning, match="add a constant to the rewards"):
        hk.Capability().observe(pool.with_rewards([-1.0, 0.0], ["wrong", "wrong"]))


def test_further_test_sets_are_asked_at_the_start_and_at_the_end(fresh_agent, tmp_path):
    tests = {name: hk.load_problems(name, split="test", size=3) for name in ("sums", "larger")}
    pair = [fresh_agent("qwen3-sums"), fresh_agent("llama-differences")]
    run = hk.train(pair, problems("train", 20), CONFIG, 2, test=problems("test", 3), tests=tests, out=tmp_path / "run",
                   eval_every=1, eval_k=2, progress="off")  # fmt: skip
    asked = [[m for m in line["agents"]["qwen3-sums"] if "@" in m] for line in run.history]
    further = [f"{metric}/{name}" for name in tests for metric in ("avg@2", "best@2")]
    assert asked == [["avg@2", "best@2", *further], ["avg@2", "best@2"], ["avg@2", "best@2", *further]]
    again = hk.evaluate(pair, tests["larger"], 2, progress=False)
    assert run.history[-1]["agents"]["llama-differences"]["avg@2/larger"] == again["llama-differences"]["avg@2"]
    longer = hk.resume(tmp_path / "run", steps=3, progress="off")  # from the folder alone
    assert "avg@2/larger" in longer.history[-1]["agents"]["qwen3-sums"]
    for other, message in (
        ({"sums": tests["sums"]}, "test set 'larger': left out"),
        ({**tests, "mixed": tests["sums"]}, "test set 'mixed': added"),
        ({**tests, "sums": tests["sums"][:2]}, "test set 'sums': contents differ"),
    ):
        with pytest.raises(ValueError, match=message):
            hk.train(agents(), problems("train", 20), CONFIG, 3, test=problems("test", 3), tests=other,
                     out=tmp_path / "run", eval_every=1, eval_k=2, progress="off")  # fmt: skip


def test_a_test_set_from_memory_has_to_be_given_again(fresh_agent, tmp_path):
    own = hk.load_problems([{"prompt": "1+1=", "gold": "2"}])
    options = {"out": tmp_path / "run", "progress": "off"}
    hk.train(fresh_agent("llama-differences"), problems("train", 20), CONFIG, 1, tests={"own": own}, **options)
    with pytest.raises(ValueError, match=r"test set 'own' came from memory .* give tests= with it"):
        hk.resume(tmp_path / "run", progress="off")
    assert hk.resume(tmp_path / "run", tests={"own": own}, progress="off").state.step == 1
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    del record["tests"]  # a run of an earlier version
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    assert hk.resume(tmp_path / "run", progress="off").state.step == 1


@pytest.mark.parametrize(
    ("tests", "error", "message"),
    [
        ([], TypeError, "tests must map names to problems"),
        ({"": []}, ValueError, "needs a name"),
        ({"none": []}, ValueError, "'none' holds no problems"),
    ],
)
def test_test_sets_that_cannot_be(fresh_agent, tmp_path, tests, error, message):
    with pytest.raises(error, match=message):
        hk.train(fresh_agent("llama-differences"), problems("train", 20), CONFIG, 1, tests=tests, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ── settings that change within a run ────────────────────────────────────────────────────────────────────────────


def changing(result):
    """After step 2 smaller steps and a wider band, after step 3 a longer window and fewer prompts."""
    if result.metrics["step"] == 2:
        return result.config.replace(lr=3e-5, delta=0.5)
    if result.metrics["step"] == 3:
        return result.config.replace(window=3, prompts_per_step=3, temperature=0.9)
    return None


CHANGES = [
    {"step": 2, "from_step": 3, "setting": "delta", "old": 0.2, "new": 0.5},
    {"step": 2, "from_step": 3, "setting": "lr", "old": 1e-4, "new": 3e-5},
    {"step": 3, "from_step": 4, "setting": "prompts_per_step", "old": 4, "new": 3},
    {"step": 3, "from_step": 4, "setting": "temperature", "old": 1.0, "new": 0.9},
    {"step": 3, "from_step": 4, "setting": "window", "old": 5, "new": 3},
]
EVERY_STEP = {"eval_every": 2, "save_every": 4, "progress": "off"}


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A run of six steps whose callback changes settings after the second and the third."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "changed"
    return hk.train(agents(), problems("train", 50), CONFIG, 6, out=folder, callbacks=[changing], **EVERY_STEP)


def in_order(lines):
    return sorted(lines, key=lambda line: (line["step"], line["setting"]))


def test_a_change_takes_effect_at_the_next_step_and_is_recorded(changed):
    assert in_order(read_lines(changed.folder / "changes.jsonl")) == CHANGES
    assert changed.config == CONFIG.replace(lr=3e-5, delta=0.5, window=3, prompts_per_step=3, temperature=0.9)
    assert hk.Config.from_dict(json.loads((changed.folder / "config.json").read_text())) == CONFIG
    warm = [min(1.0, (t + 1) / CONFIG.warmup) for t in range(6)]
    rates = [line["agents"]["qwen3-sums"]["lr"] for line in changed.history[1:]]
    assert rates == pytest.approx([1e-4 * warm[0], 1e-4 * warm[1], *(3e-5 * w for w in warm[2:])])
    sampled = np.diff([line["rollouts"] for line in changed.history])
    assert sampled.tolist() == [4 * 4 * 2] * 3 + [3 * 4 * 2] * 3
    rewards = [line["agents"]["qwen3-sums"]["reward"] for line in changed.history[1:]]
    assert changed.capability["qwen3-sums"] == pytest.approx(np.mean(rewards[-3:]))
    assert changed.last.pool.temperature == 0.9 and changed.last.config == changed.config


def test_a_table_of_runs_says_what_changed_within_one(changed, undisturbed, tmp_path):
    frame = hk.read_runs(changed.folder)
    (said,) = frame["changed"].unique()
    assert "delta=0.5 from step 3" in said and "2 more changes" in said and set(frame["lr"]) == {1e-4}
    shutil.copytree(undisturbed.folder, tmp_path / "plain")
    shutil.copytree(changed.folder, tmp_path / "changed")
    both = hk.read_runs(tmp_path).drop_duplicates("run").set_index("run")["changed"]
    assert both.to_dict() == {"plain": "", "changed": said}
    # a change after the last step was never in force
    lines = (tmp_path / "changed" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "changed" / "metrics.jsonl").write_text("".join(lines[:3]))
    assert set(hk.read_runs(tmp_path / "changed")["changed"]) == {""}


def test_the_settings_of_its_end_are_no_new_run_and_the_remedy_is_told(changed):
    with pytest.raises(ValueError, match=r"lr: 0\.0001 → 3e-05.*give changes="):
        hk.train(agents(), problems("train", 50), changed.config, 7, out=changed.folder, progress="off")
    with pytest.raises(ValueError, match=r"choose another folder for this one$"):
        hk.train(agents(), problems("train", 50), CONFIG.replace(seed=9), 7, out=changed.folder, progress="off")


@pytest.mark.parametrize("name", ["changes.jsonl", "metrics.jsonl"])
def test_a_damaged_line_is_named(changed, tmp_path, name):
    shutil.copytree(changed.folder, tmp_path / "run")
    lines = (tmp_path / "run" / name).read_text().splitlines(keepends=True)
    (tmp_path / "run" / name).write_text("".join([lines[0], "no JSON\n", *lines[1:]]))
    with pytest.raises(ValueError, match=rf"line 2 of .*{name} is not JSON"):
        hk.resume(tmp_path / "run", steps=7, progress="off")


@pytest.mark.parametrize("name", ["changes.jsonl", "metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("line", ["5", "null", '{"a": 1}', '{"step": NaN}', '{"step": "x"}'])
def test_a_line_that_is_no_step_is_named(changed, tmp_path, name, line):
    shutil.copytree(changed.folder, tmp_path / "run")
    with (tmp_path / "run" / name).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=rf"{name} (is not a JSON object|has a line without a whole number)"):
        hk.resume(tmp_path / "run", steps=7, progress="off")


def test_a_line_that_is_no_step_is_named_without_a_checkpoint_too(undisturbed, tmp_path):
    shutil.copytree(undisturbed.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"a": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl has a line without a whole number as its step"):
        hk.resume(tmp_path / "run", steps=7, progress="off")


def test_a_changed_run_before_its_change_is_the_unchanged_one(changed, undisturbed):
    for mine, theirs in zip(changed.history[1:3], undisturbed.history[1:3], strict=True):
        for name, values in mine["agents"].items():  # the other run evaluates too
            assert values == {k: v for k, v in theirs["agents"][name].items() if not k.startswith(("avg@", "best@"))}
    assert not same(weights(changed.agents), weights(undisturbed.agents))


@pytest.mark.parametrize("stop_at", [2, 3, 5])
def test_a_stopped_run_gets_its_changes_back(changed, tmp_path, stop_at):
    folder = tmp_path / "stopped"
    stop = lambda result: result.metrics["step"] == stop_at  # noqa: E731
    first = hk.train(agents(), problems("train", 50), CONFIG, 6, out=folder, callbacks=[changing, stop], **EVERY_STEP)
    assert first.stopped and first.state.step == stop_at
    again = hk.resume(folder, callbacks=[changing], progress="off")
    assert same(weights(again.agents), weights(changed.agents)) and again.config == changed.config
    assert without_times(read_lines(folder / "metrics.jsonl")) == without_times(changed.history)
    assert in_order(read_lines(folder / "changes.jsonl")) == CHANGES


def test_a_change_after_the_restored_step_is_dropped_and_made_again(changed, tmp_path):
    """As after a kill during step 4: the newest readable checkpoint is that of step 2, saved with its change."""
    folder = tmp_path / "killed"
    stop = lambda result: result.metrics["step"] == 3  # noqa: E731
    hk.train(agents(), problems("train", 50), CONFIG, 6, out=folder, callbacks=[changing, stop], **EVERY_STEP)
    (checkpoints(folder)[-1] / "random.safetensors").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="cannot be read"):
        quiet = hk.resume(folder, steps=3, progress="off")  # nobody changes anything any more
    assert quiet.config == CONFIG.replace(lr=3e-5, delta=0.5)
    assert in_order(read_lines(folder / "changes.jsonl")) == CHANGES[:2]


def test_changes_before_the_first_step_of_a_call(changed, tmp_path):
    """`changes=` at the second and the third call is the same as a callback's Config before them."""
    folder = tmp_path / "by hand"
    options = {**EVERY_STEP, "out": folder}
    at = lambda step: [lambda result: result.metrics["step"] == step]  # noqa: E731
    hk.train(agents(), problems("train", 50), CONFIG, 6, callbacks=at(2), **options)
    same_again = {"lr": 3e-5, "delta": 0.5, "alpha": 1.0}  # alpha is so already: no change
    hk.train(agents(), problems("train", 50), CONFIG, 6, callbacks=at(3), changes=same_again, **options)
    later = {"window": 3, "prompts_per_step": 3, "temperature": 0.9}
    run = hk.resume(folder, changes=later, progress="off")
    assert same(weights(run.agents), weights(changed.agents))
    assert in_order(read_lines(folder / "changes.jsonl")) == CHANGES
    assert not hk.read_runs(folder).empty


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "cannot change within it .seed: 0 → 1"),
        ({"method": "gspo"}, "method: 'hacpo' → 'gspo'"),
        ({"sources": "own"}, "start another run with them"),
        ({"beta": 0.1}, "the KL needs the initial policy"),
        ({"prompts_per_step": 51}, "has 50; ask for at most 50"),
    ],
)
def test_what_a_run_is_cannot_change_within_it(tmp_path, change, message):
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match=message):
        hk.train(agents(), problems("train", 50), CONFIG, 2, out=folder, changes=change, progress="off")
    change_it = lambda result: result.config.replace(**change)  # noqa: E731
    with pytest.raises(ValueError, match=message):
        hk.train(agents(), problems("train", 50), CONFIG, 2, out=folder, callbacks=[change_it], progress="off")
    assert not read_lines(folder / "changes.jsonl")


def test_callbacks_that_disagree_are_refused(tmp_path):
    want = [lambda result, lr=lr: result.config.replace(lr=lr) for lr in (1e-5, 2e-5)]
    with pytest.raises(ValueError, match="two callbacks returned different settings"):
        hk.train(agents(), problems("train", 50), CONFIG, 2, callbacks=want, progress="off")


def test_a_run_can_be_saved_before_its_first_step(tmp_path):
    """So that a fault in the first steps loses nothing: the same agents can go on."""
    pair = agents()

    def fail(result):
        raise RuntimeError("no memory")

    options = {"out": tmp_path / "run", "save_first": True, "progress": "off"}
    with pytest.raises(RuntimeError, match="no memory"):
        hk.train(pair, problems("train", 50), CONFIG, 1, callbacks=[fail], **options)
    assert [c.name for c in checkpoints(tmp_path / "run")] == ["step-000000"] and pair[0].updates
    run = hk.train(pair, problems("train", 50), CONFIG, 1, **options)
    assert run.state.step == 1 and [line["step"] for line in run.history] == [0, 1]


# ── what a disk can do ───────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def full_disk(after):
    """No file may become longer than `after` bytes: a write stops in its middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_that_cannot_be_written_wait_and_none_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path)
    lines.add([{"step": 0, "text": "x" * 50}])
    with (
        full_disk(path.stat().st_size + 20),
        pytest.warns(UserWarning, match=r"1 lines cannot be written.*metrics\.jsonl"),
    ):
        lines.add([{"step": 1, "text": "y" * 50}])
    assert path.read_text().endswith("\n") and [row["step"] for row in read_lines(path)] == [0]
    lines.add([{"step": 2}])
    assert [row["step"] for row in read_lines(path)] == [0, 1, 2]


def disturbed(folder, stack, enter):
    """The run of six steps while something is wrong in steps 3 and 4, where its second checkpoint is due."""

    def during(result):
        if result.metrics["step"] == 2:  # before its own checkpoint, which is the first that fails
            stack.enter_context(enter())
        if result.metrics["step"] == 5:
            stack.close()

    with pytest.warns(UserWarning, match="cannot be written") as told:
        run = hk.train(
            agents(), problems("train", 50), CONFIG, 6, test=problems("test", 6), out=folder, save_first=True,
            callbacks=[during], **OPTIONS,
        )  # fmt: skip
    return run, [str(w.message) for w in told]


@pytest.mark.parametrize("room", [100, 100_000], ids=["lines, too", "checkpoints alone"])
def test_a_full_disk_is_said_and_the_run_goes_on(undisturbed, tmp_path, room):
    """What was there stays, nothing is half written, and the end is that of a run with room enough."""
    folder, seen = tmp_path / "run", []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: seen.append(([c.name for c in checkpoints(folder)], list(folder.rglob(".*.tmp")))))
        run, told = disturbed(folder, stack, lambda: full_disk(room))
    assert seen == [(["step-000000"], [])]
    for step in (2, 4):
        assert any(
            f"the checkpoint after step {step} of" in text
            and "the last good one is step-000000; the run goes on" in text
            for text in told
        ), told
    assert any("is trained but not recorded" in text for text in told) == (room == 100)
    assert same(weights(run.agents), weights(undisturbed.agents))
    assert without_times(read_lines(folder / "metrics.jsonl")) == without_times(undisturbed.history)
    assert read_lines(folder / "samples.jsonl") == read_lines(undisturbed.folder / "samples.jsonl")
    assert [c.name for c in checkpoints(folder)] == ["step-000000", "step-000006"]


def test_a_change_that_a_full_disk_cannot_take_is_recorded_with_the_next_checkpoint(changed, tmp_path):
    folder = tmp_path / "run"
    with contextlib.ExitStack() as stack:

        def during(result):
            if result.metrics["step"] == 2:  # before the change that `changing` wants here
                stack.enter_context(full_disk(10))
            if result.metrics["step"] == 4:
                stack.close()

        with pytest.warns(UserWarning, match="cannot be written") as told:
            run = hk.train(
                agents(), problems("train", 50), CONFIG, 6, out=folder, callbacks=[during, changing], **EVERY_STEP
            )
    assert any("2 lines cannot be written" in str(w.message) and "changes.jsonl" in str(w.message) for w in told)
    assert same(weights(run.agents), weights(changed.agents)) and run.config == changed.config
    assert in_order(read_lines(folder / "changes.jsonl")) == CHANGES


def test_a_change_asked_for_by_the_call_is_on_record_before_the_first_step(tmp_path, monkeypatch):
    """Unlike a callback's, nobody would ask for it again after a kill."""
    import hacpo_kit.common.files as files

    folder, append = tmp_path / "run", files.append_lines

    def full(path, rows):
        if path.name == "changes.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        append(path, rows)

    monkeypatch.setattr(files, "append_lines", full)
    call = {"out": folder, "changes": {"lr": 3e-5}, "progress": "off"}
    with (
        pytest.warns(UserWarning, match=r"cannot be written.*changes\.jsonl"),
        pytest.raises(OSError, match=r"No space left on device.*changes\.jsonl"),
    ):
        hk.train(agents(), problems("train", 50), CONFIG, 1, **call)
    assert not (folder / "checkpoints").exists()
    monkeypatch.undo()
    assert hk.train(agents(), problems("train", 50), CONFIG, 1, **call).config.lr == 3e-5
    assert [line["setting"] for line in read_lines(folder / "changes.jsonl")] == ["lr"]


def test_a_read_only_folder_is_said_and_the_run_goes_on(undisturbed, tmp_path, monkeypatch):
    folder = tmp_path / "run"

    @contextlib.contextmanager
    def read_only():
        kept, make = folder / "checkpoints", Path.mkdir
        kept.chmod(0o555)
        if os.access(kept, os.W_OK):  # root may all the same

            def refuse(path, *args, **how):
                if kept in path.parents:
                    raise PermissionError(errno.EACCES, "Permission denied", str(path))
                make(path, *args, **how)

            monkeypatch.setattr(Path, "mkdir", refuse)
        yield
        kept.chmod(0o755)
        monkeypatch.setattr(Path, "mkdir", make)

    with contextlib.ExitStack() as stack:
        run, told = disturbed(folder, stack, read_only)
    assert sum("Permission denied" in text and "the last good one is step-000000" in text for text in told) == 2, told
    assert same(weights(run.agents), weights(undisturbed.agents))


def test_a_last_checkpoint_that_cannot_be_written_is_an_error_and_the_same_call_goes_on(undisturbed, tmp_path):
    folder = tmp_path / "run"
    settings = {"test": problems("test", 6), "out": folder, **OPTIONS}
    with (
        full_disk(100_000),
        pytest.warns(UserWarning, match="there is none yet; the run goes on"),
        pytest.raises(OSError, match=r"after step 4 of .*File too large.*none yet.*the same call, once there is room"),
    ):
        hk.train(agents(), problems("train", 50), CONFIG, 4, **settings)
    assert not list(folder.rglob(".*.tmp"))
    run = hk.train(agents(), problems("train", 50), CONFIG, 6, **settings)
    assert same(weights(run.agents), weights(undisturbed.agents))


def flipped(path, where=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 1
    path.write_bytes(content)


FILES = ("agents/qwen3-sums/config.json", "agents/qwen3-sums/model.safetensors", "agents/llama-differences/tokenizer.json",
         "optimizers/qwen3-sums.safetensors", "random.safetensors", "state.json")  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_anywhere_is_found_and_the_checkpoint_before_is_used(undisturbed, tmp_path, name):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed.folder, folder)
    for where in (0.0, 0.5, 0.999):
        flipped(folder / "checkpoints" / "step-000006" / name, where)
        with pytest.warns(
            UserWarning, match=f"step-000006 cannot be read .*{name} is damaged.*going back to step-000004"
        ):
            assert restore_newest(folder, agents()).step == 4
        flipped(folder / "checkpoints" / "step-000006" / name, where)
    assert restore_newest(folder, agents()).step == 6


def test_a_checkpoint_that_lacks_a_file_or_a_digest_is_damaged(undisturbed, fresh_agent, tmp_path):
    both = [fresh_agent("qwen3-sums"), fresh_agent("llama-differences")]
    before = weights(both)
    for number, change in enumerate((
        lambda at: (at / "random.safetensors").unlink(),
        lambda at: at.joinpath("state.json").write_text(at.joinpath("state.json").read_text().replace('"sha256"', '"sha257"')),
        lambda at: at.joinpath("state.json").write_bytes(b"\xff\xfe"),
        lambda at: at.joinpath("state.json").write_text("[]"),
    )):  # fmt: skip
        at = tmp_path / str(number)
        shutil.copytree(undisturbed.folder / "checkpoints" / "step-000006", at)
        change(at)
        with pytest.raises(OSError, match=r"is missing|is damaged"):
            hk.restore(at, both)
    assert same(weights(both), before)  # looked at before anything is changed


def test_checkpoints_of_earlier_versions_have_no_digests_and_load(undisturbed, fresh_agent, tmp_path):
    at = tmp_path / "old"
    shutil.copytree(undisturbed.folder / "checkpoints" / "step-000006", at)
    stored = json.loads((at / "state.json").read_text())
    (at / "state.json").write_text(json.dumps({k: v for k, v in stored.items() if k not in ("files", "sha256")}))
    both = [fresh_agent("qwen3-sums"), fresh_agent("llama-differences")]
    assert hk.restore(at, both).step == 6 and same(weights(both), weights(undisturbed.agents))


def test_a_damaged_checkpoint_never_outlives_the_steps_that_replace_it(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed.folder, folder)
    flipped(folder / "checkpoints" / "step-000006" / "random.safetensors")
    stop = lambda result: True  # noqa: E731
    with pytest.warns(UserWarning, match="going back to step-000004"):
        hk.resume(folder, callbacks=[stop], progress="off")
    assert [c.name for c in checkpoints(folder)] == ["step-000004", "step-000005"]


def test_a_relative_folder_is_kept_tidy_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hk.train(agents(), problems("train", 20), CONFIG, 3, out="run", save_every=1, progress="off")
    assert [c.name for c in checkpoints(Path("run"))] == ["step-000002", "step-000003"]


def test_lost_lines_of_metrics_are_said(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed.folder, folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3] + lines[4:]))
    with pytest.warns(UserWarning, match=r"metrics\.jsonl lacks the steps \[3\]"):
        hk.resume(folder, progress="off")


def test_what_a_killed_process_left_is_removed_and_other_files_are_not(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed.folder, folder)
    left = [folder / ".metrics.jsonl.0123abcd.tmp", folder / "experience" / ".step-000007.parquet.0123abcd.tmp"]
    for path in left:
        path.write_text("half")
    (folder / "checkpoints" / ".step-000008.0123abcd.tmp").mkdir()
    (folder / ".mine.tmp").write_text("mine")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "half a li')
    hk.resume(folder, progress="off")
    assert [p.name for p in folder.rglob(".*.tmp")] == [".mine.tmp"]
    assert read_lines(folder / "metrics.jsonl") == list(undisturbed.history)
    assert (folder / "metrics.jsonl").read_bytes().endswith(b"\n")


# ── numbers that are not finite ──────────────────────────────────────────────────────────────────────────────────


def faulty(response, gold):
    return float("nan") if faulty.calls.append(1) or len(faulty.calls) == 40 else 1.0 * ("1" in response)


def broken_gradient(pair):
    """A weight of the second agent whose gradient is NaN from its third update on."""
    agent, updates = pair[1], []
    prepare = agent.prepare_update

    def counted(config):
        updates.append(1)
        return prepare(config)

    agent.prepare_update = counted
    weight = next(agent.model.parameters())
    weight.register_hook(lambda gradient: gradient * float("nan") if len(updates) > 2 else gradient)


@pytest.mark.parametrize("kind", ["reward", "log-prob", "gradient"])
def test_a_number_that_is_not_finite_ends_the_run_and_its_rollouts_are_kept(tmp_path, kind):
    folder, pair, function, faulty.calls = tmp_path / "run", agents(), hk.boxed_math, []
    if kind == "reward":
        function, error, told = (
            faulty,
            ValueError,
            r"agent '.*', .* by .* #\d+: item \d+: the reward function returned nan",
        )
    elif kind == "gradient":
        broken_gradient(pair)
        error, told = FloatingPointError, r"agent 'llama-differences', mini-batch 0: the gradient of \d+ rollouts"
    else:
        error, told = (
            FloatingPointError,
            r"agent 'llama-differences': log-probabilities of \d+ rollouts are not finite",
        )

    every = 2 if kind == "log-prob" else 1  # weights that are not finite would not be saved

    def spoil(result):
        if kind == "log-prob":
            pair[1].model.get_input_embeddings().weight.data[:] = float("nan")

    with pytest.raises(error, match=rf"{told}.*these rollouts are in .*faults/step-00000\d-.*\.json") as caught:
        hk.train(pair, problems("train", 50), CONFIG, 6, out=folder, reward_function=function, callbacks=[spoil],
                 save_every=every, save_first=True, progress="off")  # fmt: skip
    (path,) = (folder / "faults").iterdir()
    kept = json.loads(path.read_text())
    assert str(path) in str(caught.value)
    made = len(read_lines(folder / "metrics.jsonl")) - 1
    assert kept["step"] == made + 1 == {"reward": 2, "log-prob": 2, "gradient": 2}[kind]
    assert path.name == f"step-{made + 1:06d}-{kept['agent']}.json" and kept["rollouts"]
    for r in kept["rollouts"]:
        assert {"prompt", "text", "prompt_ids", "token_ids", "logps", "reward"} <= r.keys()
        assert r["prompt"] and "NaN" in r["logps"] if kind == "log-prob" else len(r["logps"]) == len(r["token_ids"])
    assert ("advantage" in kept["rollouts"][0]) == (kind == "gradient")
    assert checkpoints(folder)[-1].name == f"step-{made if every == 1 else 0:06d}"
    if kind == "gradient":  # a fault that has gone away: the run ends as if there had been none
        again = hk.resume(folder, steps=2, progress="off")
        assert again.state.step == 2


def test_an_evaluation_of_a_model_without_numbers_is_an_error_and_no_score(fresh_agent, tmp_path):
    agent = fresh_agent("qwen3-sums")
    agent.model.get_input_embeddings().weight.data[:] = float("nan")
    with pytest.raises(FloatingPointError, match="agent 'qwen3-sums': log-probabilities of 6 rollouts are not finite"):
        hk.evaluate(agent, problems("test", 6), progress=False)
    with pytest.raises(FloatingPointError, match=r"faults/step-000000-qwen3-sums\.json"):
        hk.train(
            agent, problems("train", 50), CONFIG, 1, test=problems("test", 6), out=tmp_path / "run", progress="off"
        )


def test_a_fault_that_cannot_be_saved_is_still_told(fresh_agent, tmp_path):
    agent = fresh_agent("qwen3-sums")
    agent.model.get_input_embeddings().weight.data[:] = float("nan")
    with full_disk(3000), pytest.raises(FloatingPointError, match=r"not finite.*could not be saved .*File too large"):
        hk.train(agent, problems("train", 50), CONFIG.replace(n=8), 1, out=tmp_path / "run", progress="off")
    assert not list((tmp_path / "run" / "faults").iterdir())
