"""Agents: prompts and text as tokens, what is loaded and what is refused, what is written."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from jinja2.exceptions import SecurityError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hacpo_kit as hk
from hacpo_kit.models.memory import estimate

PROBLEM = hk.Problem("p", "1+1=", "2")
MESSAGES = [{"role": "user", "content": "1+1="}]
BARE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
WITH_BOS = "{{ bos_token }}" + BARE
THINKING = BARE + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"


@pytest.fixture
def with_bos(tokenizers):
    """A tokenizer with a BOS, which it puts in front of every text unless prefix=""."""

    def make(prefix="<s>", **options):
        return tokenizers.bytes(specials=("<s>", "<end>"), bos_token="<s>", prefix=prefix, **options)

    return make


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("template", [None, BARE, WITH_BOS])
@pytest.mark.parametrize("prompt", ["1+1=", "<s>1+1="])
def test_a_prompt_has_exactly_one_bos_whoever_writes_it(tiny_agent, with_bos, template, prompt):
    agent = tiny_agent(with_bos(chat_template=template))
    ids = agent.encode_prompt(prompt)
    bos = agent.tokenizer.bos_token_id
    assert ids[0] == bos and ids[:2].count(bos) == 1
    shown = prompt if template is None else f"<s>[user]{prompt}[me]"
    assert agent.decode(ids) == "<s>" + shown.removeprefix("<s>")


@pytest.mark.parametrize(
    ("template", "text"), [(None, "1+1="), (BARE, "[user]1+1=[me]"), (WITH_BOS, "<s>[user]1+1=[me]")]
)
def test_a_tokenizer_that_does_not_add_its_bos_gets_one_only_from_the_template(tiny_agent, with_bos, template, text):
    agent = tiny_agent(with_bos(prefix="", chat_template=template))
    assert agent.decode(agent.encode_prompt("1+1=")) == text


def test_the_built_in_agents_begin_as_their_tokenizers_do(qwen, llama):
    assert qwen.decode(qwen.encode_prompt("1+1=")) == "1+1="
    assert llama.decode(llama.encode_prompt("1+1=")) == "<s>1+1="
    assert llama.view(PROBLEM, "2", ended=False)[0] == llama.encode_prompt("1+1=")
    assert llama.decode(llama.view(PROBLEM, "2", ended=False)[1]) == "2"  # no BOS in front of a reply


def test_a_tokenizer_that_closes_every_text_does_not_close_the_prompt(tiny_agent, tokenizers):
    agent = tiny_agent(tokenizers.bytes(suffix="<end>"))
    assert agent.tokenizer("1+1=")["input_ids"][-1] == agent.tokenizer.eos_token_id
    assert agent.decode(agent.encode_prompt("1+1=")) == "1+1="
    assert agent.decode(agent.view(PROBLEM, "2", ended=True)[1]) == "2<end>"
    assert agent.decode(agent.view(PROBLEM, "2", ended=False)[1]) == "2"


@pytest.mark.parametrize("wrap", [lambda ids: ids, lambda ids: {"input_ids": ids}, lambda ids: torch.tensor([ids])])
def test_what_apply_chat_template_returns_does_not_matter(tiny_agent, tokenizers, wrap, monkeypatch):
    agent = tiny_agent(tokenizers.bytes(chat_template=BARE))
    expected = agent.encode_prompt("1+1=")
    apply = agent.tokenizer.apply_chat_template

    def by_version(*args, tokenize=True, **kwargs):
        text = apply(*args, **kwargs, tokenize=False)
        return wrap(agent.tokenizer(text, add_special_tokens=False)["input_ids"]) if tokenize else text

    monkeypatch.setattr(agent.tokenizer, "apply_chat_template", by_version)
    assert agent.encode_prompt("1+1=") == expected
    assert all(type(i) is int for i in expected) and agent.decode(expected) == "[user]1+1=[me]"


def test_text_and_messages_give_one_prompt_and_a_system_message_is_kept(tiny_agent, tokenizers):
    agent = tiny_agent(tokenizers.bytes(chat_template=BARE))
    assert agent.encode_prompt("1+1=") == agent.encode_prompt(MESSAGES)
    longer = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert agent.decode(agent.encode_prompt(longer)) == "[system]Be brief.[user]1+1=[me]"
    assert agent.decode(tiny_agent(agent.tokenizer, prompt_format="plain").encode_prompt("1+1=")) == "1+1="


def test_the_same_thinking_flag_holds_in_rollout_and_in_every_view(tiny_agent, tokenizers, say):
    """enable_thinking=False adds an empty think block: without it the learner would read another prompt."""
    silent = tiny_agent(tokenizers.bytes(chat_template=THINKING), name="silent", template={"enable_thinking": False})
    loud = tiny_agent(tokenizers.bytes(chat_template=THINKING), name="loud", seed=1)
    for agent in (silent, loud):
        say(agent, ["2"])
    pool = hk.rollout([silent, loud], [PROBLEM], n=2, progress=False)
    pool = pool.with_rewards([1.0, 0.0, 1.0, 0.0], ["correct", "wrong"] * 2)
    for agent, block in ((silent, "<think>\n\n</think>\n\n"), (loud, "")):
        batch = hk.advantage(pool, agent, hk.Capability().observe(pool), hk.Config())
        assert {agent.decode(ids) for ids in batch.prompt_ids} == {f"[user]1+1=[me]{block}"}
        assert {r.prompt_ids for r in pool.by_source[agent.name]} == set(batch.prompt_ids)


def test_messages_without_a_template_and_empty_prompts_are_refused(tiny_agent):
    with pytest.raises(ValueError, match="agent 'tiny' has no chat template, but the prompt is a list of messages"):
        tiny_agent().encode_prompt(MESSAGES)
    with pytest.raises(ValueError, match="a prompt of agent 'tiny' has no tokens"):
        tiny_agent().encode_prompt("")


def test_an_agent_needs_an_end_token_and_chat_needs_a_template(tiny_agent, tokenizers):
    with pytest.raises(ValueError, match="prompt_format='chatty': use 'auto', 'chat' or 'plain'"):
        tiny_agent(prompt_format="chatty")
    with pytest.raises(ValueError, match="agent 'tiny' has no chat template: use prompt_format='plain'"):
        tiny_agent(prompt_format="chat")
    with pytest.raises(ValueError, match="agent 'tiny' has no end token"):
        tiny_agent(tokenizers.bytes(eos_token=None))


# ── a peer answer in the agent's tokens ───────────────────────────────────────────────────────────────────────


def test_a_view_is_prompt_and_reply_or_the_reason_why_not(tiny_agent, tokenizers):
    agent = tiny_agent(tokenizers.words(["1+1=", "2", " "]), positions=4)
    one, two, end = agent.tokenizer.convert_tokens_to_ids(["1+1=", "2", "<end>"])
    assert agent.view(PROBLEM, "2", ended=True) == ((one,), (two, end))
    assert agent.view(PROBLEM, "2", ended=False) == ((one,), (two,))
    assert agent.view(PROBLEM, "", ended=True) == ((one,), (end,))
    assert agent.view(PROBLEM, "", ended=False) == "empty"
    assert agent.view(PROBLEM, "2 3", ended=True) == "lossy_reencoding"  # 3 is <unk> here
    assert agent.view(PROBLEM, "<unk>", ended=True) == "control_token"
    assert agent.view(PROBLEM, "2<end>", ended=True) == "control_token"
    assert agent.view(PROBLEM, "2 2", ended=False) == ((one,), (two, two + 1, two))
    assert agent.view(PROBLEM, "2 2", ended=True) == "too_long"


def test_a_merge_at_the_border_of_prompt_and_reply_is_not_made(tiny_agent, tokenizers):
    agent = tiny_agent(tokenizers.bytes(merges=["=2"]))
    prompt, reply = agent.view(PROBLEM, "2", ended=False)
    assert (prompt, agent.decode(reply)) == (agent.encode_prompt("1+1="), "2")


def test_padding_falls_back_to_the_end_token_and_length_to_the_tokenizer(tiny_agent, tokenizers):
    agent = tiny_agent()
    assert agent.tokenizer.pad_token_id is None and agent.pad_id == agent.tokenizer.eos_token_id
    assert tiny_agent(tokenizers.bytes(specials=("<end>", "<pad>"), pad_token="<pad>")).pad_id == 257
    assert tiny_agent(positions=99).max_length == 99


def test_an_agent_says_what_it_is(qwen):
    qwen.updates = 3
    assert re.fullmatch(
        r"Agent\('qwen3-sums': Qwen3ForCausalLM, [\d,]+ parameters, 258 tokens, 3 updates\)", repr(qwen)
    )


# ── the optimiser ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_learning_rate_rises_linearly_and_settings_reach_the_optimiser(tiny_agent):
    agent = tiny_agent()
    config = hk.Config(lr=0.8, warmup=4, beta1=0.5, beta2=0.6, adam_eps=1e-3, weight_decay=0.1)
    rates = []
    agent.updates = 50  # warm-up counts steps, so that more updates a step do not shorten it
    for agent.steps in range(6):
        group = agent.prepare_update(config).param_groups[0]
        rates.append(group["lr"])
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.6), 1e-3, 0.1)
    assert agent.prepare_update(config.replace(warmup=0)).param_groups[0]["lr"] == 0.8


def test_the_reference_of_the_kl_is_a_frozen_copy_and_cannot_come_late(tiny_agent):
    agent = tiny_agent()
    agent.prepare_update(hk.Config(beta=0.1))
    agent.model.lm_head.weight.data += 1.0
    assert not torch.equal(agent.reference.lm_head.weight, agent.model.lm_head.weight)
    assert not any(p.requires_grad for p in agent.reference.parameters())
    late = tiny_agent()
    late.updates = 1
    with pytest.raises(ValueError, match="agent 'tiny' has made 1 updates with beta=0"):
        late.prepare_update(hk.Config(beta=0.1))


# ── saving ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["qwen3-sums", "llama-differences"])
def test_a_saved_folder_is_plain_hugging_face_with_equal_and_tied_weights(fresh_agent, tmp_path, name):
    agent = fresh_agent(name)
    with torch.no_grad():
        for p in agent.model.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    folder = agent.save(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(folder)
    mine, theirs = agent.model.state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    tied = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert tied is (name == "qwen3-sums") is model.config.tie_word_embeddings
    model.get_input_embeddings().weight.data[0, 0] = 123.0
    assert (model.get_output_embeddings().weight[0, 0].item() == 123.0) is tied
    assert not list(folder.glob("*.bin")) and list(folder.glob("*.safetensors"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(r"\boxed{1}")["input_ids"] == agent.tokenizer(r"\boxed{1}")["input_ids"]


def test_a_saved_agent_loads_again_and_answers_alike(qwen, problems, tmp_path):
    again = hk.load_agent(qwen.save(tmp_path / "saved"), name=qwen.name, device="cpu")
    assert again.end_ids == qwen.end_ids
    pools = [hk.rollout(a, problems[:3], n=2, progress=False) for a in (qwen, again)]
    assert [r.token_ids for r in pools[0]] == [r.token_ids for r in pools[1]]


def test_saving_keeps_the_stored_generation_settings_also_those_transformers_would_refuse(tiny_agent, tmp_path):
    first = tiny_agent()
    stored = GenerationConfig(eos_token_id=[256, 9], temperature=0.1, top_k=1, repetition_penalty=5.0)  # no do_sample
    agent = hk.Agent(first.model, first.tokenizer, name="tiny")
    first.model.generation_config = stored
    agent = hk.Agent(first.model, first.tokenizer, name="tiny")
    agent.save(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert {k: written[k] for k in ("eos_token_id", "temperature", "top_k", "repetition_penalty")} == {
        "eos_token_id": [256, 9],
        "temperature": 0.1,
        "top_k": 1,
        "repetition_penalty": 5.0,
    }
    again = hk.load_agent(tmp_path / "saved", device="cpu")
    assert again.end_ids == {256, 9}
    # neither agent samples with them
    assert again.model.generation_config.temperature is agent.model.generation_config.temperature is None


# ── no code and no pickle from a checkpoint ──────────────────────────────────────────────────────────────────────


def test_a_folder_with_pickled_weights_only_is_refused_unread(llama, tmp_path):
    folder = llama.save(tmp_path / "pickled")

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    torch.save({"lm_head.weight": Bomb()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        hk.load_agent(folder, device="cpu")
    assert not (tmp_path / "exploded").exists()


def test_safetensors_win_over_pickled_weights_beside_them(llama, tmp_path):
    folder = llama.save(tmp_path / "both")
    torch.save({k: torch.zeros_like(v) for k, v in llama.model.state_dict().items()}, folder / "pytorch_model.bin")
    loaded = hk.load_agent(folder, device="cpu")
    assert torch.equal(loaded.model.lm_head.weight, llama.model.lm_head.weight)


def test_code_in_a_checkpoint_is_not_run_unless_asked_for(llama, tmp_path, monkeypatch):
    folder = llama.save(tmp_path / "coded")
    flag = tmp_path / "ran"
    (folder / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(flag)!r}).touch()\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OddConfig(LlamaConfig):\n    model_type = 'odd'\n"
        "class OddModel(LlamaForCausalLM):\n    config_class = OddConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "odd",
        "auto_map": {"AutoConfig": "evil.OddConfig", "AutoModelForCausalLM": "evil.OddModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(ValueError, match="trust_remote_code"):
        hk.load_agent(folder, device="cpu")
    assert not flag.exists()
    assert type(hk.load_agent(folder, device="cpu", trust_remote_code=True).model).__name__ == "OddModel"
    assert flag.exists()  # or the first half shows nothing


def test_a_model_s_folder_with_code_beside_a_known_model_runs_none_of_it(llama, tmp_path, monkeypatch):
    """Config, model and tokenizer name code of their own, and files lie where transformers would look for some."""
    folder = llama.save(tmp_path / "coded")
    flag = tmp_path / "ran"
    evil = f"import pathlib\npathlib.Path({str(flag)!r}).touch()\n"
    for name in (
        "evil.py",
        "modeling_llama.py",
        "configuration_llama.py",
        "__init__.py",
        "custom_generate/generate.py",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(evil)
    maps = {
        "config.json": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoModel": "evil.M"},
        "tokenizer_config.json": {"AutoTokenizer": ["evil.T", "evil.T"]},
        "generation_config.json": {"AutoModelForCausalLM": "evil.M"},
    }
    for name, auto_map in maps.items():
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(content | {"auto_map": auto_map}))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks whether to run it"))
    agent = hk.load_agent(folder, device="cpu")
    hk.rollout(agent, hk.load_problems("sums", size=1), n=1, max_new_tokens=2)
    agent.save(tmp_path / "again")
    estimate([folder], device_memory=2**33)
    hk.export_verl(hk.Config(), hk.load_problems("sums", size=40), tmp_path / "verl", agents=[folder], steps=1)
    assert not flag.exists() and not (tmp_path / "modules").exists()
    assert not list((tmp_path / "again").rglob("*.py"))


def test_a_chat_template_reaches_nothing_of_python(llama):
    llama.chat = True
    for way in ("''.__class__.__mro__", "messages.__class__.__init__.__globals__", "cycler.__init__.__globals__.os"):
        llama.tokenizer.chat_template = "{{ " + way + " }}"
        with pytest.raises((SecurityError, ValueError), match="unsafe"):
            llama.encode_prompt("1+1=")


def test_no_code_of_the_project_unpickles_or_trusts_a_folder():
    """The package, its benchmarks, its scripts and its notebooks, by what they call and not by how it is written."""
    root = Path(hk.__file__).parent.parent
    code = {
        p: p.read_text(encoding="utf-8")
        for top in ("hacpo_kit", "benchmarks", "data")
        for p in (root / top).rglob("*.py")
    }
    for path in (root / "notebooks").rglob("[!.]*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code[path] = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    assert len(code) > 50
    # a run and its own workers exchange messages as Ray does, pickled; a file is never read so
    assert not re.search(r"\bopen\(|read_bytes|read_text", code[root / "hacpo_kit" / "models" / "worker.py"])
    found = {p.relative_to(root).as_posix(): faults for p, text in code.items() if (faults := unsafe(text))}
    assert set(found.pop("hacpo_kit/models/worker.py")) <= {"pickle"}
    assert found == {}
    planted = (
        "torch.load(f)", "from torch import load", "import pickle", "import dill as d", "np.load(f, allow_pickle=True)",
        "pd.read_pickle(f)", "f(trust_remote_code=True)", "options = {'trust_remote_code': True}", "eval(x)", "exec(x)",
        "m.from_pretrained(f, **{'trust_remote_code': 1})", "yaml.unsafe_load(f)",
    )  # fmt: skip
    assert all(unsafe(line) for line in planted)


def unsafe(source: str) -> list[str]:
    """What in a source unpickles, runs text as code, or lets a model's folder do so; a name passed on is not yet consent."""
    banned = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "cloudpickle"}
    calls = {
        ("torch", "load"),
        ("pd", "read_pickle"),
        ("pandas", "read_pickle"),
        ("yaml", "unsafe_load"),
        ("yaml", "full_load"),
    }
    consent = {"trust_remote_code", "allow_pickle"}
    found = []
    for node in ast.walk(ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.M))):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.split(".")[0] in banned]
            case ast.ImportFrom(module=module, names=names):
                found += [str(module)] if str(module).split(".")[0] in banned else []
                found += [f"{module}.{n.name}" for n in names if (module, n.name) in calls]
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in calls:
                found.append(f"{owner}.{name}")
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                found.append(name)
            case ast.keyword(arg=name, value=ast.Constant(value=value)) if name in consent and value:
                found.append(name)
            case ast.Dict(keys=keys, values=values):
                pairs = [(k.value, v.value) for k, v in zip(keys, values, strict=True)
                         if isinstance(k, ast.Constant) and isinstance(v, ast.Constant)]  # fmt: skip
                found += [k for k, v in pairs if k in consent and v]
    return found


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_built_in_set_loads_by_name_in_order():
    agents = hk.load_agents("tiny-model-pair", device="cpu")
    assert [a.name for a in agents] == ["qwen3-sums", "llama-differences"]
    assert [a.origin for a in agents] == ["qwen3-sums", "llama-differences"]
    assert all(p.dtype == torch.float32 for a in agents for p in a.model.parameters())
    assert not any(a.model.training for a in agents)


def test_an_unknown_set_is_an_error_that_suggests_one():
    with pytest.raises(ValueError, match="unknown set of agents 'tiny-modle-pair'; did you mean 'tiny-model-pair'"):
        hk.load_agents("tiny-modle-pair")
    with pytest.raises(ValueError, match=r"'qwen3-sums'.*use a list for other agents"):
        hk.load_agents("qwen3-sums")
    with pytest.raises(ValueError, match="no agents to load"):
        hk.load_agents([])


def test_agents_of_one_name_are_numbered_and_never_share_a_name(tiny_agent):
    agents = [tiny_agent(name=n) for n in ("a", "a", "b", "a#2", "a")]
    assert [a.name for a in hk.load_agents(agents)] == ["a", "a#2", "b", "a#2#2", "a#3"]
    twins = hk.load_agents(["qwen3-sums", "qwen3-sums"], device="cpu")
    assert [a.name for a in twins] == ["qwen3-sums", "qwen3-sums#2"] and twins[0].model is not twins[1].model


def test_one_agent_given_twice_is_refused(tiny_agent):
    agent, other = tiny_agent(name="a"), tiny_agent(name="a")
    with pytest.raises(ValueError, match="agent 'a' is listed twice"):
        hk.load_agents([agent, agent])
    with pytest.raises(ValueError, match="agent 'a#2' is listed twice"):
        hk.load_agents([agent, other, other])


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused(llama, tmp_path):
    llama.tokenizer.add_tokens(["<one>", "<two>"])
    folder = llama.save(tmp_path / "grown")
    with pytest.raises(
        ValueError, match=r"tokenizer has 273 tokens, but the model has 271 embeddings.*resize_token_embeddings"
    ):
        hk.load_agent(folder, device="cpu")


def test_a_model_with_more_rows_than_tokens_loads_samples_and_learns(qwen, problems, tmp_path):
    """Padded vocabularies are common; the rows without a token take part in the softmax, on both sides."""
    size = len(qwen.tokenizer)
    with torch.random.fork_rng([]):
        qwen.model.resize_token_embeddings(size + 6, mean_resizing=False)
    agent = hk.load_agent(qwen.save(tmp_path / "padded"), device="cpu")
    assert agent.model.get_input_embeddings().num_embeddings == size + 6 and len(agent.tokenizer) == size
    result = hk.step(agent, problems[:2], hk.Capability(), hk.Config(n=2, max_new_tokens=8, minibatch=4))
    stats = result.stats[agent.name].minibatches[0]
    assert agent.updates == 1 and stats.ratio == pytest.approx(1, abs=2e-5)


def test_a_tokenizer_that_cannot_be_used_is_refused_before_weights_are_read(qwen, llama, tmp_path, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("read the weights"))
    qwen.tokenizer.eos_token = None
    with pytest.raises(
        ValueError, match=r"agent 'endless' has no end token, so no response could end: set tokenizer\.eos_token"
    ):
        hk.load_agent(qwen.save(tmp_path / "endless"), device="cpu")
    llama.tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"agent 'plain' has no chat template: use prompt_format='plain', or set"):
        hk.load_agent(llama.save(tmp_path / "plain"), device="cpu", prompt_format="chat")


def test_half_precision_is_loaded_and_its_softmax_is_not(qwen):
    agent = hk.load_agent("qwen3-sums", dtype="bfloat16", device="cpu", name="half")
    assert agent.model.dtype == torch.bfloat16 and agent.name == "half" and agent.origin == "qwen3-sums"
    assert agent.half_precision and not qwen.half_precision and agent.loading["dtype"] == "bfloat16"
    logps, _ = agent.logprobs([[1, 2]], [[3]])
    assert logps.dtype == torch.float32  # the softmax is not taken in bfloat16


def test_float16_samples_but_does_not_learn():
    agent = hk.load_agent("qwen3-sums", dtype="float16", device="cpu")
    with pytest.raises(ValueError, match=r"'qwen3-sums' computes in float16.*dtype='bfloat16'"):
        agent.prepare_update(hk.Config())


def test_built_in_agents_stay_on_the_cpu_unless_told(monkeypatch):
    """The course gives the same results on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert hk.load_agent("qwen3-sums").device.type == "cpu"


def test_loading_shows_no_progress_bar(capfd):
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    hk.load_agent("qwen3-sums", device="cpu")
    assert "it/s" not in capfd.readouterr().err and logging.is_progress_bar_enabled() == before
