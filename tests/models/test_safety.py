"""No code and no pickle of a checkpoint runs."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from jinja2.exceptions import SecurityError

import hacpo_kit as hk
from hacpo_kit.models.memory import estimate


def test_load_agent_refuses_pickled_weights_unread(llama, tmp_path):
    folder = llama.save(tmp_path / "pickled")

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    torch.save({"lm_head.weight": Bomb()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        hk.load_agent(folder, device="cpu")
    assert not (tmp_path / "exploded").exists()


def test_load_agent_prefers_safetensors_to_pickled_weights(llama, tmp_path):
    folder = llama.save(tmp_path / "both")
    torch.save({k: torch.zeros_like(v) for k, v in llama.model.state_dict().items()}, folder / "pytorch_model.bin")
    loaded = hk.load_agent(folder, device="cpu")
    assert torch.equal(loaded.model.lm_head.weight, llama.model.lm_head.weight)


def test_load_agent_runs_code_of_a_checkpoint_only_with_trust_remote_code(llama, tmp_path, monkeypatch):
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


def test_load_agent_runs_no_code_beside_a_known_model(llama, tmp_path, monkeypatch):
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


def test_encode_prompt_runs_templates_in_a_sandbox(llama):
    llama.chat = True
    for way in ("''.__class__.__mro__", "messages.__class__.__init__.__globals__", "cycler.__init__.__globals__.os"):
        llama.tokenizer.chat_template = "{{ " + way + " }}"
        with pytest.raises((SecurityError, ValueError), match="unsafe"):
            llama.encode_prompt("1+1=")


def test_project_never_unpickles_files_or_trusts_a_folder():
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
