"""The model hub: what is there, known within seconds, also where there is no network."""

from __future__ import annotations

from typing import Any

TIMEOUT = 10.0  # seconds to wait for the hub's answer about a model, before anything is downloaded


def hub_options(model: str, revision: str | None = None) -> dict[str, Any]:
    """Options of `from_pretrained` for a hub id: none, or the copy on this disk where the hub cannot be reached.

    Raises OSError, saying which of these it is: no such model, no such revision, a model that has to be asked for, no
    network and no copy.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        HfApi().model_info(model, revision=revision, timeout=TIMEOUT)
        return {}
    except HFValidationError as error:
        raise OSError(f"{model!r} cannot be a hub id ({str(error).splitlines()[0]})") from None
    except GatedRepoError:
        reason = (
            "its owners want to be asked first: accept its conditions on its page, then log in with `hf auth login`"
        )
    except RevisionNotFoundError:
        reason = f"the model is on the hub, but has no revision {revision!r}"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private: check the name, or log in with `hf auth login`"
    except (
        Exception
    ) as error:  # whatever the client's HTTP library calls it: no route, no answer in time, a broken proxy
        if isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            return {"local_files_only": True}
        how = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"no network: {type(error).__name__}: {error}"
        reason = (
            f"the hub cannot be reached ({how}) and no copy of the model is on this disk; download it where there is a "
            "network (`hf download MODEL --local-dir FOLDER`) and give the folder"
        )
    raise OSError(f"{model!r}: {reason}")
