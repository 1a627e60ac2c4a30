"""Rows of problems from files, tables in memory and the Hugging Face hub, each with its place for error messages."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Row = tuple[str, Any]  # place and content


def open_rows(source: Any, split: str | None, config: str | None, revision: str | None) -> tuple[str, Iterable[Row]]:
    """Return the name of a source and its rows; the parameters are those of `load_problems`.

    Raises ValueError for an unknown source or split, TypeError for a source of another type, FileNotFoundError, and OSError
    if a hub dataset cannot be loaded.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.suffix.lower() in FILE_READERS:
            refuse(f"the file {path}", split=split, config=config, revision=revision)
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {path} in {Path.cwd()}")
            return path.stem, FILE_READERS[path.suffix.lower()](path)
        name, table = str(source), _load_from_hub(str(source), split, config, revision)
    else:
        name, table = type(source).__name__, _checked_table(source)
        refuse(f"a {name}", split=split, config=config, revision=revision)
    return name, ((f"{name}, row {number}", row) for number, row in enumerate(table, start=1))


def refuse(source: str, **options: Any) -> None:
    """Raise ValueError if one of the options is not None."""
    if names := [f"{name}=" for name, value in options.items() if value is not None]:
        raise ValueError(f"{source} does not take {', '.join(names)}")


def _checked_table(table: Any) -> Iterable[Any]:
    if isinstance(table, Mapping) or not hasattr(table, "__len__"):
        raise TypeError(
            f"cannot load problems from {type(table).__name__}; give a path, a Hugging Face id, a list of dicts or of Problem, "
            "a pandas DataFrame, or one split of a dataset"
        )
    if not hasattr(table, "iterrows"):  # a list, or a datasets.Dataset, which is a sequence of dicts
        return table
    if not table.columns.is_unique:
        raise ValueError(f"the DataFrame has columns of the same name: {list(table.columns)}")
    return table.to_dict("records")


def _load_from_hub(id: str, split: str | None, config: str | None, revision: str | None) -> Iterable[Any]:
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", id) or Path(id).exists():
        raise ValueError(
            f"cannot load {id!r}: give the name of a generated set or a benchmark, a file ({', '.join(FILE_READERS)}), a hub id "
            "'owner/name', or a table in memory"
        )
    import datasets

    try:
        dataset = datasets.load_dataset(id, config, split=split, revision=revision)
    except Exception as error:  # network, credentials, name, split and format all raise different types
        raise OSError(
            f"could not load the Hugging Face dataset {id!r} (config={config!r}, split={split!r}, revision={revision!r}): "
            f"{type(error).__name__}: {error}. Without network, download it elsewhere, store it with to_json or to_parquet, "
            "and give that path"
        ) from error
    if isinstance(dataset, Mapping):
        raise ValueError(f"{id} needs split=; it has {', '.join(map(repr, dataset))}")
    return dataset


def _parse(text: bytes, place: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:  # bytes that are not UTF-8 raise a ValueError too
        raise ValueError(f"{place}: not valid JSON in UTF-8 ({error})") from None


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; json itself would keep only the last of several values with the same name."""
    names = [name for name, _ in pairs]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"the name {min(repeated)!r} occurs more than once in an object")
    return dict(pairs)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:  # lines end at line feeds only: JSON strings may contain U+2028
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}, line {number}", _parse(line, f"{path}, line {number}")


def _read_json(path: Path) -> Iterator[Row]:
    rows = _parse(path.read_bytes(), f"{path} (a list of objects; one object per line belongs in a .jsonl file)")
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of objects, found {type(rows).__name__}")
    yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        reader = csv.reader((line.decode("utf-8-sig") for line in file), strict=True)
        try:
            rows = filter(None, reader)  # without blank lines
            columns = next(rows, [])
            if len(set(columns)) < len(columns):
                raise csv.Error(f"columns of the same name: {columns}")
            for cells in rows:
                if len(cells) != len(columns):
                    raise csv.Error(f"{len(cells)} cells for {len(columns)} columns")
                yield f"{path}, line {reader.line_num}", dict(zip(columns, cells, strict=True))
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {reader.line_num + 1}: not valid UTF-8: {error}") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            # Arrow's Python values, not pandas': a column of integers with gaps stays a column of integers
            rows = (row for part in file.iter_batches(batch_size=1_000) for row in part.to_pylist())
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))
    except ValueError as error:
        raise ValueError(f"{path}: not readable as Parquet ({error})") from None


FILE_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".csv": _read_csv}
