"""Texts are worked on in processes with limits: what cannot end is ended, what dies is replaced, small before large."""

import asyncio
import json
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from patience import until_async
from splittime.core.background import NICER
from splittime.core.errors import EngineError, Overloaded, RequestError, SplittimeError
from splittime.core.forked import ForkLimits
from splittime.drive import host_time
from splittime.ledger.stages import Cause
from splittime.text import workers as text_workers
from splittime.text.foreign_code import byte_alphabet, tokenizer_faults
from splittime.text.process import Decode, Encode, Render, ready_tokenizer
from splittime.text.tokenizer import Tokenizer
from splittime.text.workers import TextTask, TextWorkers

LIMITS = ForkLimits(cpu_s=0.5, memory_bytes=256 * 2**20)
CHAT = Render(({"role": "user", "content": "hi"},))
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROW = "{% set n = namespace(s='x' * 1000000) %}{% for i in range(12) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}"
RECUR = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"


def byte_tokenizer(template: str | None = TEMPLATE, **parts: object) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for name, value in parts.items():
        setattr(backend, name, value)
    return Tokenizer(backend, chat_template=template)


@asynccontextmanager
async def some_workers(tokenizer: Tokenizer | None = None, limits: ForkLimits = LIMITS) -> AsyncIterator[TextWorkers]:
    workers = TextWorkers((tokenizer or byte_tokenizer()).describe, limits)
    try:
        async with asyncio.timeout(100):
            yield workers
    finally:
        workers.close()


async def test_each_kind_of_work() -> None:
    async with some_workers() as workers:
        assert (await workers.submit(CHAT).done).ids == ((104, 105),)
        done = await workers.submit(Encode(("ab", "ü"))).done
        assert (done.ids, done.num_bytes, done.answer) == (((97, 98), (0xC3, 0xBC)), 4, b"")
        done = await workers.submit(Encode(("ab",), answer_max_model_len=1, wants_strings=True)).done
        told = {"count": 2, "max_model_len": 1, "tokens": [97, 98], "token_strs": ["a", "b"]}
        assert (done.ids, done.num_bytes, json.loads(bytes(done.answer))) == ((), 2, told)
        assert isinstance(done.answer.obj, bytearray)  # as it came: 40 MB are copied in 20 ms
        assert (await workers.submit(Decode((97, 98), False)).done).text == "ab"


@pytest.mark.parametrize("template", [LOOP, GROW], ids=["time", "memory"])
async def test_a_template_that_does_not_end_is_ended_and_the_next_chat_is_served(template: str) -> None:
    both = "{% if messages[0].content == 'evil' %}" + template + "{% endif %}ok"
    async with some_workers(byte_tokenizer(both)) as workers:
        evil = Render(({"role": "user", "content": "evil"},))
        with pytest.raises(RequestError) as caught:
            await workers.submit(evil).done
        assert caught.value.info.code == "prompt_too_costly"
        assert (await workers.submit(CHAT).done).ids == ((111, 107),)


async def test_a_workers_memory_is_bounded_whatever_time_it_has() -> None:
    async with some_workers() as workers:
        await workers.submit(CHAT).done
        pid = workers.lanes[0].workers[0].pid
        most_bytes, _ = resource.prlimit(pid, resource.RLIMIT_AS)
        has_bytes = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        assert has_bytes < most_bytes <= has_bytes + LIMITS.memory_bytes


async def test_a_template_that_calls_itself_is_the_requests_error() -> None:
    async with some_workers(byte_tokenizer(RECUR)) as workers:
        with pytest.raises(RequestError, match="calls itself") as caught:
            await workers.submit(CHAT).done
        assert caught.value.info.code == "chat_template_error"


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Replace(" ", "x" * 10**6)},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")])},
    ],
    ids=["normalizer", "expression"],
)
async def test_a_tokenizer_that_takes_too_much_is_ended(parts: dict) -> None:
    async with some_workers(byte_tokenizer(**parts)) as workers:
        with pytest.raises(SplittimeError):
            await workers.submit(Encode((" " * 4000 + "x" * 8000,))).done
        assert (await workers.submit(Encode(("a",))).done).ids == ((97,),)


async def test_a_worker_that_is_killed_costs_nobody_an_answer() -> None:
    async with some_workers() as workers:
        await workers.submit(CHAT).done
        (worker, *_) = workers.lanes[0].workers
        os.kill(worker.pid, signal.SIGSTOP)  # so that it is at work when it dies
        task = workers.submit(CHAT)
        os.kill(worker.pid, signal.SIGKILL)
        assert (await task.done).ids == ((104, 105),)
        os.killpg(workers.parent.pid, signal.SIGKILL)  # all of them, and who makes them
        await asyncio.sleep(0.05)
        assert (await workers.submit(CHAT).done).ids == ((104, 105),)


async def test_a_worker_that_says_nothing_is_ended(monkeypatch) -> None:
    async with some_workers() as workers:
        await workers.submit(CHAT).done
        monkeypatch.setattr(text_workers, "SILENT_S", 0.2)
        stopped = [worker.pid for worker in workers.lanes[0].workers]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RequestError):
            await workers.submit(CHAT).done
        monkeypatch.setattr(text_workers, "SILENT_S", 60.0)
        assert (await workers.submit(CHAT).done).ids == ((104, 105),)


async def test_a_worker_that_has_served_its_one_text_is_given_no_other() -> None:
    """It is ended at once, and its connection a turn of the loop later."""
    async with some_workers() as workers:
        long = Encode(("a" * (text_workers.SHORT_CHARS + 1),))
        for _ in range(2):
            begun: list[bool] = []
            task = workers.submit(long, lambda begun=begun: begun.append(True))
            assert (task.cause, begun) == (Cause.WORKER_START, [])
            await task.done
            assert (task.num_tries, begun) == (1, [True])


async def test_small_texts_do_not_wait_for_large_ones() -> None:
    """However many large ones wait; and who waits is told why."""
    async with some_workers(limits=ForkLimits(20.0, 2**30)) as workers:
        begun: list[str] = []
        giants = [workers.submit(Encode(("a" * 2_000_000,)), lambda: begun.append("giant")) for _ in range(4)]
        longs = [workers.submit(Encode(("b" * 100_000,)), lambda: begun.append("long")) for _ in range(2)]
        small = workers.submit(CHAT, lambda: begun.append("small"))
        assert {task.cause for task in (*giants, *longs, small)} == {Cause.WORKER_START}
        await small.done
        assert not giants[-1].done.done()
        await until_async(lambda: "giant" in begun)
        second = workers.submit(Encode(("a" * 2_000_000,)))
        assert second.cause is Cause.TEXTS_BEFORE
        await longs[-1].done
        assert begun.count("giant") < 4
        quick = workers.submit(CHAT)
        assert quick.cause is None
        await quick.done


async def test_a_large_texts_worker_ends_with_it() -> None:
    async with some_workers() as workers:
        await workers.submit(Encode(("a" * 20_000,))).done
        await until_async(lambda: not workers.lanes[-2].workers)


async def test_what_nobody_wants_any_more_is_not_worked_on(monkeypatch) -> None:
    monkeypatch.setattr(text_workers, "LEFT_S", 1000.0)  # of short ones
    async with some_workers(limits=ForkLimits(20.0, 2**30)) as workers:
        begun: list[int] = []
        tasks: list[TextTask] = []
        for number in range(3):
            tasks.append(workers.submit(Encode(("a" * 1_000_000,)), lambda number=number: begun.append(number)))
        await until_async(lambda: begun)
        os.kill(workers.lanes[-1].workers[0].pid, signal.SIGSTOP)
        for task in tasks[:2]:
            workers.drop(task, RuntimeError("gone"))
        assert len((await tasks[2].done).ids[0]) == 1_000_000
        assert begun == [0, 2]
        assert isinstance(tasks[0].done.exception(), RuntimeError)


BRIEF, SHORT = Encode(("a" * 100,)), Encode(("a" * 5000,))


@pytest.mark.parametrize(("work", "index"), [(CHAT, 0), (BRIEF, 0), (SHORT, 1)], ids=["chat", "brief", "short"])
async def test_who_asks_and_leaves_has_no_worker_made_anew(work: Encode | Render, index: int) -> None:
    async with some_workers() as workers:
        await workers.submit(work).done
        lane = workers.lanes[index]
        (worker,) = lane.workers
        os.kill(worker.pid, signal.SIGSTOP)  # so that it is at work when its text is left
        left = workers.submit(work)
        workers.drop(left, RuntimeError("gone"))
        os.kill(worker.pid, signal.SIGCONT)
        waits = workers.submit(work)
        assert len((await waits.done).ids) == 1
        assert (worker in lane.workers, waits.num_tries, left.num_tries) == (True, 1, 1)
        assert isinstance(left.done.exception(), RuntimeError)


async def test_what_was_left_and_does_not_end_is_ended(monkeypatch) -> None:
    monkeypatch.setattr(text_workers, "LEFT_S", 0.01)
    async with some_workers() as workers:
        await workers.submit(CHAT).done
        (worker,) = workers.lanes[0].workers
        os.kill(worker.pid, signal.SIGSTOP)
        workers.drop(workers.submit(CHAT), RuntimeError("gone"))
        await until_async(lambda: not is_alive(worker.pid))
        assert worker not in workers.lanes[0].workers
        assert (await workers.submit(CHAT).done).ids == ((104, 105),)


async def test_one_worker_of_the_kept_is_there_for_another_key_at_once() -> None:
    async with some_workers() as workers:
        workers.start()
        for lane, work in ((workers.lanes[0], BRIEF), (workers.lanes[1], SHORT)):
            while not all(worker.is_idle for worker in lane.workers):
                await asyncio.sleep(0.01)
            for worker in lane.workers[:-1]:
                os.kill(worker.pid, signal.SIGSTOP)
            greedy = [workers.submit(work, tenant="greedy") for _ in range(3)]
            assert [task.cause for task in greedy] == [None, None, Cause.TEXTS_BEFORE]
            other = workers.submit(work, tenant="other")
            assert other.cause is None
            await other.done


@pytest.mark.parametrize(("size", "nicer"), [(2048, 0), (2049, 10), (20_000, 15), (300_000, 15)])
async def test_all_but_brief_texts_give_way_to_the_threads_that_serve(size: int, nicer: int) -> None:
    """Niceness counts within a session alone, where Linux shares processors out among sessions."""
    async with some_workers(limits=ForkLimits(5.0, 256 * 2**20)) as workers:
        lane = next(lane for lane in workers.lanes if lane.most_chars is None or size <= lane.most_chars)
        task = workers.submit(Encode(("a" * size,)))
        while not any(worker.pid for worker in lane.workers):
            await asyncio.sleep(0)
        (worker,) = lane.workers
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) == min(19, os.nice(0) + nicer)
        assert os.getsid(worker.pid) == os.getsid(0)
        assert os.getpgid(worker.pid) == workers.parent.pid != os.getpgid(0)
        os.kill(worker.pid, signal.SIGSTOP)
        await until_async(lambda: task.num_tries != 0)
        left_s = worker._alarm.when() - asyncio.get_running_loop().time() - text_workers.SILENT_S
        assert 0 <= 5.0 * 1.25**nicer - left_s < 4.0  # of the least that it gets beside a thread that serves
        os.kill(worker.pid, signal.SIGCONT)
        assert len((await task.done).ids[0]) == size


def test_who_gives_way_has_longer_by_the_clock() -> None:
    assert ForkLimits(10.0, 0).wall_s == 10.0
    assert 90 < ForkLimits(10.0, 0, NICER).wall_s < 95


async def test_what_waits_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(text_workers, "MAX_WAITING_CHARS", 1_000_000)
    async with some_workers() as workers:
        for _ in range(3):
            workers.submit(Encode(("a" * 400_000,))) if not workers.lanes[-1].waiting else None
        workers.submit(Encode(("a" * 400_000,)))
        with pytest.raises(Overloaded) as caught:
            workers.submit(Encode(("a" * 400_000,)))
        assert caught.value.info.code == "queued_texts"
        await workers.submit(CHAT).done


async def test_closing_ends_all_processes_and_all_texts() -> None:
    workers = TextWorkers(byte_tokenizer().describe, LIMITS)
    await workers.submit(CHAT).done
    pids = [workers.parent.pid, *(worker.pid for worker in workers.lanes[0].workers if worker.pid)]
    task = workers.submit(Encode(("a" * 3_000_000,)))
    workers.close()
    with pytest.raises(Overloaded):
        await task.done
    for pid in pids:
        while is_alive(pid):
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class PanicException(BaseException):
    __module__ = "pyo3_runtime"


@pytest.mark.parametrize("raised", [PanicException, RecursionError, RuntimeError])
def test_a_fault_inside_a_tokenizer_is_told_as_one(raised: type[BaseException]) -> None:
    with pytest.raises(EngineError) as caught, tokenizer_faults():
        raise raised("at lib.rs:1")
    assert caught.value.info.code == "tokenizer_failed"


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_what_is_not_a_tokenizers_goes_on(raised: type[BaseException]) -> None:
    with pytest.raises(raised), tokenizer_faults():
        raise raised


def test_a_real_panic_is_told_as_a_fault() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={" ": 0}, merges=[]))
    backend.decoder = decoders.Strip(" ", 1, 1)  # one space, stripped at both ends
    with pytest.raises(EngineError, match="slice index") as caught:
        Tokenizer(backend).decode([0])
    assert caught.value.info.code == "tokenizer_failed"


def test_workers_are_forked_from_a_tokenizer_of_which_all_is_known() -> None:
    known = vars(ready_tokenizer(byte_tokenizer().describe()))
    assert {"bound", "is_quick", "_can_be_cut"} <= known.keys()


@pytest.mark.skipif(host_time.machine_time() is None, reason="this system does not tell who ran")
async def test_what_a_worker_ran_is_its_parents_when_it_has_ended() -> None:
    """Else the doctor would take it for other processes' work."""
    template = "{% if messages[0].content == 'evil' %}" + LOOP + "{% endif %}ok"
    async with some_workers(byte_tokenizer(template)) as workers:
        await workers.submit(CHAT).done
        pid = workers.parent.pid
        assert pid is not None
        before = ticks_of_all(pid)
        with pytest.raises(RequestError):
            await workers.submit(Render(({"role": "user", "content": "evil"},))).done
        # the timer that ended it counts by ticks, more than it ran where others are at work
        await until_async(lambda: (ticks_of_all(pid) - before) / os.sysconf("SC_CLK_TCK") >= 0.3 * LIMITS.cpu_s)


def ticks_of_all(pid: int) -> int:
    return sum(map(host_time._own_ticks, host_time._tree(pid)))
