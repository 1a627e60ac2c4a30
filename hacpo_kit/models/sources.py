"""Where models come from: built-in agents, local folders and the Hugging Face hub."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hacpo_kit.config import did_you_mean

HUB_TIMEOUT = 10.0  # seconds


def data_folder() -> Path:
    """Return the folder with the built-in agents: HACPO_KIT_DATA, or `data/` next to the package."""
    return Path(os.environ.get("HACPO_KIT_DATA") or Path(__file__).resolve().parents[2] / "data")


def built_in_sets() -> dict[str, dict[str, Any]]:
    """Return the built-in sets of agents: name → kind and members.

    Raises FileNotFoundError if the package was installed without its data folder.
    """
    path = data_folder() / "agents" / "sets.json"
    if not path.exists():
        raise FileNotFoundError(
            f"no built-in agents at {path}; work in a clone, or set HACPO_KIT_DATA to its data folder"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def built_in_names() -> list[str]:
    """Return the names of the built-in agents, then those of the built-in sets."""
    names = sorted(p.parent.name for p in (data_folder() / "agents").glob("*/config.json"))
    return [*names, *built_in_sets()] if names else []


def is_built_in(source: str | Path) -> bool:
    """Return whether `source` names a built-in agent."""
    return isinstance(source, str) and bool(source) and (data_folder() / "agents" / source / "config.json").exists()


def locate(source: str | Path) -> tuple[str, bool]:
    """Return the path or hub id to load from, and whether it is a local folder.

    Raises FileNotFoundError for a folder without a model, ValueError for the name of a set or a misspelt built-in name.
    """
    if is_built_in(source):
        return str(data_folder() / "agents" / source), True
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise FileNotFoundError(
                f"{path} holds no model: config.json is missing. If it holds adapters, merge them into their base model "
                "and save that"
            )
        return str(path), True
    if source in (names := built_in_names()):
        raise ValueError(f"{source!r} is a set of agents: use load_agents({source!r})")
    if isinstance(source, Path) or source.startswith((".", "/", "~")):
        raise FileNotFoundError(f"folder {source} does not exist")
    if "/" not in source and (suggestion := did_you_mean(source, names)):
        raise ValueError(f"unknown agent {source!r}{suggestion}; hub models are named owner/name")
    return source, False


def source_options(source: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return the options of `from_pretrained` for this source; for a hub id that the hub does not serve, the local copy.

    Raises OSError if there is neither, within `HUB_TIMEOUT` and before anything is downloaded.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options |= {} if revision is None else {"revision": revision}
    model, is_local = locate(source)
    if is_local:
        return options
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        HfApi().model_info(model, revision=revision, timeout=HUB_TIMEOUT)
        return options
    except ValueError as error:  # not a repository's name
        reason = error
    except Exception as error:  # also of the HTTP library: not found, gated, no such revision, no network
        if isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            return {**options, "local_files_only": True}
        reason = error
    raise OSError(
        f"cannot load {model!r} from the hub, and there is no local copy ({' '.join(str(reason).split())}). It is neither a "
        f"folder nor a built-in agent or set ({', '.join(built_in_names())}). Without a network, download it elsewhere with "
        "`hf download MODEL --local-dir FOLDER` and load the folder"
    ) from reason


def read_config(source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False):
    """Return the transformers config of a built-in agent, a folder or a hub id, without reading its weights."""
    from transformers import AutoConfig

    options = source_options(source, revision, trust_remote_code)
    return AutoConfig.from_pretrained(locate(source)[0], **options)


def unique_names(names: Iterable[str]) -> list[str]:
    """Return the names, of which equal ones are numbered.

    >>> unique_names(["a", "a", "b", "a"])
    ['a', 'a#2', 'b', 'a#3']
    """
    unique: dict[str, None] = {}
    for name in names:
        candidates = itertools.chain([name], (f"{name}#{count}" for count in itertools.count(2)))
        unique[next(c for c in candidates if c not in unique)] = None
    return list(unique)


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers, which would be stored in every notebook."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
