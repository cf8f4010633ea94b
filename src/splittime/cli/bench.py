"""`splittime bench`: load for any OpenAI-compatible server, and what became of it. One file for each command."""

import asyncio
import gc

import orjson

from splittime.cli import bench_books, bench_compare, bench_run, bench_search
from splittime.cli.bench_exit import codes
from splittime.cli.bench_flags import time_ns
from splittime.cli.options import JsonFlag, fails_clearly, flag, talk, write_data
from splittime.cli.panels import add, group

GROUP_EXAMPLES = f"""\b
Examples:
  splittime bench run http://127.0.0.1:8000 --rate 5
  splittime bench search http://127.0.0.1:8000 --slo ttft_p99=300ms
  splittime bench compare before.json after.json

{codes()}"""
app = group("Load for any OpenAI-compatible server, measured and explained.", GROUP_EXAMPLES)

RARELY = (50_000, 50, 1000)
EXAMPLES = f"""\b
Examples:
  splittime bench mock-server                        on http://127.0.0.1:8001
  splittime bench mock-server --ttft 200ms --slots 8 so that requests queue
  splittime bench mock-server --freeze 3s:2s         stands from second 3 to 5

{codes("mock-server")}"""


for _command, _examples, _summary in (
    (bench_run.run, bench_run.EXAMPLES, "Send a load and measure each request."),
    (bench_search.search, bench_search.SEARCH_EXAMPLES, "Find the highest rate that keeps an SLO."),
    (bench_search.sweep, bench_search.SWEEP_EXAMPLES, "Run one load at several rates or concurrencies."),
    (bench_compare.compare, bench_compare.EXAMPLES, "Say whether B is better than A, from saved runs."),
    (bench_books.report, bench_books.REPORT_EXAMPLES, "Show a saved run again: table, HTML, CSV or JSON."),
    (bench_books.books, bench_books.EXAMPLES, "Show what the client felt beside what the server did."),
):
    add(app, _command, _examples, _summary)


@fails_clearly
def mock_server(
    ttft: str = flag("TIME", "To the first token.", "50ms"),
    ttft_per_token: str = flag("TIME", "And for each token of the prompt.", "0ms"),
    itl: str = flag("TIME", "Between tokens.", "10ms"),
    tokens_per_chunk: int = flag("N", "So many tokens in each event.", 1),
    buffer_chunks: int = flag("N", "Hold events back until there are so many.", 1),
    nagle_every: int = flag("N", "Each N-th chunk waits 40 ms more. 0: none.", 0),
    freeze: list[str] | None = flag("BEGIN:LENGTH", "Stand still, counted from the first request."),
    error_rate: float = flag("X", "Share of requests that are answered 500.", 0.0),
    break_rate: float = flag("X", "Share of streams that break off.", 0.0),
    slots: int | None = flag("N", "Serve so many at a time, queue the rest."),
    seed: int = flag("N", "Seed that draws who fails.", 0),
    host: str = flag("HOST", "Where to listen.", "127.0.0.1"),
    port: int = flag("N", "0: a free one.", 8001),
    json: JsonFlag = False,
) -> None:
    """Run a server with declared timings: to check a load generator against, or to try one without a model."""
    from splittime.bench.event_loop import run_loop
    from splittime.bench.mock_server import Timings

    timings = Timings(
        ttft_ns=time_ns(ttft, "--ttft"),
        ttft_per_token_ns=time_ns(ttft_per_token, "--ttft-per-token"),
        itl_ns=time_ns(itl, "--itl"),
        tokens_per_chunk=tokens_per_chunk,
        buffer_chunks=buffer_chunks,
        nagle_every=nagle_every,
        freezes=tuple(_freeze(text) for text in freeze or ()),
        error_rate=error_rate,
        break_rate=break_rate,
        slots=slots,
        seed=seed,
    )
    run_loop(_serve_mock(timings, host, port, json))


add(app, mock_server, EXAMPLES, "Run a server with declared timings, to try a load on.", "mock-server")


def _freeze(text: str) -> tuple[int, int]:
    begin, _, length = text.partition(":")
    return time_ns(begin, "--freeze"), time_ns(length, "--freeze")


async def _serve_mock(timings: "object", host: str, port: int, as_json: bool) -> None:
    from splittime.bench.mock_server import MockServer

    gc.collect()
    gc.freeze()  # a collection of all that was imported takes longer than a token
    gc.set_threshold(*RARELY)
    async with MockServer(timings, host, port) as server:  # type: ignore[arg-type]
        if as_json:
            write_data(orjson.dumps({"url": server.url}))
        else:
            talk().print(f"mock server on {server.url} (Ctrl-C ends it)")
        await asyncio.Event().wait()
