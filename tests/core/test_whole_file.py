"""What is written is whole or not there; what could not be written is refused before, and a run is never lost."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from splittime.core.errors import ConfigError
from splittime.core.files import check_writable, write_whole

IS_ROOT = os.geteuid() == 0


def test_written_whole_into_new_folders_and_through_links(tmp_path):
    write_whole(tmp_path / "new" / "a", b"one")
    (tmp_path / "link").symlink_to(tmp_path / "new" / "a")
    write_whole(tmp_path / "link", b"two")
    assert (tmp_path / "new" / "a").read_bytes() == b"two"
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a"]


def test_a_check_leaves_nothing_and_changes_nothing(tmp_path):
    (tmp_path / "there").write_text("kept")
    for name in ("there", "new"):
        check_writable(tmp_path / name)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"there": "kept"}


@pytest.mark.parametrize(
    "place", ["/dev/null", "/dev/full", "/dev/fd/0", ".", "pipe", "file/below", "x" * 300, "/proc/x"]
)
def test_what_is_no_file_is_refused_before_and_left_as_it_is(place, tmp_path):
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    for refuses in (check_writable, lambda path: write_whole(path, b"data")):
        with pytest.raises(ConfigError, match="cannot write") as refused:
            refuses(tmp_path / place)
        assert refused.value.info.value == str(tmp_path / place)
    assert (tmp_path / "file").read_text() == "kept"
    assert Path("/dev/null").is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


def test_a_ledger_is_never_replaced(tmp_path):
    path = tmp_path / "today.sqlite"
    path.write_bytes(b"SQLite format 3\0 and more")
    for refuses in (check_writable, lambda path: write_whole(path, b"data")):
        with pytest.raises(ConfigError, match="a ledger is there"):
            refuses(path)
    check_writable(path, replaces=False)
    assert path.read_bytes() == b"SQLite format 3\0 and more"


@pytest.mark.skipif(IS_ROOT, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path):
    (tmp_path / "file").write_text("kept")
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission"):
        check_writable(tmp_path / "file")


FULL = """
import resource, sys
from pathlib import Path
from splittime.core.errors import ConfigError
from splittime.core.files import write_whole
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_whole(Path(sys.argv[1]), b"x" * int(sys.argv[2]), keeps=True)
except ConfigError as error:
    print(error.info.message, error.info.hint)
"""


def test_a_full_disk_leaves_what_was_there_and_is_told(tmp_path):
    """A limit on the size of files stands for the disk."""
    (tmp_path / "a").write_text("before")
    said = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path / "a", "5000"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "File too large" in said
    assert "Nor could it be kept" in said
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "before")]


def test_what_cannot_be_made_again_is_kept_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError) as refused:
        write_whole(tmp_path / "file" / "run.json", b"hours", keeps=True)
    assert "Nothing is lost" in refused.value.info.hint
    (kept,) = (tmp_path / "elsewhere").iterdir()
    assert kept.read_bytes() == b"hours"
    assert str(kept) in refused.value.info.hint
