"""Packed weights between starts: found by content, never trusted blindly, and never in the way of a start."""

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import weakref

import pytest
import tiny_checkpoint
import torch
from native_or_not import has_native_kernels
from safetensors.torch import load_file, save_file

from splittime.kernels.choose import make_backend
from splittime.models.config import load_config
from splittime.models.quant.plan import choose
from splittime.models.weights import cache, fingerprints, keeping, packed_file
from splittime.models.weights.fingerprints import fingerprints as hashes_of
from splittime.models.weights.load import load_decoder
from splittime.models.weights.packed_file import PackedFileBroken, PackedReader, PackedWriter

needs_native = pytest.mark.skipif(not has_native_kernels(), reason="no native kernels")


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    tiny_checkpoint.write(folder)
    return folder


def load(model, folder, quantization="int4", kernels="native"):
    """(all blobs one after the other, what became of the cache), when all is written."""
    plan = choose(quantization, "float32")
    loaded = load_decoder(model, load_config(model), make_backend(kernels, torch.float32), plan, 64, folder)
    keeping.finish()
    blobs = []
    for layer in loaded.decoder.layers:
        mixer, mlp = layer.weights.mixer, layer.weights.feed_forward
        packed = (mixer.qkv, mixer.output, mlp.gate_up, mlp.down)
        blobs += [part.blob for one in packed for part in getattr(one, "parts", [one]) if kernels == "native"]
    blobs += [loaded.decoder.head.blob] if kernels == "native" else []
    return torch.cat(blobs) if blobs else None, loaded.cache_story


def packed_files(folder):
    return sorted(folder.glob("*.packed"))


@needs_native
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_second_start_reads_what_the_first_wrote(model, tmp_path, quantization, monkeypatch):
    first, wrote = load(model, tmp_path / "cache", quantization)
    monkeypatch.setattr("splittime.kernels.native.ops.NativeOps.pack_linear", lambda *_: pytest.fail("packed again"))
    second, read = load(model, tmp_path / "cache", quantization)
    assert torch.equal(first, second)
    (path,) = packed_files(tmp_path / "cache")
    assert wrote.startswith("packed")
    assert read.startswith("mapped")
    assert str(path.parent) in wrote
    assert str(path) in read
    assert not list((tmp_path / "cache").glob(".*.tmp"))


@needs_native
def test_content_decides_not_name_nor_date(model, tmp_path):
    folder = tmp_path / "cache"
    load(model, folder)
    (path,) = packed_files(folder)
    written = (path.stat().st_ino, path.stat().st_mtime_ns)
    shutil.copytree(model, tmp_path / "copy")
    for changed in (lambda: None, lambda: os.utime(tmp_path / "copy" / "model.safetensors")):
        changed()
        first, story = load(tmp_path / "copy", folder)  # which nobody has hashed
        assert story.startswith("packed")
        second, story = load(tmp_path / "copy", folder)
        assert story.startswith("mapped")
        assert torch.equal(first, second)
        assert packed_files(folder) == [path]
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == written
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] += 1
    status = (model / "model.safetensors").stat()
    (model / "model.safetensors").unlink()
    save_file(tensors, model / "model.safetensors")
    os.utime(model / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    changed, story = load(model, folder)
    assert story.startswith("packed")
    assert not torch.equal(changed, load(tmp_path / "copy", folder)[0])
    assert load(model, folder, "int8")[1].startswith("packed")
    assert len(packed_files(folder)) == 3


@needs_native
def test_a_checkpoint_that_changes_after_it_was_packed_is_not_kept(model, tmp_path, caplog, monkeypatch):
    """Its hash would give the weights of before the name of those of after."""
    close = cache.PackedCache.close

    def changed(kept):
        os.utime(model / "model.safetensors")
        close(kept)

    monkeypatch.setattr(cache.PackedCache, "close", changed)
    load(model, tmp_path / "cache")
    assert "has changed since it was opened" in caplog.text
    assert not packed_files(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob(".*.tmp"))


@needs_native
def test_the_weights_are_used_where_the_file_is_mapped(model, tmp_path):
    """Not copied: what the file says later on, they say."""
    load(model, tmp_path / "cache")
    (path,) = packed_files(tmp_path / "cache")
    reader = PackedReader(path, is_known=True)
    (name, (begin, num_bytes, _)) = next(iter(reader._table.items()))
    blob = reader.take(name, num_bytes)
    with path.open("r+b") as file:
        file.seek(begin + 5)
        file.write(bytes([int(blob[5]) ^ 0xFF]))
    assert int(blob[5]) == path.read_bytes()[begin + 5]
    reader.close()
    assert int(blob[6]) == path.read_bytes()[begin + 6]  # what was taken outlives the reader


@needs_native
def test_sums_are_checked_of_a_file_that_is_not_known_and_of_no_other(model, tmp_path, monkeypatch):
    summed = []
    original = packed_file._sum_of
    monkeypatch.setattr(packed_file, "_sum_of", lambda blob: summed.append(len(blob)) or original(blob))
    load(model, tmp_path / "cache")
    assert load(model, tmp_path / "cache")[1].startswith("mapped")
    assert summed == []  # who writes a file knows it
    (path,) = packed_files(tmp_path / "cache")
    os.utime(path)
    assert load(model, tmp_path / "cache")[1].startswith("mapped")
    assert len(summed) == 11
    assert load(model, tmp_path / "cache")[1].startswith("mapped")
    assert len(summed) == 11


@needs_native
def test_a_start_does_not_wait_until_the_weights_are_kept(model, tmp_path, monkeypatch):
    go_on, original = threading.Event(), fingerprints._hash_file
    monkeypatch.setattr(fingerprints, "_hash_file", lambda path: go_on.wait(30) and original(path))
    plan = choose("int8", "float32")
    args = (model, load_config(model), make_backend("native", torch.float32), plan, 64, tmp_path / "cache")
    assert load_decoder(*args).cache_story.startswith("packed")
    assert not packed_files(tmp_path / "cache")
    go_on.set()
    keeping.finish()
    assert len(packed_files(tmp_path / "cache")) == 1


def test_what_gives_up_lets_go_of_the_weights_at_once_and_leaves_no_file(tmp_path):
    go_on, path = threading.Event(), tmp_path / "x.packed"
    blob = torch.zeros(64, dtype=torch.uint8)
    held = weakref.ref(blob)
    started = keeping.Keeping(
        packed_file.PackedWriter(tmp_path), {"a": blob}, lambda: (go_on.wait(30), path)[1], is_replacing=False
    )
    del blob
    keeping.finish(0.0)
    assert held() is None, "while its checkpoint is still being hashed"
    go_on.set()
    started.thread.join(30)
    assert list(tmp_path.iterdir()) == []


ENDS_AT_ONCE = """
import sys, threading, time
from pathlib import Path
import torch
from splittime.kernels.choose import make_backend
from splittime.models.config import load_config
from splittime.models.quant.plan import choose
from splittime.models.weights import fingerprints, keeping
from splittime.models.weights.load import load_decoder

keeping.PATIENCE_S = float(sys.argv[3])
model, original = Path(sys.argv[1]), fingerprints._hash_piece

def slow(descriptor, begin):
    time.sleep(0.3)  # the interpreter is ending by then
    if keeping.PATIENCE_S < 1:
        threading.Event().wait()
    return original(descriptor, begin)

fingerprints._hash_piece = slow
plan = choose("int8", "float32")
load_decoder(model, load_config(model), make_backend("native", torch.float32), plan, 64, Path(sys.argv[2]))
"""


@needs_native
@pytest.mark.parametrize(("patience_s", "num_kept"), [(60, 1), (0.1, 0)])
def test_a_process_that_ends_at_once_keeps_its_weights_if_that_is_soon_done(model, tmp_path, patience_s, num_kept):
    """Of several files, each hashed by threads that are begun while the interpreter ends."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    file_of = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(names)}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in names if file_of[name] == file}, model / file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    command = [sys.executable, "-c", ENDS_AT_ONCE, str(model), str(tmp_path / "cache"), str(patience_s)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(packed_files(tmp_path / "cache")) == num_kept


def test_large_blobs_begin_where_huge_pages_do(tmp_path):
    writer = PackedWriter(tmp_path)
    for name, size in (("small", 100), ("large", 9 << 20), ("next", 5000), ("last", 8 << 20)):
        writer.add(name, torch.full((size,), 7, dtype=torch.uint8))
    writer.finish(tmp_path / "x.packed")
    descriptor = os.open(tmp_path / "x.packed", os.O_RDONLY)
    begins = {name: place[0] for name, place in packed_file._read_table(descriptor).items()}
    os.close(descriptor)
    assert begins["small"] == 0
    assert begins["next"] % packed_file.ALIGNMENT == 0
    assert begins["large"] % (2 << 20) == begins["last"] % (2 << 20) == 0


@needs_native
@pytest.mark.parametrize("damage", ["cut", "empty", "a weight", "the table", "the end"])
def test_a_damaged_file_is_noticed_and_made_again(model, tmp_path, damage, caplog):
    whole, _ = load(model, tmp_path / "cache")
    (path,) = packed_files(tmp_path / "cache")
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "empty":
        content = bytearray()
    else:
        content[{"a weight": 100, "the table": -packed_file.TRAILER.size - 5, "the end": -1}[damage]] ^= 0xFF
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        again, story = load(model, tmp_path / "cache")
    assert "made again" in caplog.text
    assert torch.equal(again, whole)
    assert "packed" in story
    assert "mapped" in load(model, tmp_path / "cache")[1]


@needs_native
def test_a_folder_that_cannot_be_written_costs_a_warning(model, tmp_path, caplog):
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        blobs, story = load(model, in_the_way)
    assert "not kept" in story
    assert "packs again" in caplog.text
    assert torch.equal(blobs, load(model, None)[0])


@needs_native
def test_a_full_disk_costs_a_warning_and_leaves_nothing(model, tmp_path, caplog, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PackedWriter, "add", fail)
    with caplog.at_level(logging.WARNING):
        _, story = load(model, tmp_path / "cache")
    assert "background" in story
    assert "No space left" in caplog.text
    assert not packed_files(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob(".*.packed.*"))


@needs_native
def test_a_disk_without_the_room_is_not_filled_up_first(model, tmp_path, caplog, monkeypatch):
    full = os.statvfs_result((4096, 4096, 1000, 2, 2, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda _: full)
    monkeypatch.setattr(PackedWriter, "add", lambda *_: pytest.fail("written to"))
    with caplog.at_level(logging.WARNING):
        load(model, tmp_path / "cache")
    assert "bytes are needed and 8192 are free" in caplog.text
    assert not list((tmp_path / "cache").glob(".*.packed.*"))


def test_a_file_that_is_taken_for_one_left_behind_before_it_is_locked_is_begun_again(tmp_path, monkeypatch):
    lock, others = packed_file.fcntl.flock, [1]

    def meddled(file, how):
        if others and not how & packed_file.fcntl.LOCK_NB:
            others.pop()
            packed_file._remove_stale(tmp_path)
        lock(file, how)

    monkeypatch.setattr(packed_file.fcntl, "flock", meddled)
    writer = PackedWriter(tmp_path)
    writer.add("a", torch.zeros(100, dtype=torch.uint8))
    writer.finish(tmp_path / "x.packed")
    assert [path.name for path in tmp_path.iterdir()] == ["x.packed"]


def test_a_file_system_without_locks_is_left_as_it_was(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(packed_file.fcntl, "flock", fail)
    with pytest.raises(OSError, match="No locks"):
        PackedWriter(tmp_path)
    assert not list(tmp_path.iterdir())


@needs_native
def test_a_load_that_fails_leaves_no_file(model, tmp_path):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(Exception, match=r"model\.norm\.weight"):
        load(model, tmp_path / "cache")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["README"]


@needs_native
def test_several_at_once_do_not_meet(model, tmp_path):
    results = []
    threads = [threading.Thread(target=lambda: results.append(load(model, tmp_path / "cache"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(blobs, results[0][0]) for blobs, _ in results)
    assert "mapped" in load(model, tmp_path / "cache")[1]
    assert len(packed_files(tmp_path / "cache")) == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"quantization": None}, "not for float32"),
        ({"kernels": "torch"}, "not with torch kernels"),
        ({"kernels": "reference"}, "not with reference kernels"),
    ],
)
def test_why_there_is_no_cache_is_told(model, tmp_path, settings, told):
    settings = {"kernels": "torch", **settings}
    assert told in load(model, tmp_path / "cache", **settings)[1]
    assert not (tmp_path / "cache").exists()


def test_fingerprints_are_remembered_and_follow_the_content(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprints, "PIECE_BYTES", 1000)
    monkeypatch.setattr(fingerprints, "READ_BYTES", 300)
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(bytes(range(256)) * 20)
    two.write_bytes(b"")
    first = hashes_of([one, two], tmp_path / "memory")
    assert first[0] != first[1]
    read = []
    original = fingerprints._hash_file
    monkeypatch.setattr(fingerprints, "_hash_file", lambda path: read.append(path.name) or original(path))
    assert hashes_of([one, two], tmp_path / "memory") == first
    assert read == []
    one.write_bytes(bytes(range(256)) * 19 + bytes(256))
    assert hashes_of([one, two], tmp_path / "memory")[0] != first[0]
    assert read == ["one"]
    for spoiled in ("{", "[]", json.dumps({str(two): ["nonsense"]})):
        (tmp_path / "memory" / fingerprints.MEMORY_NAME).write_text(spoiled)
        assert hashes_of([two], tmp_path / "memory") == [first[1]]


def test_a_packed_file_gives_back_what_was_put_in(tmp_path):
    writer = PackedWriter(tmp_path)
    blobs = {f"b{size}": torch.arange(size).to(torch.uint8) for size in (1, 4096, 100_000, 0)}
    for name, blob in blobs.items():
        writer.add(name, blob)
    assert not (tmp_path / "x.packed").exists()
    writer.finish(tmp_path / "x.packed")
    if not has_native_kernels():
        pytest.skip("no native memory to read into")
    reader = PackedReader(tmp_path / "x.packed")
    assert all(torch.equal(reader.take(name, len(blob)), blob) for name, blob in blobs.items())
    with pytest.raises(PackedFileBroken, match="no b1 "):
        reader.take("b1", 1)
    with pytest.raises(PackedFileBroken):
        reader.take("other", 1)
    reader.close()


def test_what_a_dead_process_left_is_removed(tmp_path):
    left = tmp_path / ".a.packed.1.tmp"
    left.write_bytes(b"x")
    alive = PackedWriter(tmp_path)
    PackedWriter(tmp_path).abandon()
    assert [path.name for path in tmp_path.iterdir()] == [alive._waiting.name]
    alive.abandon()
    alive.abandon()  # twice does no harm
    assert not list(tmp_path.iterdir())


@needs_native
@pytest.mark.parametrize("trouble", ["folder deleted", "a folder has its name"])
def test_what_happens_to_the_folder_meanwhile_costs_a_warning(model, tmp_path, trouble, caplog, monkeypatch):
    folder, finish = tmp_path / "cache", PackedWriter.finish

    def disturbed(writer, path):
        if trouble == "folder deleted":
            shutil.rmtree(folder)
        else:
            path.mkdir()
        finish(writer, path)

    monkeypatch.setattr(PackedWriter, "finish", disturbed)
    blobs, _ = load(model, folder)
    assert blobs is not None
    assert "not kept" in caplog.text
    assert not list(tmp_path.rglob("*.tmp"))


@needs_native
def test_restored_times_do_not_hide_another_content(model, tmp_path):
    """As `rsync --inplace --times` leaves a file: same size, time, inode."""
    path = model / "model.safetensors"
    before, _ = load(model, tmp_path / "cache")
    status, content = path.stat(), bytearray(path.read_bytes())
    content[-400:] = bytes(400)
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after, story = load(model, tmp_path / "cache")
    assert "packed" in story
    assert not torch.equal(before, after)


@needs_native
def test_a_tied_head_and_one_of_its_own_are_not_confused(model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    own, _ = load(model, tmp_path / "cache")
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tied, _ = load(model, tmp_path / "cache")
    assert not torch.equal(own, tied)


def test_the_folder_says_what_it_is():
    assert "may be deleted" in cache.NOTE
