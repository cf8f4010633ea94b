"""What the commands show on a terminal of 80 columns, beside the tables of `tests/bench/test_narrow.py`."""

import io

import msgspec
import pytest
from rich.console import Console

from splittime.assemble.settings import Settings, Value, load
from splittime.bench.share import Progress
from splittime.cli.bench import shown_live, view
from splittime.cli.serve import PACKAGED, SMALL, StartTimeline, announce, configuration, curl
from splittime.present.terminal import WordWriter

PROGRESS = Progress(
    elapsed_s=100.0,
    planned=1000,
    due=1000,
    begun=1000,
    ended=900,
    failed=12,
    in_flight=88,
    output_tokens=1,
    ttft_p50_s=12.345,
    ttft_p99_s=23.456,
    ends_at_s=300.0,
)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_figure_of_the_progress_is_broken_in_two(width):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(view(PROGRESS, is_closed=False))
    text = out.getvalue()
    for figure in ("10.0/s of 10.0/s", "in flight 88", "p50 12345 ms  p99 23456 ms", "900 ended", "12 failed"):
        assert figure in text
    assert "100 / 300 s" in text
    assert all(len(line.rstrip()) <= width for line in text.splitlines())


def test_a_log_hears_of_a_load_every_ten_seconds():
    out = io.StringIO()
    with shown_live(Console(file=out, color_system=None), is_closed=True) as tell:
        for elapsed_s in (1.0, 9.9, 10.0, 10.2, 19.9, 20.4, 30.3, 30.6):
            tell(msgspec.structs.replace(PROGRESS, elapsed_s=elapsed_s))
    lines = out.getvalue().splitlines()
    assert [line.split(" s: ")[0] for line in lines] == ["10", "20", "31"]
    assert all("in flight 88" in line and "900 ended" in line for line in lines)
    out.truncate(0)
    with shown_live(Console(file=out, color_system=None), is_closed=False) as tell:
        tell(msgspec.structs.replace(PROGRESS, elapsed_s=400.0))
    assert "all sent: waits for answers, about 39 s more" in out.getvalue()


def settings(**changed) -> Settings:
    values = load({}, environ={}).values
    return Settings({**values, **{name: Value(value, f"flag --{name}") for name, value in changed.items()}})


def test_each_name_is_said_once_and_with_its_origin():
    resolved = {
        "block_size": 32,
        "num_threads": 2,
        "graph_sizes": [],
        "scheduler": {"block_size": 32, "policy": "priority", "num_threads": 3},
    }
    given = settings(block_size=32, num_threads=9, policy="priority", port=8001)
    assert list(configuration(resolved, given)) == [
        ("block_size", "32  (flag --block_size)"),
        ("num_threads", "2  (flag --num_threads: 9)"),
        ("scheduler.policy", "priority  (flag --policy)"),
        ("scheduler.num_threads", "3"),  # not what was resolved above
        ("port", "8001  (flag --port)"),
    ]


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_an_answer_that_comes_in_pieces_is_broken_between_its_words(size):
    text = f"It is blue because {'x' * 25} scatters.\n\n- \x1b[31mso 天空 is blue"
    out = io.StringIO()
    words = WordWriter(out, 10)
    for at in range(0, len(text), size):
        words.write(text[at : at + size])
    words.end()
    lines = ["It is blue", "because ", f"{'x' * 25} ", "scatters.", "", "- \ufffd[31mso ", "天空 is ", "blue"]
    assert out.getvalue().split("\n") == lines


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_request_to_paste_is_short_and_a_shell_reads_it(needs_key):
    import json
    import shlex

    text = curl("http://127.0.0.1:8000", PACKAGED, needs_key)
    assert all(len(line) <= 80 for line in text.splitlines())
    words = shlex.split(text)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/completions"]
    assert ("Authorization: Bearer YOUR_KEY" in words) is needs_key
    assert json.loads(words[-1])["max_tokens"] == 64


@pytest.mark.parametrize(("model", "is_chat"), [("splittime-code", False), ("another", True)])
def test_a_model_that_chats_is_asked_for_a_chat(model, is_chat):
    """The packaged one's chats are no better than what it completes."""
    import json
    import shlex

    words = shlex.split(curl("http://127.0.0.1:8000", model, needs_key=False, has_chats=True))
    assert words[1].endswith("/v1/chat/completions" if is_chat else "/v1/completions")
    assert ("messages" in json.loads(words[-1])) is is_chat


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("model", [PACKAGED, "smollm2"])
def test_of_a_model_that_nobody_named_is_said_that_it_is_small(model, named, capsys):
    given = settings(model=model) if named else load({}, environ={})
    announce("http://127.0.0.1:8000", model, {}, StartTimeline(), given)
    assert (SMALL[model] in capsys.readouterr().err) is not named
