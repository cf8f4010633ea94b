"""A load that shows every kind of step within a minute: stairs of more and more requests at a time, climbed twice.

    1 2 4 8 ... slots   1 2 4 8 ... slots        each stair for its share of the time, a closed loop

On each stair prompts of all lengths are read while other requests decode, so its steps differ in rows, in context, in
tokens of prompts and in how these are mixed. How long prompts and answers may be depends on how fast the server was on
the stairs before: the first prompts of a stair should be read within `READING` of its time, and an answer should end
within the rest. The stairs are climbed twice, since a machine's pace changes within a minute: many rows must not look
slow because they came in a slow half minute. A server that ended fewer than `REQUESTS` by then climbs on.

The server must be a splittime server, which keeps the books. It must be idle: others' requests would wait, and would be
measured too. Prompts are drawn anew, so that no cache has them; their blocks leave the prefix cache like those of any
prompt that nobody sends again.
"""

import asyncio
import secrets
import statistics
from collections.abc import AsyncIterator, Callable, Sequence

import aiohttp
import msgspec

from splittime.bench import servers
from splittime.bench.book.records import Arm
from splittime.bench.draw import draw
from splittime.bench.run import run_schedule
from splittime.bench.servers import converted
from splittime.bench.spec import LoadSpec
from splittime.core.errors import ConfigError
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord
from splittime.wire.scrape import ask_first
from splittime.wire.target import OUTSIDE, RunOptions, Target, foreign_server

FACTS = "/ledger/facts"
TIMES, MOST_TIMES = 2, 12  # that all stairs are climbed: more often where a slow server ends too few requests
REQUESTS = 24  # that a replica can be made of
READING = 0.4  # of a stair's time
KV_SHARE = 0.8  # of the cache, for a stair's requests
LISTEN_S, LISTENINGS = 0.2, 5
FIRST_PROMPT, FIRST_ANSWER, FIRST_REQUESTS = 64, 16, 3
SHORTEST, SHORTEST_ANSWER, LONGEST_ANSWER = 16, 4, 128
TIMEOUT_S = 120.0

OnStair = Callable[[int, int, int], None]


class Stair(msgspec.Struct, frozen=True):
    """A load of `rows` requests at a time. prompt, answer: the most tokens of a prompt and of an answer."""

    rows: int
    seconds: float
    prompt: int
    answer: int

    def load(self, seed: int) -> LoadSpec:
        return LoadSpec(
            concurrency=self.rows,
            duration_s=self.seconds,
            prompt_form="ids",
            input_tokens=f"uniform:{min(SHORTEST, self.prompt)}:{self.prompt}",
            output_tokens=f"uniform:{max(2, self.answer // 4)}:{self.answer}",
            seed=seed,
        )


class ServerSizes(msgspec.Struct, frozen=True):
    """What a stair has to keep within."""

    slots: int
    context: int
    kv_tokens: int
    vocab_size: int

    def rows(self) -> list[int]:
        """Returns 1, 2, 4, ... and all slots."""
        return [*(1 << power for power in range(self.slots.bit_length()) if 1 << power < self.slots), self.slots]


async def climb(
    target: Target, seconds: float, is_forced: bool = False, on_stair: OnStair = lambda rows, done, total: None
) -> list[Arm]:
    """Returns the server's books of each stair. seconds: of all stairs together. is_forced: also if others use the
    server. on_stair: called with the number of requests at a time that comes next, how many stairs are done, and how
    many there are. Raises ConfigError for a server that keeps no books or is at work."""
    sizes = await _sizes(target, is_forced)
    rows, done = sizes.rows(), 0
    num_stairs = len(rows) * TIMES
    arms = [await _stand(target, Stair(1, seconds, FIRST_PROMPT, FIRST_ANSWER), sizes, 0, FIRST_REQUESTS)]
    while done < num_stairs or (done < MOST_TIMES * len(rows) and sum(len(arm.accounts) for arm in arms) < REQUESTS):
        one = rows[done % len(rows)]
        on_stair(one, done, max(num_stairs, done + 1))
        done += 1
        stair = stair_of(one, seconds / num_stairs, sizes, [step for arm in arms for step in arm.steps])
        arms.append(await _stand(target, stair, sizes, done))
    return arms


def stair_of(rows: int, seconds: float, sizes: ServerSizes, steps: Sequence[StepRecord]) -> Stair:
    """Returns the stair of this many rows with prompts and answers that fit into its time and into the cache, by what
    the steps so far took."""
    token_ns, step_ns = _pace(steps)
    answer_ns = step_ns * 2  # with twice the rows, at the worst
    answer = _within(seconds * 1e9 * (1 - READING) / answer_ns, SHORTEST_ANSWER, LONGEST_ANSWER)
    room = min(sizes.context - answer, sizes.kv_tokens * KV_SHARE / rows - answer)
    in_time = 2 * seconds * 1e9 * READING / (rows * token_ns)  # the mean is half of the longest
    return Stair(rows, seconds, _within(min(room, in_time), 2, sizes.context), answer)


def _pace(steps: Sequence[StepRecord]) -> tuple[float, float]:
    """Returns ns for a token of a prompt, and for the slowest usual step that only decodes."""
    reading = [step for step in steps if step.prefill_tokens]
    tokens = sum(step.prefill_tokens for step in reading)
    token_ns = sum(step.end_ns - step.begin_ns for step in reading) / max(1, tokens)
    decoding = [step for step in steps if not step.prefill_tokens]
    most = max((len(step.rows) for step in decoding), default=0)
    full = [step.end_ns - step.begin_ns for step in decoding if 2 * len(step.rows) > most]
    return max(token_ns, 1.0), max(statistics.median(full) if full else 0.0, token_ns, 1.0)


def _within(value: float, least: int, most: int) -> int:
    return max(least, min(most, int(value)))


async def _sizes(target: Target, is_forced: bool) -> ServerSizes:
    """Raises ConfigError for a server that keeps no books, and for one that is at work."""
    async with aiohttp.ClientSession() as session:
        answer = await ask_first(session, target, FACTS)  # before anything is timed: another server is told at once
        facts: ServerFacts | None = converted(answer.json, ServerFacts)
        if facts is None:
            raise foreign_server(f"{target.base_url}{FACTS}", answer.status)
        arm = await servers.open_arm(session, target)
        if arm.kind != "splittime":
            words = f"{target.url} is no splittime server but {arm.kind}"
            raise ConfigError(words, param="url", value=target.url, hint=OUTSIDE)
        busiest = max([number async for number in _at_work(session, arm, target)], default=0.0)
    if busiest and not is_forced:
        hint = "Wait until it is idle. --force measures all the same, and makes its requests wait."
        raise ConfigError(f"{target.url} is at work: {busiest:g} requests", param="url", value=busiest, hint=hint)
    settings = facts.settings
    return ServerSizes(
        settings["max_num_seqs"],
        facts.max_model_len,
        settings["num_blocks"] * settings["block_size"],
        settings.get("vocab_size") or 0,
    )


async def _at_work(session: aiohttp.ClientSession, arm: Arm, target: Target) -> AsyncIterator[float]:
    """Yields how many requests the server has, `LISTENINGS` times, `LISTEN_S` apart."""
    for _ in range(LISTENINGS):
        gauges = await servers.sample(session, arm, target)
        yield (gauges.running or 0.0) + (gauges.waiting or 0.0)
        await asyncio.sleep(LISTEN_S)


async def _stand(target: Target, stair: Stair, sizes: ServerSizes, seed: int, num_requests: int | None = None) -> Arm:
    spec = stair.load(seed)
    if num_requests is not None:
        spec = msgspec.structs.replace(spec, num_requests=num_requests, duration_s=None)
    schedule = draw(
        spec, vocab_size=sizes.vocab_size, max_model_len=sizes.context, block_size=None, salt=secrets.token_hex(6)
    )
    run = await run_schedule(schedule, [target], RunOptions(workers=0, timeout_s=TIMEOUT_S, sample_interval_s=1.0))
    return run.arms[0]
