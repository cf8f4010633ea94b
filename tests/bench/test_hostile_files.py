"""Files that are broken or mean harm: each is refused by a sentence that names it, and takes a bounded memory."""

import gzip
from pathlib import Path

import pytest

from splittime.bench import traces
from splittime.bench.book.records import load_run
from splittime.bench.draw import draw
from splittime.bench.schedule import load_schedule
from splittime.bench.spec import LoadSpec
from splittime.core.errors import ConfigError

HEADER = "arrival_s,input_tokens,output_tokens"
DEEP = "[" * 100_000 + "]" * 100_000
HEAD = '{"format":1,"seed":1,"requests":[]}'
MOONCAKE = '"input_length":1,"output_length":1'


def drawn(**fields):
    return draw(LoadSpec(num_requests=2, **fields), vocab_size=1000, max_model_len=4096, block_size=16, salt="x")


def kept(folder: Path, text: str | bytes, name: str = "file") -> Path:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEADER,
        f"{HEADER}\nnan,1,1",
        f"{HEADER}\n0,nan,1",
        f"{HEADER}\n0,inf,1",
        f"{HEADER}\n0,1e18,1",
        f"{HEADER}\n0,-1,1",
        f"{HEADER}\n0,1",
        f"{HEADER}\n0,1,1\n1e300,1,1",
        f"{HEADER}\n-1e308,1,1\n1e308,1,1",
        f"{HEADER}\n0,1,1\n1e10,1,1",
        f"{HEADER}\r0,1,1\r1,1,1",
        f"{HEADER}\n0,{'1' * 200_000},1",
        '"' + "x" * 200_000,
        f"{HEADER},prefix_blocks\n0,600,1\n1,600,1,5",
        f"{HEADER},prefix_blocks\n0,600,1,{' '.join(['0-195312'] * 50)}",
        f'{{"timestamp":1e400,{MOONCAKE}}}',
        f'{{"timestamp":1e308,{MOONCAKE}}}\n{{"timestamp":-1e308,{MOONCAKE}}}',
        f'{{"timestamp":0,"a":{DEEP},{MOONCAKE}}}',
        b"\xff\xfe\x00",
        HEADER.encode("utf-16"),
        gzip.compress(b"x" * 1000)[:-10],
    ],
    ids=range(22),
)
def test_a_trace_that_cannot_be_used_is_refused_by_name(text, tmp_path):
    path = kept(tmp_path, text)
    with pytest.raises(ConfigError, match="file") as refused:
        drawn(trace=str(path))
    assert str(path) in refused.value.info.message


@pytest.mark.parametrize("time", ["nan", "inf", "-inf", "yesterday", "1e400"])
def test_a_time_that_is_none_is_named_by_its_line(time, tmp_path):
    with pytest.raises(ConfigError, match="line 3: "):
        drawn(trace=str(kept(tmp_path, f"{HEADER}\n0,1,1\n{time},1,1\n9,1,1")))


@pytest.mark.parametrize("text", [f"\ufeff{HEADER}\r\n-3,1,1\r\n-2,1,1\r\n", f"{HEADER}\n5,0,0\n5,0,0,7\n"])
def test_a_trace_that_is_only_odd_is_read(text, tmp_path):
    assert len(drawn(trace=str(kept(tmp_path, text))).requests) == 2


@pytest.mark.parametrize("packs", [bytes, gzip.compress])
def test_a_file_of_any_number_is_not_unpacked(packs, tmp_path, monkeypatch):
    """Of zeros, 100 MB are 100 kB."""
    monkeypatch.setattr(traces, "MAX_TEXT_BYTES", 10_000)
    path = kept(tmp_path, packs(HEADER.encode() + b"\n" + b"0" * 10_000))
    with pytest.raises(ConfigError, match="more than 10,000 bytes") as refused:
        drawn(trace=str(path))
    assert refused.value.info.limit == 10_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", f'[{{"conversations":{DEEP}}}]'),
        ("a.json", '[{"conversations":[{"from":[],"value":"x"}]}]'),
        ("a.json", "[5]"),
        ("a.jsonl", f'{{"prompt":"a","body":{{"x":{DEEP}}}}}'),
        ("a.jsonl", '{"prompt":"\\ud800"}'),
        ("a.jsonl", '{"prompt":"a"}\n{"prompt":'),
        ("a.jsonl", b'{"prompt":"\xff"}'),
    ],
)
def test_prompts_that_cannot_be_used_are_refused_by_name(name, text, tmp_path):
    path = kept(tmp_path, text, name)
    with pytest.raises(ConfigError) as refused:
        drawn(dataset=str(path), rate=1.0)
    assert str(path) in refused.value.info.message


def request(**fields: object) -> str:
    import json

    return HEAD + "\n" + json.dumps({"index": 0, "at_ns": 0, "output_tokens": 1, **fields})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        b"\x00\xff",
        f'{{"format":1,"seed":1,"requests":[],"settings":{{"a":{DEEP}}}}}',
        '{"format":9,"seed":1,"requests":[]}',
        '{"format":1,"seed":1,"concurrency":0,"requests":[]}',
        '{"format":1,"seed":1,"duration_ns":-1,"requests":[]}',
        '{"format":1,"seed":1,"measured_from_ns":5,"measured_until_ns":1,"requests":[]}',
        '{"format":1,"seed":1,"requests":[{"index":0,"at_ns":0,"output_tokens":1}]}',
        request(index=1),
        request(at_ns=-5),
        request(at_ns=2**70),
        request(at_ns=10**18),
        request(output_tokens=0),
        request(output_tokens=10**18),
        request(think_ns=-1),
        request(read_delay_ns=-1),
        request(cancel_after_ns=-1),
    ],
    ids=range(18),
)
def test_a_schedule_that_cannot_be_carried_out_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match="is not a schedule"):
        load_schedule(kept(tmp_path, text))


def test_a_schedule_as_it_should_be_is_read(tmp_path):
    assert len(load_schedule(kept(tmp_path, request())).requests) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"settings":' + DEEP + "}", b'{"label":"\xff"}', b"\x00" * 1000])
def test_what_is_no_run_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match="is not a run"):
        load_run(kept(tmp_path, text))
