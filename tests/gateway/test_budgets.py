"""Budgets by day and month: what refuses, when it ends, and what a restart, a clock and a broken file do to them."""

import asyncio
import contextlib
import json
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from patience import until_async
from splittime.core.errors import ConfigError, Refused
from splittime.gateway import budgets
from splittime.gateway.budgets import BudgetFile, Calendar, TokenBudgets
from splittime.gateway.config import TenantConfig
from splittime.gateway.config_file import config_of

from .conftest import gateway_of, upstream
from .test_limits import bearer

NOON = datetime(2027, 2, 27, 12, tzinfo=UTC).timestamp()
DAY_S = 86_400.0
A = TenantConfig(name="a", tokens_per_day=100, tokens_per_month=250)
B = TenantConfig(name="b")


class Clock:
    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def __call__(self) -> float:
        return self.at_s


def refusal(kept: TokenBudgets, tenant: str = "a") -> tuple[str, float] | None:
    try:
        kept.check(tenant)
    except Refused as caught:
        return (caught.reason, caught.info.retry_after_s) if caught.info.status == 429 else None
    return None


def test_a_day_ends_and_a_month_goes_on(tmp_path):
    clock = Clock(NOON)
    kept = TokenBudgets([A, B], BudgetFile(str(tmp_path / "b")), Calendar(clock))
    kept.use("a", 99)
    kept.use("b", 10**9)
    assert (refusal(kept), refusal(kept, "b")) == (None, None)
    kept.use("a", 1)
    assert refusal(kept) == ("tokens_per_day", DAY_S / 2)
    clock.at_s += DAY_S / 2
    assert refusal(kept) is None
    kept.use("a", 150)  # more than the day had left: overdrawn
    assert refusal(kept) == ("tokens_per_day", DAY_S)
    clock.at_s += DAY_S - 3600  # the 28th, the last of the month
    assert refusal(kept) == ("tokens_per_day", 3600.0)
    clock.at_s += 3600
    assert datetime.fromtimestamp(clock.at_s, UTC).month == 3
    assert refusal(kept) is None
    assert kept.used() == {("a", "tokens_per_day"): 0, ("a", "tokens_per_month"): 0}


def test_a_month_is_used_up_whatever_the_day(tmp_path):
    clock = Clock(NOON)
    kept = TokenBudgets(
        [TenantConfig(name="a", tokens_per_month=250)], BudgetFile(str(tmp_path / "b")), Calendar(clock)
    )
    kept.use("a", 250)
    assert refusal(kept) == ("tokens_per_month", 1.5 * DAY_S)


def test_a_clock_that_is_set_back_gives_nothing_back(tmp_path):
    clock = Clock(NOON)
    kept = TokenBudgets([A], BudgetFile(str(tmp_path / "b")), Calendar(clock))
    kept.use("a", 100)
    clock.at_s -= 2 * DAY_S
    assert refusal(kept) == ("tokens_per_day", DAY_S / 2)


async def written(kept: TokenBudgets, seconds: float = 0.1) -> None:
    kept.open()
    await asyncio.sleep(seconds)
    await kept.close()


def test_a_restart_forgets_nothing(tmp_path):
    clock, file = Clock(NOON), str(tmp_path / "b")
    for expected in (0, 60, 120):
        kept = TokenBudgets([A], BudgetFile(file), Calendar(clock))
        assert kept.used()["a", "tokens_per_day"] == expected
        kept.use("a", 60)
        asyncio.run(written(kept, 0.0))
    assert refusal(TokenBudgets([A], BudgetFile(file), Calendar(clock)))


async def test_two_gateways_share_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(budgets, "WRITE_S", 0.005)
    file = str(tmp_path / "b")
    one, other = (TokenBudgets([A], BudgetFile(file), Calendar(Clock(NOON))) for _ in range(2))
    one.open()
    other.open()
    for _ in range(10):
        one.use("a", 3)
        other.use("a", 5)
        await asyncio.sleep(0.002)
    for _ in range(1000):
        if {refusal(one), refusal(other)} == {("tokens_per_day", DAY_S / 2)}:
            break
        one.use("a", 1)
        await asyncio.sleep(0.01)
    await one.close()
    await other.close()
    assert refusal(one)
    assert refusal(other)
    assert TokenBudgets([A], BudgetFile(file), Calendar(Clock(NOON))).used()["a", "tokens_per_day"] >= 100


async def test_a_file_that_breaks_is_counted_beyond_and_written_later(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(budgets, "WRITE_S", 0.005)
    path = tmp_path / "b"
    kept = TokenBudgets([A], BudgetFile(str(path)), Calendar(Clock(NOON)))
    path.unlink()
    path.mkdir()
    kept.use("a", 70)
    kept.open()
    await asyncio.sleep(0.05)
    kept.use("a", 30)
    assert refusal(kept)
    path.rmdir()
    await kept.close()
    assert caplog.text.count("budgets are counted and not written") == 1
    assert TokenBudgets([A], BudgetFile(str(path)), Calendar(Clock(NOON))).used()["a", "tokens_per_day"] == 100


async def test_what_is_used_while_the_file_is_read_counts_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(budgets, "WRITE_S", 0.005)
    kept = TokenBudgets([A], BudgetFile(str(tmp_path / "b")), Calendar(Clock(NOON)))
    loop, seen = asyncio.get_running_loop(), []

    class Between(ThreadPoolExecutor):
        """After the file was read, and before the loop is told what it says, a request ends."""

        def submit(self, work, *arguments):
            def read_and_use():
                told = work(*arguments)
                done = threading.Event()
                loop.call_soon_threadsafe(lambda: (kept.use("a", 1), seen.append(kept.used()), done.set()))
                done.wait(10)
                return told

            return super().submit(read_and_use)

    monkeypatch.setattr(budgets, "ThreadPoolExecutor", Between)
    kept.open()
    await until_async(lambda: len(seen) >= 3)
    await kept.close()
    assert [one["a", "tokens_per_day"] for one in seen[:3]] == [1, 2, 3]


async def test_what_is_used_while_the_last_but_one_write_goes_on_is_written(tmp_path):
    class Slow(BudgetFile):
        def add(self, added, periods):
            begun.set()
            assert goes_on.wait(20)
            return super().add(added, periods)

    begun, goes_on = threading.Event(), threading.Event()
    file = str(tmp_path / "b")
    kept = TokenBudgets([A], BudgetFile(file), Calendar(Clock(NOON)))
    kept._file = Slow(file)
    kept.open()
    await until_async(lambda: begun.is_set())
    kept.use("a", 40)
    closing = asyncio.create_task(kept.close())
    await asyncio.sleep(0.02)
    goes_on.set()
    await closing
    assert TokenBudgets([A], BudgetFile(file), Calendar(Clock(NOON))).used()["a", "tokens_per_day"] == 40


async def test_what_a_write_fails_with_ends_no_writing(tmp_path, monkeypatch, caplog):
    """It fails in a way that nobody foresaw; the next one is tried."""
    monkeypatch.setattr(budgets, "WRITE_S", 0.001)
    kept, tries = TokenBudgets([A], BudgetFile(str(tmp_path / "b")), Calendar(Clock(NOON))), []
    add = BudgetFile.add

    def fails_twice(file, added, periods):
        tries.append(added)
        if len(tries) < 3:
            raise TypeError("unforeseen")
        return add(file, added, periods)

    monkeypatch.setattr(BudgetFile, "add", fails_twice)
    kept.open()
    await until_async(lambda: len(tries) > 3)
    await kept.close()
    assert caplog.text.count("not written to") == caplog.text.count("unforeseen") == 1


def test_old_days_are_not_kept(tmp_path):
    clock, path = Clock(NOON), tmp_path / "b"
    for _ in range(5):
        kept = TokenBudgets([A], BudgetFile(str(path)), Calendar(clock))
        kept.use("a", 1)
        asyncio.run(written(kept, 0.0))
        clock.at_s += 2 * DAY_S
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM budget").fetchone() == (2,)
    connection.close()


def test_a_budget_without_a_file_is_refused_and_so_is_a_file_that_cannot_be(tmp_path):
    told = {"upstream": [{"name": "u", "url": "http://h:1", "models": ["m"]}]}
    tenant = {"name": "a", "key_env": "K", "operator": True, "tokens_per_month": 5}
    with pytest.raises(ConfigError) as caught:
        config_of(told | {"tenant": [tenant]})
    assert caught.value.info.param == "tenant[0].tokens_per_month"
    assert config_of(told | {"tenant": [tenant], "budget_file": "x"}).budget_file == "x"
    with pytest.raises(ConfigError) as caught:
        TokenBudgets([A], BudgetFile(str(tmp_path / "nowhere" / "b")))
    assert caught.value.info.param == "budget_file"


class Killed(Exception):
    pass


def test_a_gateway_that_was_killed_remembers(hostile, tmp_path):
    text = f'budget_file = "{tmp_path}/budgets.sqlite"\n' + upstream("fine", hostile.url("fine"))
    text += '[[tenant]]\nname = "ops"\nkey_env = "OPS"\noperator = true\n'
    text += '[[tenant]]\nname = "a"\nkey_env = "A"\ntokens_per_day = 25\n'
    keys = {"OPS": "of-ops", "A": "of-a"}
    with contextlib.suppress(Killed), gateway_of(tmp_path, text, **keys) as gateway:
        assert [gateway.ask("fine", bearer("of-a"))[0] for _ in range(2)] == [200, 200]  # ten tokens each
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s and _kept(tmp_path) < 20:
            time.sleep(0.05)
        gateway.process.kill()
        raise Killed
    assert _kept(tmp_path) == 20
    with gateway_of(tmp_path, text, **keys) as gateway:
        num_served = 0
        while (answer := gateway.ask("fine", bearer("of-a")))[0] == 200:
            num_served += 1  # the latest may not have been charged yet
            time.sleep(0.05)
        assert 1 <= num_served < 100
        status, headers, body = answer
        assert (status, json.loads(body)["error"]["reason"]) == (429, "tokens_per_day")
        assert 1 <= int(headers["retry-after"]) <= DAY_S
        assert gateway.ask("fine", bearer("of-ops"))[0] == 200
    assert _kept(tmp_path) == 20 + 10 * num_served  # written at the end as well


def _kept(folder) -> int:
    with sqlite3.connect(folder / "budgets.sqlite") as connection:
        rows = connection.execute("SELECT tokens FROM budget WHERE length(period) = 10").fetchall()
    connection.close()
    return sum(tokens for (tokens,) in rows)
