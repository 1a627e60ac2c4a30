"""Files that are complete or absent, lines that survive a stop, locks."""

import contextlib

import pytest
from trained import full_disk

from hacpo_kit.common.files import append_lines, locked, read_lines, read_steps, replacing


def test_append_lines_names_the_file_if_the_disk_is_full_and_complete_lines_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_lines(path, [{"step": 0, "text": "x" * 50}])
    with full_disk(path.stat().st_size + 20), pytest.raises(OSError, match=r"metrics\.jsonl"):
        append_lines(path, [{"step": 1, "text": "y" * 50}])
    assert [row["step"] for row in read_lines(path)] == [0]


@pytest.mark.parametrize("line", ["5", "null", '{"a": 1}', '{"step": NaN}', '{"step": "x"}', "no JSON"])
def test_read_steps_names_the_file_of_a_bad_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        read_steps(path)


def test_read_lines_ignores_a_last_line_that_was_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1')
    assert read_lines(path) == [{"step": 0}] and read_lines(tmp_path / "none") == []


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_replacing_keeps_the_old_content_if_the_block_fails(tmp_path, kind):
    path = tmp_path / "kept"

    def write(temporary, text):
        if kind == "folder":
            temporary.mkdir()
        (temporary / "a" if kind == "folder" else temporary).write_text(text)

    def content():
        return (path / "a" if kind == "folder" else path).read_text()

    for text in ("old", "new"):
        with replacing(path) as temporary:
            write(temporary, text)
        assert content() == text
    with contextlib.suppress(KeyboardInterrupt), replacing(path) as temporary:
        write(temporary, "half")
        raise KeyboardInterrupt
    assert content() == "new" and list(tmp_path.iterdir()) == [path]


def test_locked_refuses_a_second_holder_and_is_free_afterwards(tmp_path):
    for _ in range(2):
        with (
            locked(tmp_path / "run" / ".lock", what="run x"),
            pytest.raises(ValueError, match=r"another process .* run x"),
            locked(tmp_path / "run" / ".lock", what="run x"),
        ):
            pass
