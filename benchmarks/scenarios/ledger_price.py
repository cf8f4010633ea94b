"""The price of the instrument: tokens/s with the ledger on over off, in one process, arms interleaved.

    python -m benchmarks.scenarios.ledger_price [--model MODEL_FOLDER] [--repeats 25] [--json]

On: every mark, a record for each step, accounts closed and verified into the ring, the SQLite file and the Prometheus
histograms, all in the engine's own process and thread (a server does the last three in another process, on another
core: there the price is lower). Off: marks do nothing, no step records, no store. CPU time counts all threads.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

import splittime
from benchmarks.report import file_result
from benchmarks.scenarios.engine_driver import Crank, build_crank
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import InlineDriver
from splittime.drive.messages import StepOutput
from splittime.engine.recorder import Recorder
from splittime.ledger.account import Account, ClosedAccount
from splittime.ledger.export.prometheus import PrometheusExporter
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger
from splittime.scheduler.config import SchedulerConfig

REQUESTS, OUTPUT_TOKENS = 32, 100
_ZEROS = {field.name: 0 for field in msgspec.structs.fields(StepRecord) if field.required}
NO_RECORD = StepRecord(**_ZEROS | {"rows": ()})
CLOCKS = ("tokens_per_wall_s", "tokens_per_cpu_s")  # a shared machine's wall time is noisy; CPU time less so
Rates = tuple[float, float]


class NullAccount(Account):
    """An account that writes nothing down. It knows its stage, which the scheduler asks for."""

    def enter(self, stage, now_ns, cause=None) -> None:
        self.marks[0] = self.marks[0] if self.marks[0].stage is stage else type(self.marks[0])(stage, None, now_ns)

    def close(self, now_ns) -> None:
        pass


@contextmanager
def ledger_off() -> Iterator[None]:
    with (
        patch("splittime.scheduler.state.Account", NullAccount),
        patch.object(Recorder, "record", lambda *arguments: NO_RECORD),
    ):
        yield


class Book:
    """What a server does with an engine's output, in this thread."""

    def __init__(self, crank: Crank, path: Path) -> None:
        self.ledger = Ledger(path)
        self.exporter = PrometheusExporter(self.ledger, crank.stats)
        self.open: dict[str, Account] = {}
        self.tokens: dict[str, list[tuple[int, int]]] = {}

    def take(self, output: StepOutput) -> None:
        if output.record is not None:
            self.ledger.add_step(output.record)
        for news in output.outputs:
            self.open[news.request_id].extend(news.marks)
            self.tokens[news.request_id].extend([(output.step_id, output.ready_ns)] * len(news.token_ids))
            if news.finish_reason is not None:
                self.close(news.request_id, output.ready_ns)

    def close(self, request_id: str, now_ns: int) -> None:
        account, tokens = self.open.pop(request_id), self.tokens.pop(request_id)
        account.close(now_ns)
        steps, ready = zip(*tokens, strict=True)
        closed = ClosedAccount(
            request_id=request_id,
            group_id=request_id,
            model="",
            endpoint="",
            started_at_unix_ns=0,
            start_ns=account.start_ns,
            end_ns=now_ns,
            intervals=tuple(account.intervals()),
            finish_reason="length",
            output_tokens=len(tokens),
            first_chunk_tokens=1,
            token_steps=steps,
            token_ready_ns=ready,
            token_written_ns=ready,
        )
        self.ledger.add_account(closed)


def run(crank: Crank, take: Callable[[StepOutput], None], on_submit: Callable[[Request], None]) -> Rates:
    """Tokens per second of wall time and of CPU time: 32 requests at once, 64 tokens of prompt and 100 of output."""
    rng = random.Random(0)
    begin, begin_cpu = time.monotonic(), time.process_time()
    for i in range(REQUESTS):
        request = Request(
            request_id=f"request-{i}",
            prompt_token_ids=tuple(rng.randrange(10, 4000) for _ in range(64)),
            sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, seed=0),
            submitted_ns=time.monotonic_ns(),
        )
        on_submit(request)
        crank.submit(request, request.submitted_ns)
    for output in InlineDriver(crank).outputs():
        take(output)
    tokens = REQUESTS * OUTPUT_TOKENS
    return tokens / (time.monotonic() - begin), tokens / (time.process_time() - begin_cpu)


def run_on(crank: Crank, path: Path) -> Rates:
    book = Book(crank, path)

    def on_submit(request: Request) -> None:
        book.open[request.request_id] = Account(request.request_id, request.submitted_ns, Stage.HANDOFF)
        book.tokens[request.request_id] = []

    rates = run(crank, book.take, on_submit)
    assert book.ledger.counts().invalid_accounts == 0
    book.ledger.close()
    return rates


def run_off(crank: Crank) -> Rates:
    with ledger_off():
        return run(crank, lambda output: None, lambda request: None)


def compare(on: list[float], off: list[float]) -> dict[str, Any]:
    """Medians, and the median and quartiles of the paired ratios."""
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    return {
        "on": statistics.median(on),
        "off": statistics.median(off),
        "on_over_off": statistics.median(ratios),
        "on_over_off_quartiles": statistics.quantiles(ratios, n=4)[::2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(splittime.__file__).parent / "packaged" / "code"))
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    crank = build_crank(arguments.model, SchedulerConfig(enable_prefix_caching=False))
    run_off(crank)
    on, off = [], []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            arms = [lambda repeat=repeat: on.append(run_on(crank, Path(folder) / f"{repeat}.sqlite"))]
            arms.append(lambda: off.append(run_off(crank)))
            for arm in arms[:: 1 if repeat % 2 else -1]:  # neither always goes first
                arm()
    figures = {name: compare([rate[i] for rate in on], [rate[i] for rate in off]) for i, name in enumerate(CLOCKS)}
    path = file_result("ledger_price", figures, vars(arguments), arguments.json)
    if not arguments.json:
        print(figures)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
