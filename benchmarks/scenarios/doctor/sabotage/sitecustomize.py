"""Put on PYTHONPATH by the doctor's scenarios, so that a real server falls ill:

SABOTAGE=host         burns 4 ms of Python before each step, or two and a half times what a step takes
SABOTAGE=gc           keeps so many objects alive in the engine process that a collection takes 50 ms, and has them
                      collected twice a second
SABOTAGE=guesses      has the engine guess 12 tokens at random in most rows, and verify them whatever that costs
SABOTAGE=tokenizer    takes 60 ms longer for each text
SABOTAGE=loop         holds up the server's event loop for 150 ms, 100 ms after the last time
SABOTAGE=deaf         has the engine never hear that a caller has gone
SABOTAGE=looks_back   burns time before each step that grows with the answers: for each of their tokens so far a 25th of
                      what a step takes (SABOTAGE_STEP_S)
SABOTAGE=late         has the engine's loop wake 60 ms late when it had nothing to do
SABOTAGE=masks        takes 400 ms longer to compile each form

What is said in ms is as much longer as a step (SABOTAGE_STEP_S) is longer than 8 ms.
"""

import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

NUM_GUESSES, GUESSING_SHARE = 12, 0.7
STEP_S = float(os.environ.get("SABOTAGE_STEP_S", "0.001"))
SLOWER = max(1.0, STEP_S / 0.008)
HOST_S = max(0.004, 2.5 * STEP_S)
COLLECT_EVERY_S, COLLECT_S, OBJECTS = 0.5, 0.05, 500_000
TOKENIZE_S, LOOP_S, LATE_S, COMPILE_S = (SLOWER * seconds for seconds in (0.06, 0.15, 0.06, 0.4))
TOKEN_PART = 0.04
IN_SERVER = ("tokenizer", "loop")  # the others in the engine process


def _slower(whole: type, name: str, burn: Callable[[Any], None]) -> None:
    plain = getattr(whole, name)

    def slow(self, *args, **kwargs):
        burn(self)
        return plain(self, *args, **kwargs)

    setattr(whole, name, slow)


def _spoil_host(crank_class: type) -> None:
    def dawdle(crank: Any) -> None:
        until = time.monotonic() + HOST_S
        while crank.engine.scheduler.has_requests and time.monotonic() < until:
            pass

    _slower(crank_class, "turn", dawdle)


def _spoil_host_by_answers(crank_class: type) -> None:
    token_s = TOKEN_PART * STEP_S

    def dawdle(crank: Any) -> None:
        until = time.monotonic() + token_s * sum(state.num_output for state in crank.engine.scheduler.running)
        while time.monotonic() < until:
            pass

    _slower(crank_class, "turn", dawdle)


def _spoil_hearing(crank_class: type) -> None:
    crank_class.abort = lambda crank, request_id: None  # type: ignore[attr-defined]


def _spoil_waking(inbox_class: type) -> None:
    """Only who waited for something to come is late: not who looks between two steps."""
    plain = inbox_class.wait  # type: ignore[attr-defined]

    def wait(inbox: Any, timeout_s: float | None) -> bool:
        came = plain(inbox, timeout_s)
        if came:
            time.sleep(LATE_S)
        return came

    inbox_class.wait = wait  # type: ignore[attr-defined]


def _spoil_compiling(grammars_class: type) -> None:
    _slower(grammars_class, "compile", lambda grammars: time.sleep(COMPILE_S))


def _spoil_heap(crank_class: type) -> None:
    """What exists when the heap is frozen, at the end of a start, is never collected."""
    from splittime.drive.host_time import YOUNG_GENERATION

    while gc.get_threshold()[0] != YOUNG_GENERATION:
        time.sleep(0.05)
    kept: list[list[None]] = []
    while True:
        begin_s = time.thread_time()
        gc.collect()
        if time.thread_time() - begin_s < COLLECT_S:
            kept += [[] for _ in range(OBJECTS)]
        time.sleep(COLLECT_EVERY_S)


def _spoil_guesses(drafter_class: type) -> None:
    def draft(drafter: Any, plan: Any, result: Any, look: Any) -> Any:
        from splittime.runner.drafting import Draft  # by now the runner has loaded it

        asked = [row.request_id for row in result.rows if row.token_ids and random.random() < GUESSING_SHARE]
        return {name: Draft(tuple(random.randrange(200, 1000) for _ in range(NUM_GUESSES)), ()) for name in asked}

    drafter_class.draft = draft  # type: ignore[attr-defined]


def _spoil_tokenizer(tokenizer_class: type) -> None:
    _slower(tokenizer_class, "encode", lambda tokenizer: time.sleep(TOKENIZE_S))


def _spoil_loop(server_class: type) -> None:
    """uvicorn's server has a tick of its own, ten times a second."""
    plain = server_class.on_tick  # type: ignore[attr-defined]

    async def hold_up(server: Any, counter: int) -> bool:
        time.sleep(LOOP_S)
        return await plain(server, counter)

    server_class.on_tick = hold_up  # type: ignore[attr-defined]


ILLNESSES = {
    "host": ("splittime.drive.crank", "Crank", _spoil_host),
    "gc": ("splittime.drive.crank", "Crank", _spoil_heap),
    "deaf": ("splittime.drive.crank", "Crank", _spoil_hearing),
    "looks_back": ("splittime.drive.crank", "Crank", _spoil_host_by_answers),
    "late": ("splittime.drive.loop", "Inbox", _spoil_waking),
    "masks": ("splittime.runner.grammars", "Grammars", _spoil_compiling),
    "guesses": ("splittime.runner.suffix_drafter", "SuffixDrafter", _spoil_guesses),
    "tokenizer": ("splittime.text.tokenizer", "Tokenizer", _spoil_tokenizer),
    "loop": ("splittime.web.serving", "ManyAcceptingServer", _spoil_loop),
}


def _when_loaded(module: str, name: str, spoil: Callable[[type], None]) -> None:
    while not hasattr(sys.modules.get(module), name):
        time.sleep(0.001)  # before a text worker is forked
    spoil(getattr(sys.modules[module], name))


def _is_meant() -> bool:
    """The process that is to fall ill; not the benchmark itself."""
    name = os.environ["SABOTAGE"]
    words = {"serve"} if name in IN_SERVER else {"splittime.assemble.worker"}
    if name == "tokenizer":
        words.add("splittime.text.process")
    return bool(words & set(sys.orig_argv))


if os.environ.get("SABOTAGE") and _is_meant():
    threading.Thread(target=_when_loaded, args=ILLNESSES[os.environ["SABOTAGE"]], daemon=True).start()
