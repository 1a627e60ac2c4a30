"""Hub ids that cannot be had: each reason has its own words, and comes within seconds."""

import pytest
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError

import hacpo_kit as hk
from hacpo_kit.models import hub


class Answer:
    """Of an HTTP client, whatever its library."""

    headers, status_code, request, url = {}, 404, None, "hub"


@pytest.fixture
def hub_says(monkeypatch):
    def say(error):
        def model_info(self, model, *, revision, timeout):
            assert timeout <= 10
            raise error

        monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
        offline = isinstance(error, OfflineModeIsEnabled)  # the tests' own environment is
        monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: offline)

    return say


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RepositoryNotFoundError("404", response=Answer()), "the hub has no such model, or it is private"),
        (GatedRepoError("403", response=Answer()), "its owners want to be asked first"),
        (RevisionNotFoundError("404", response=Answer()), "the model is on the hub, but has no revision 'v2'"),
        (TimeoutError("timed out"), r"the hub cannot be reached \(no network: TimeoutError: timed out\) and no copy"),
        (OfflineModeIsEnabled("offline"), r"the hub cannot be reached \(HF_HUB_OFFLINE is set\)"),
    ],
)
def test_every_reason_has_its_own_words(hub_says, error, said):
    hub_says(error)
    with pytest.raises(OSError, match=f"cannot load 'some-org/some-model': {said}"):
        hk.load_agent("some-org/some-model", revision="v2")


def test_a_copy_on_the_disk_is_used_where_there_is_no_network(hub_says, monkeypatch):
    hub_says(TimeoutError())
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: "cache/config.json")
    assert hub.hub_options("some-org/some-model") == {"local_files_only": True}


def test_what_cannot_be_a_hub_id_is_said(monkeypatch):
    with pytest.raises(OSError, match="'my models/a/b' cannot be a hub id"):
        hk.load_agent("my models/a/b")


def test_a_name_close_to_a_built_in_one_asks_no_network(hub_says):
    hub_says(AssertionError("asked the hub"))
    with pytest.raises(ValueError, match="unknown agent 'qwen3-sum'; did you mean 'qwen3-sums'"):
        hk.load_agent("qwen3-sum")
