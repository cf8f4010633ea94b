"""What is sent and when, drawn whole before the first byte leaves: so that a slow server cannot slow the questions.

A schedule is a value with a seed. It can be saved and replayed (`save`, `load_schedule`); its digest says whether two
runs asked the same: as much, and when. The same command run again has the same digest, though its texts begin with
another salt, so that no run finds another's in a cache. Arrivals come from `starts`, prompts and lengths from
`workload` and `traces`; `run` carries it out.

Open loop: `at_ns` is the intended start, from the run's begin. Closed loop: `at_ns` is None, and so many workers as
`concurrency` says each take the next request when the last has ended; its intended start is that instant.
A session's later turns: `think_ns` after the *expected* end of the turn before (`at_ns` of the turn before plus
`expected_ns`), or after its real end if that is later; the intended start counts from the former, so that a slow answer
is not forgiven (HdrHistogram, issue 148).

Which request goes to which server and when: a schedule over one or two servers, and over processes.

A job is a planned request with its place in this run. One server: the schedule as it is. Two: `target.Interleave` says
how; no request is lost and none is made up, so each arm gets every request of the schedule exactly once.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from splittime.bench.book.records import Phase
from splittime.core.errors import ConfigError, NotFound
from splittime.core.files import write_whole
from splittime.wire.target import Interleave

FORMAT = 1
MAX_NS = 2**59  # eighteen years
MAX_OUTPUT_TOKENS = 2**31

Message = dict[str, Any]


class Planned(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One request to be sent.

    prompt: token ids (exact, preferred) or a text, for the completions endpoint; messages: a chat, instead of a prompt.
    expected_prompt_tokens, expected_cached_tokens: what the server should find, if known beforehand.
    output_tokens: asked for exactly (with ignore_eos, where the server knows it) if `exact_output`, else at most.
    cancel_after_ns: hang up so long after sending. read_delay_ns: wait so long before reading each chunk.
    think_ns, expected_ns: of a session, see above. body: more fields for the request's JSON.
    """

    index: int
    at_ns: int | None
    output_tokens: int
    prompt: tuple[int, ...] | str = ()
    messages: tuple[Message, ...] | None = None
    exact_output: bool = True
    phase: Phase = Phase.MEASURED
    expected_prompt_tokens: int | None = None
    expected_cached_tokens: int | None = None
    session: int | None = None
    turn: int = 0
    think_ns: int = 0
    expected_ns: int = 0
    cancel_after_ns: int | None = None
    read_delay_ns: int = 0
    body: dict[str, Any] = {}
    tags: dict[str, str] = {}


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """All requests in the order of their index. `concurrency` is None for an open loop.

    duration_ns: no request is begun from then on, counted from the run's begin; None: its requests end it.
    measured_from_ns, measured_until_ns: of an open loop, the window of intended starts that are MEASURED; None in a
    closed loop, where the window is from the first MEASURED request's start to the last one's end.
    notes: what drawing it had to change, in sentences for people (lengths that were cut, rows used twice, ...).
    """

    format: int = FORMAT
    seed: int
    concurrency: int | None = None
    duration_ns: int | None = None
    measured_from_ns: int | None = None
    measured_until_ns: int | None = None
    settings: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    requests: tuple[Planned, ...]

    @property
    def digest(self) -> str:
        """Returns a digest of what is asked and when (texts by their sizes), whatever the settings' wording."""
        whole = hashlib.blake2b(digest_size=8)
        whole.update(msgspec.msgpack.encode((self.seed, self.concurrency, self.duration_ns)))
        for planned in self.requests:
            asked = msgspec.structs.replace(planned, prompt="", messages=None, expected_cached_tokens=None)
            whole.update(msgspec.msgpack.encode((asked, _sizes(planned))))
        return whole.hexdigest()


def _sizes(planned: Planned) -> list[int]:
    """Returns the prompts' sizes in tokens or words. A salt has always the same size, in both."""
    prompt = planned.prompt
    own = len(prompt) if isinstance(prompt, tuple) else len(prompt.split())
    return [own, *(_words(message.get("content")) for message in planned.messages or ())]


def _words(content: Any) -> int:
    """Counts the words of a message's text, or of its parts' texts. A part of another kind counts as one."""
    if isinstance(content, str):
        return len(content.split())
    if isinstance(content, list):
        return sum(_words(part.get("text", "1")) for part in content if isinstance(part, dict))
    return 0


def save(schedule: Schedule, path: Path) -> None:
    """One JSON document a line: what all requests share, then each request. Raises `ConfigError`."""
    lines = [msgspec.json.encode(msgspec.structs.replace(schedule, requests=()))]
    lines += [msgspec.json.encode(planned) for planned in schedule.requests]
    write_whole(path, b"\n".join(lines) + b"\n", param="save_schedule")


def load_schedule(path: Path) -> Schedule:
    """Raises `NotFound` for no file and `ConfigError` for one that is no schedule."""
    if not path.is_file():
        raise NotFound(f"no schedule at {path}", param="schedule", value=str(path))
    try:
        head, *rest = path.read_bytes().splitlines()
        schedule = msgspec.json.decode(head, type=Schedule)
        check_head(schedule)
        requests = tuple(_requests(rest))
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ConfigError(f"{path} is not a schedule: {error}", param="schedule", value=str(path)) from error
    return msgspec.structs.replace(schedule, requests=requests)


def _requests(lines: list[bytes]) -> Iterator[Planned]:
    for place, line in enumerate(lines):
        planned = msgspec.json.decode(line, type=Planned)
        if planned.index != place:
            raise ValueError(f"request {place} says it is number {planned.index}")
        check_planned(planned)
        yield planned


def check_head(schedule: Schedule) -> None:
    """Raises `ValueError` for what no run can be made of."""
    if schedule.format != FORMAT:
        raise ValueError(f"its format is {schedule.format}, this splittime reads {FORMAT}")
    if schedule.requests:
        raise ValueError("its requests stand in its first line, not in a line each")
    if schedule.concurrency is not None and schedule.concurrency < 1:
        raise ValueError(f"concurrency is {schedule.concurrency}; it must be at least 1")
    for name in ("duration_ns", "measured_from_ns", "measured_until_ns"):
        _check_range(name, getattr(schedule, name), 0, MAX_NS)
    if (schedule.measured_until_ns or MAX_NS) <= (schedule.measured_from_ns or 0):
        raise ValueError("its measured window ends before it begins")


def check_planned(planned: Planned) -> None:
    _check_range("output_tokens", planned.output_tokens, 1, MAX_OUTPUT_TOKENS)
    for name in ("at_ns", "think_ns", "expected_ns", "cancel_after_ns", "read_delay_ns"):
        _check_range(f"request {planned.index}: {name}", getattr(planned, name), 0, MAX_NS)


def _check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ValueError(f"{name} is {value}; it may be {low} to {high:,}")


class Job(msgspec.Struct, frozen=True, gc=False):
    """`at_ns`: the intended start from the run's begin; None in a closed loop."""

    planned: Planned
    arm: int
    at_ns: int | None

    @property
    def is_measured(self) -> bool:
        return self.planned.phase is Phase.MEASURED


def jobs_of(schedule: Schedule, num_arms: int, interleave: Interleave, block_ns: int) -> list[Job]:
    """All jobs, in the order in which they are to be begun."""
    requests = with_instants(schedule)
    if num_arms == 1:
        jobs = [Job(planned, 0, planned.at_ns) for planned in requests]
    elif interleave is Interleave.PAIRED:
        jobs = [Job(p, arm, p.at_ns) for p in requests for arm in in_turn(p.index, num_arms)]
    elif schedule.concurrency is None:
        jobs = in_blocks(requests, num_arms, block_ns)
    else:
        hint = "give a rate, or compare the two paired"
        raise ConfigError("blocks need an open loop: a closed loop has no instants", param="interleave", hint=hint)
    if schedule.concurrency is None:
        jobs.sort(key=lambda job: job.at_ns or 0)
    return jobs


def with_instants(schedule: Schedule) -> list[Planned]:
    """The requests; of an open loop each with its intended start, also a session's later turns (see `schedule`)."""
    if schedule.concurrency is not None:
        return [msgspec.structs.replace(p, at_ns=None) if p.at_ns is not None else p for p in schedule.requests]
    before: dict[int, Planned] = {}
    requests = []
    for planned in schedule.requests:
        last = before.get(planned.session) if planned.session is not None else None
        if planned.at_ns is None:
            if last is None or last.at_ns is None:
                what = f"request {planned.index} of an open loop has no intended start"
                raise ConfigError(what, param="schedule", hint="give it at_ns, or the schedule a concurrency")
            at_ns = last.at_ns + last.expected_ns + planned.think_ns
            planned = msgspec.structs.replace(planned, at_ns=at_ns)
        if planned.session is not None:
            before[planned.session] = planned
        requests.append(planned)
    return requests


def in_turn(index: int, num_arms: int) -> list[int]:
    """The arms in the order of this index: A B, B A, A B, ..."""
    return [(index + step) % num_arms for step in range(num_arms)]


def in_blocks(requests: Sequence[Planned], num_arms: int, block_ns: int) -> list[Job]:
    """Each stretch of `block_ns` of the schedule to every arm, one after the other. A session stays with its first
    turn's block."""
    session_block: dict[int, int] = {}
    jobs = []
    for planned in requests:
        at_ns = planned.at_ns or 0
        block = at_ns // block_ns
        if planned.session is not None:
            block = session_block.setdefault(planned.session, block)
        for place, arm in enumerate(in_turn(block, num_arms)):
            jobs.append(Job(planned, arm, at_ns + (block * (num_arms - 1) + place) * block_ns))
    return jobs


def split(jobs: Sequence[Job], workers: int) -> list[list[Job]]:
    """The jobs of each process, dealt out in turn; a session, and a request's two arms, stay together."""
    parts: list[list[Job]] = [[] for _ in range(workers)]
    for job in jobs:
        planned = job.planned
        parts[(planned.index if planned.session is None else planned.session) % workers].append(job)
    return parts
