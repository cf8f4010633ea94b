"""The container: what llama.cpp's own writer writes is read back, and no file whatever does worse than be refused."""

import re
import struct
from contextlib import suppress

import numpy as np
import pytest
from gguf_bytes import content, key, tensor, text, u32, u64
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.core.errors import ConfigError
from splittime.models.gguf.file import GgufFile, GgufModel


def read(tmp_path, raw: bytes) -> GgufFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return GgufFile(path)


GOOD = content(
    (
        key("general.architecture", 8, text("llama")),
        key("a.number", 4, u32(7)),
        key("a.flag", 7, b"\x01"),
        key("a.list", 9, u32(5) + u64(3) + struct.pack("<3i", 1, -2, 3)),
        key("a.texts", 9, u32(8) + u64(2) + text("one") + text("zwei")),
        key("a.lists", 9, u32(9) + u64(2) + (u32(0) + u64(2) + b"\x05\x06") + (u32(8) + u64(1) + text("x"))),
    ),
    (tensor("w"), tensor("v", (8,), 0, 32)),
    np.arange(16, dtype="<f4").tobytes(),
)


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_is_read(tmp_path, version):
    file = read(tmp_path, GOOD[:4] + u32(version) + GOOD[8:])
    assert (file.version, file.alignment) == (version, 32)
    assert file.metadata["general.architecture"] == "llama"
    assert (file.metadata["a.number"], file.metadata["a.flag"]) == (7, True)
    assert file.metadata["a.list"].tolist() == [1, -2, 3]
    assert file.metadata["a.texts"] == ["one", "zwei"]
    assert [list(each) for each in file.metadata["a.lists"]] == [[5, 6], ["x"]]
    assert file.tensors["w"].shape == (2, 4)
    assert file.bytes_of("v").view("<f4").tolist() == [8, 9, 10, 11, 12, 13, 14, 15]


def test_what_the_gguf_package_writes_is_read(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    written = {}
    for kind, value in {"uint8": 250, "int8": -3, "uint16": 60000, "int16": -30000, "int32": -7, "bool": True}.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
        written[f"x.{kind}"] = value
    for kind, value in {"uint64": 1 << 60, "int64": -(1 << 60), "float32": 0.5, "float64": 1e300}.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
        written[f"x.{kind}"] = value
    writer.add_array("x.words", ["a", "ünï", ""])
    tensors = {"a.weight": np.ones((3, 64), np.float32), "b.weight": np.arange(5, dtype=np.float16)}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    assert {name: file.metadata[name] for name in written} == written
    assert (file.metadata["x.words"], file.alignment) == (["a", "ünï", ""], 64)
    for name, values in tensors.items():
        assert file.tensors[name].shape == values.shape
        assert file.bytes_of(name).tobytes() == values.tobytes()


HUGE = 1 << 60
HOSTILE = {
    "magic": (b"GGML" + GOOD[4:], "magic is b'GGML'"),
    "no magic": (b"GG", "magic needs 4 bytes"),
    "version 1": (content(version=1), "version is 1; 2 and 3 are read"),
    "big endian": (content(version=3 << 24), "version is written in big-endian order"),
    "tensors": (content(num_tensors=HUGE), f"tensor_count is {HUGE}, of which the rest of the file holds"),
    "keys": (content(num_keys=HUGE), f"metadata_kv_count is {HUGE}"),
    "long key": (content((u64(HUGE),)), f"metadata key 0 needs {HUGE} bytes"),
    "long text": (content((key("a", 8, u64(HUGE)),)), f"metadata 'a' needs {HUGE} bytes"),
    "overflowing text": (content((key("a", 8, u64(2**64 - 1)),)), "metadata 'a' needs"),
    "long list": (content((key("a", 9, u32(4) + u64(HUGE)),)), f"'a': count is {HUGE}"),
    "long texts": (content((key("a", 9, u32(8) + u64(HUGE)),)), f"'a': count is {HUGE}"),
    "text in list": (content((key("a", 9, u32(8) + u64(2) + text("b") + u64(HUGE)),)), "'a': text 1 leaves the file"),
    "nested": (content((key("a", 9, (u32(9) + u64(1)) * 6),)), "nested more than 4 deep"),
    "unknown type": (content((key("a", 13, b""),)), "'a' is of type 13; types are 0 to 12"),
    "unknown element": (content((key("a", 9, u32(99) + u64(0)),)), "'a' is of type 99"),
    "no truth": (content((key("a", 7, b"\x02"),)), "'a' is 2, which is no truth value"),
    "no truths": (content((key("a", 9, u32(7) + u64(2) + b"\x01\x02"),)), "'a' has elements that are no truth values"),
    "no UTF-8": (content((key("a", 8, u64(1) + b"\xff"),)), "'a' is not UTF-8"),
    "no UTF-8 texts": (content((key("a", 9, u32(8) + u64(1) + u64(1) + b"\xff"),)), "a text that is not UTF-8"),
    "key twice": (content((key("a", 0, b"1"), key("a", 0, b"2"))), "metadata key 'a' comes twice"),
    "alignment": (content((key("general.alignment", 4, u32(24)),)), "general.alignment is 24, must be a power of two"),
    "alignment 1": (content((key("general.alignment", 4, u32(1)),)), "from 8 to"),
    "alignment text": (content((key("general.alignment", 8, text("32")),)), "general.alignment is '32'"),
    "tensor twice": (content((), (tensor("w"), tensor("w"))), "tensor 'w' comes twice"),
    "no dimensions": (content((), (tensor("w", ()),)), "n_dims is 0, must be 1 to 4"),
    "dimensions": (content((), (tensor("w", (1, 1, 1, 1, 1)),)), "n_dims is 5"),
    "zero": (content((), (tensor("w", (4, 0)),)), r"dimensions are \[4, 0\], must be positive"),
    "product": (content((), (tensor("w", (HUGE, HUGE)),)), "dimensions are"),
    "large": (content((), (tensor("w", (1 << 30, 1 << 60)),)), "the file ends at"),
    "half block": (content((), (tensor("w", (40,), 8),)), "the first a multiple of 32 for Q8_0"),
    "type": (
        content((), (tensor("w", (256,), 10),)),
        "type is Q2_K, which is not served; these are: BF16, F16, F32, MXFP4, Q4",
    ),
    "new type": (content((), (tensor("w", (256,), 77),)), "type is 77, which is not served"),
    "offset": (content((), (tensor("w", (4, 2), 0, 1 << 63),)), "offset puts its 32 bytes at byte"),
    "end": (content((), (tensor("w", (4, 2), 0, 64),)), "the file ends at"),
    "unaligned": (content((), (tensor("w", (4, 2), 0, 4),)), "is no multiple of general.alignment, 32"),
    "overlap": (content((), (tensor("w"), tensor("v", (2,)))), "offset lies within tensor"),
    "no data": (content((), (tensor("w"),), b""), "the file ends at"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_the_field_s_name(tmp_path, name):
    raw, said = HOSTILE[name]
    with pytest.raises(ConfigError, match=said) as refused:
        read(tmp_path, raw)
    assert "model.gguf" in str(refused.value)


def test_an_empty_or_absent_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is empty"):
        read(tmp_path, b"")
    with pytest.raises(ConfigError, match="cannot read"):
        GgufFile(tmp_path / "none.gguf")


@pytest.mark.parametrize("length", range(0, len(GOOD), 7))
def test_a_file_cut_short_is_refused(tmp_path, length):
    with pytest.raises(ConfigError):
        read(tmp_path, GOOD[:length])


@given(
    st.lists(
        st.tuples(
            st.integers(0, len(GOOD) - 8), st.sampled_from([0, 1, 9, 0xFF, HUGE, 2**63, 2**64 - 1]), st.booleans()
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=250, deadline=None)
def test_any_other_bytes_are_read_or_refused(tmp_path_factory, changes):
    raw = bytearray(GOOD)
    for place, value, is_long in changes:
        raw[place : place + (8 if is_long else 1)] = u64(value) if is_long else bytes([value & 0xFF])
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(raw)
    try:
        file = GgufFile(path)
    except ConfigError:
        return
    for name, place in file.tensors.items():
        assert file.bytes_of(name).nbytes == place.num_bytes


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_noise_after_a_header_is_read_or_refused(tmp_path_factory, noise):
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    path.write_bytes(b"GGUF" + u32(3) + u64(1) + u64(1) + noise)
    with suppress(ConfigError):
        GgufFile(path)


def split(number: int, count: int, total: int | None = None) -> tuple[bytes, ...]:
    keys = (key("split.no", 2, struct.pack("<H", number)), key("split.count", 2, struct.pack("<H", count)))
    return keys if total is None else (*keys, key("split.tensors.count", 5, struct.pack("<i", total)))


def test_shards_are_one_model(tmp_path):
    for number, name in enumerate(("a", "b")):
        path = tmp_path / f"m-{number + 1:05d}-of-00002.gguf"
        path.write_bytes(content(split(number, 2, 2), (tensor(name),)))
    model = GgufModel(tmp_path / "m-00001-of-00002.gguf")
    assert {name: file.path.name for name, file in model.file_of.items()} == {
        "a": "m-00001-of-00002.gguf",
        "b": "m-00002-of-00002.gguf",
    }
    with pytest.raises(ConfigError, match="part 2 of 2; name the first, m-00001-of-00002"):
        GgufModel(tmp_path / "m-00002-of-00002.gguf")


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (None, "lacks its other parts: m-00002-of-00002.gguf"),
        (content(split(1, 2), (tensor("a"),)), "tensor 'a' is in m-00002-of-00002.gguf and in an earlier file"),
        (content(split(1, 2)), "split.tensors.count is 2, the files hold 1"),
    ],
)
def test_shards_that_do_not_belong_together_are_refused(tmp_path, second, said):
    first = tmp_path / "m-00001-of-00002.gguf"
    first.write_bytes(content(split(0, 2, 2), (tensor("a"),)))
    if second is not None:
        (tmp_path / "m-00002-of-00002.gguf").write_bytes(second)
    with pytest.raises(ConfigError, match=re.escape(said)):
        GgufModel(first)


def test_a_shard_of_another_name_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(content(split(0, 2)))
    with pytest.raises(ConfigError, match=r"must be called NAME-00001-of-00002\.gguf"):
        GgufModel(tmp_path / "m.gguf")
