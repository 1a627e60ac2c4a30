"""Where models come from: built-in names, folders, the hub, and the errors for each."""

import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError

import hacpo_kit as hk
from hacpo_kit.models.sources import data_folder, source_options


class Response:
    """What the hub's exceptions need of an HTTP response."""

    headers, status_code, request, url = {}, 404, None, "hub"


@pytest.fixture
def hub_raises(monkeypatch):
    """hub_raises(error): every request to the hub raises this error."""

    def patch(error):
        def model_info(self, model, *, revision, timeout):
            assert timeout <= 10
            raise error

        monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)

    return patch


@pytest.mark.parametrize(
    "error",
    [
        RepositoryNotFoundError("no such repository", response=Response()),
        GatedRepoError("access is restricted", response=Response()),
        RevisionNotFoundError("no such revision", response=Response()),
        TimeoutError("timed out"),
        OfflineModeIsEnabled("HF_HUB_OFFLINE is set"),
    ],
)
def test_load_agent_names_the_hub_s_reason_and_the_remedy(hub_raises, error):
    hub_raises(error)
    with pytest.raises(
        OSError, match=f"'some-org/some-model' from the hub.*{error}.*qwen3-sums.*tiny-trio.*hf download"
    ):
        hk.load_agent("some-org/some-model", revision="v2")


def test_load_agent_refuses_an_impossible_hub_id():
    with pytest.raises(OSError, match=r"'my models/a/b' from the hub.*Repo id must be"):
        hk.load_agent("my models/a/b")


def test_source_options_choose_the_local_copy_without_a_network(hub_raises, monkeypatch):
    hub_raises(TimeoutError())
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: "cache/config.json")
    assert source_options("some-org/some-model")["local_files_only"] is True


def test_locate_suggests_a_built_in_name_without_asking_the_hub(hub_raises):
    hub_raises(AssertionError("requested the hub"))
    with pytest.raises(ValueError, match="unknown agent 'qwen3-sum'; did you mean 'qwen3-sums'"):
        hk.load_agent("qwen3-sum")
    with pytest.raises(ValueError, match=r"use load_agents\('tiny-trio'\)"):
        hk.load_agent("tiny-trio")


def test_locate_names_folders_without_a_model(tmp_path):
    for missing in (tmp_path / "none", "./none", "~/none-of-that-name"):
        with pytest.raises(FileNotFoundError, match=f"folder {re.escape(str(missing))} does not exist"):
            hk.load_agent(missing)
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        hk.load_agent(tmp_path)


def test_data_folder_is_the_one_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HACPO_KIT_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="HACPO_KIT_DATA"):
        hk.load_agents("tiny-model-pair")
    original = Path(hk.__file__).parent.parent / "data" / "agents" / "qwen3-sums"
    shutil.copytree(original, data_folder() / "agents" / "mine")
    assert hk.load_agent("mine", device="cpu").name == "mine"
