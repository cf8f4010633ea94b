"""The price of the instrument, in ns: a mark, closing and checking an account, the ledger's and the exporter's part.

    python benchmarks/micro/ledger_cost.py [--json] [--repeats N]

Each figure is the median over the repeats of the mean over one run of `calls`; the spread is the smallest and largest
mean. Single thread, no other load assumed; run it on an idle machine. `empty loop` is what the measuring itself costs
and is taken off nothing.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.report import file_result
from splittime.core.clock import SystemClock
from splittime.core.engine import EngineStats
from splittime.ledger.account import Account, ClosedAccount
from splittime.ledger.account_json import account_json
from splittime.ledger.export.prometheus import PrometheusExporter
from splittime.ledger.prompt_parts import lookup, prompt_hashes
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger

LIFE = (Stage.RECEIVE, Stage.ADMIT, Stage.TOKENIZE, Stage.HANDOFF, Stage.QUEUE, Stage.PREFILL, Stage.DECODE)
NUM_TOKENS = 100
STATS = EngineStats(now_ns=0)

Body = Callable[[int], None]


def empty_loop(calls: int) -> None:
    for _ in range(calls):
        pass


def clock_read(calls: int) -> None:
    now_ns = SystemClock.now_ns
    for _ in range(calls):
        now_ns()


def mark(calls: int) -> None:
    """A clock read and a stage change, accounts of some dozen marks."""
    now_ns = SystemClock.now_ns
    for _ in range(calls // 12):
        account = Account("r", now_ns(), Stage.RECEIVE)
        for _ in range(6):
            account.enter(Stage.DECODE, now_ns())
            account.enter(Stage.DECODE_STALL, now_ns(), Cause.TOKEN_BUDGET)


def close_and_verify(calls: int) -> None:
    """Closing an account of eight stages, its intervals, and the check of the first law."""
    for _ in range(calls):
        account = open_account()
        account.close(account.marks[-1].begin_ns + 1000)
        account.verify()


def open_only(calls: int) -> None:
    for _ in range(calls):
        open_account()


def add_account(ledger: Ledger) -> Body:
    account = closed_account()

    def body(calls: int) -> None:
        for _ in range(calls):
            ledger.add_account(account)

    return body


def add_step(ledger: Ledger) -> Body:
    record = step_record()

    def body(calls: int) -> None:
        for _ in range(calls):
            ledger.add_step(record)

    return body


def open_account() -> Account:
    account = Account("cmpl-x-0", 1000, Stage.RECEIVE)
    for i, stage in enumerate(LIFE):
        account.enter(stage, 1000 + i * 1000)
    account.enter(Stage.DELIVER, 9000)
    return account


def closed_account() -> ClosedAccount:
    account = open_account()
    account.close(10_000 + NUM_TOKENS * 1_000_000)
    ready_ns = tuple(10_000 + i * 1_000_000 for i in range(NUM_TOKENS))
    return ClosedAccount(
        request_id="cmpl-x-0",
        group_id="cmpl-x",
        model="code",
        endpoint="completions",
        started_at_unix_ns=0,
        start_ns=account.start_ns,
        end_ns=account.end_ns or 0,
        intervals=tuple(account.intervals()),
        finish_reason="stop",
        prompt_tokens=100,
        output_tokens=NUM_TOKENS,
        first_chunk_tokens=1,
        token_steps=tuple(range(NUM_TOKENS)),
        token_ready_ns=ready_ns,
        token_written_ns=ready_ns,
    )


def step_record(num_rows: int = 16) -> StepRecord:
    return StepRecord(
        step_id=1,
        begin_ns=0,
        end_ns=15,
        plan_ns=1,
        launch_ns=2,
        device_ns=3,
        sample_ns=4,
        commit_ns=5,
        host_gap_ns=6,
        idle_ns=7,
        rows=tuple((f"cmpl-{i}-0", 100, 1) for i in range(num_rows)),
        prefill_tokens=0,
        decode_tokens=num_rows,
        kv_tokens_read=1600,
        blocks_used=100,
        num_running=num_rows,
        num_waiting=0,
    )


def exporter_ledger() -> Ledger:
    ledger = Ledger()
    PrometheusExporter(ledger, lambda: STATS)
    return ledger


def send_lag(calls: int) -> None:
    PrometheusExporter(Ledger(), lambda: STATS).observe_send_lags([40_000] * calls)


def parts_of(num_tokens: int) -> Body:
    """What is kept of a prompt, in the tokenising thread."""
    draw = random.Random(0)
    prompt = tuple(draw.randrange(150_000) for _ in range(num_tokens))

    def body(calls: int) -> None:
        for _ in range(calls):
            prompt_hashes(prompt)

    return body


def lookup_in(num_tokens: int) -> Body:
    """What is counted of one answer in eight; a fourth of the text is the answer, and quotes it."""
    draw = random.Random(0)
    prompt = tuple(draw.randrange(150_000) for _ in range(num_tokens * 3 // 4))

    def body(calls: int) -> None:
        for _ in range(calls):
            lookup(prompt, prompt[: num_tokens // 4])

    return body


def make_json(calls: int) -> None:
    account = closed_account()
    for _ in range(calls):
        account_json(account)


def render(calls: int) -> None:
    ledger = Ledger()
    exporter = PrometheusExporter(ledger, lambda: STATS)
    account = closed_account()
    for prompt_tokens in (10, 100, 1000, 10_000):
        ledger.add_account(msgspec.structs.replace(account, prompt_tokens=prompt_tokens))
    ledger.add_step(step_record())
    for _ in range(calls):
        exporter.render()


def measure(body: Body, calls: int, repeats: int) -> dict[str, float]:
    body(max(1, calls // 10))
    means_ns = []
    for _ in range(repeats):
        begin_ns = time.perf_counter_ns()
        body(calls)
        means_ns.append((time.perf_counter_ns() - begin_ns) / calls)
    return {"median_ns": statistics.median(means_ns), "min_ns": min(means_ns), "max_ns": max(means_ns), "calls": calls}


def run(repeats: int, folder: Path) -> dict[str, dict[str, float]]:
    # the queue of the file is made not to fill within a run, so that no put is a cheap drop
    on_file = Ledger(folder / "cost.sqlite")
    bodies: dict[str, tuple[Body, int]] = {
        "empty loop": (empty_loop, 1_000_000),
        "clock read": (clock_read, 500_000),
        "mark (with its clock read)": (mark, 240_000),
        "account: eight marks, opened": (open_only, 20_000),
        "account: eight marks, opened, closed, verified": (close_and_verify, 20_000),
        "ledger.add_account, memory": (add_account(Ledger()), 20_000),
        "ledger.add_account, memory and file": (add_account(on_file), 400),
        f"ledger.add_account, with Prometheus ({NUM_TOKENS} tokens)": (add_account(exporter_ledger()), 5_000),
        "ledger.add_step, memory": (add_step(Ledger()), 50_000),
        "ledger.add_step, memory and file": (add_step(on_file), 400),
        "ledger.add_step, with Prometheus": (add_step(exporter_ledger()), 20_000),
        "observe_send_lag": (send_lag, 100_000),
        "prompt_parts, 100 tokens": (parts_of(100), 10_000),
        "prompt_parts, 1,000 tokens": (parts_of(1000), 5_000),
        "prompt_parts, 16,000 tokens": (parts_of(16_000), 500),
        "lookup, 1,000 tokens": (lookup_in(1000), 500),
        "lookup, 8,000 tokens": (lookup_in(8000), 100),
        f"account_json ({NUM_TOKENS} tokens)": (make_json, 1_000),
        "metrics page": (render, 20),
    }
    results = {}
    for name, (body, calls) in bodies.items():
        results[name] = measure(body, calls, repeats)
        on_file.flush()
    assert on_file.counts().dropped == 0
    on_file.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = run(arguments.repeats, Path(folder))
    file_result("ledger_cost", results, vars(arguments), arguments.json)
    if arguments.json:
        return
    print(f"{'ns each':<58}{'median':>10}{'min':>10}{'max':>10}")
    for name, figure in results.items():
        print(f"{name:<58}{figure['median_ns']:>10.0f}{figure['min_ns']:>10.0f}{figure['max_ns']:>10.0f}")


if __name__ == "__main__":
    main()
