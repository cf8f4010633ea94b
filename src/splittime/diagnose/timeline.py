"""What the engine did at each instant, from the records of its steps: parts of time, each instant wholly divided.

    idle before a step | the gap before it and the step itself, divided in proportion throughout

Within a step the order of its parts is not used: a request is in it from its plan to its commit, and one that came
meanwhile waited for a mixture. What kept the thread from running comes first, as the kernel and the collector stated it
(`cpu_wait_ns`, `off_cpu_ns`, pauses); the step's own parts share what is left. Of its device's time, prompts have what
goes beyond the usual time of its decode rows:

    prompts = max(0, device - decode(rows, context))      decode: fitted to the steps without prompts (`step_cost`)

`off_cpu_ns` is a stop as far as it goes beyond what is usual for a step (`ledger.derive`).
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy

from splittime.diagnose.books import Books, once
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import overlap_ns, union
from splittime.ledger import derive
from splittime.ledger.account import StageInterval
from splittime.ledger.steps import StepRecord

MIN_QUIET_STEPS = 10  # steps without prompts, to say what such a step takes


class Part(IntEnum):
    """DEVICE: the rest of the device's time, for decode rows and for what every step takes. IDLE: no work."""

    GC = 0
    CPU_WAIT = 1
    STOPPED = 2
    HOST = 3
    SAMPLE = 4
    MOVES = 5
    RANKS = 6
    PROMPTS = 7
    DEVICE = 8
    IDLE = 9


class Timeline:
    """edges_ns: borders, in order. sums_ns [edges, parts]: of each part until there. by_step [steps, parts]: of each
    step with the gap before it."""

    def __init__(self, edges_ns: numpy.ndarray, sums_ns: numpy.ndarray, by_step: numpy.ndarray) -> None:
        self.edges_ns, self.sums_ns, self.by_step = edges_ns, sums_ns, by_step

    def within(self, intervals: Sequence[StageInterval]) -> numpy.ndarray:
        """[intervals, parts]: what of each part lies in each interval."""
        begins = numpy.array([interval.begin_ns for interval in intervals], dtype=float)
        ends = numpy.array([interval.end_ns for interval in intervals], dtype=float)
        return self._until(ends) - self._until(begins)

    def _until(self, at_ns: numpy.ndarray) -> numpy.ndarray:
        if not len(self.edges_ns):
            return numpy.zeros((len(at_ns), len(Part)))
        columns = [numpy.interp(at_ns, self.edges_ns, self.sums_ns[:, part]) for part in Part]
        return numpy.stack(columns, axis=1)


@once
def timeline(books: Books) -> Timeline:
    """Steps in the order of their begins; where two overlap, the earlier one has the instants of both."""
    steps = books.steps
    by_step = _divided(books)
    edges: list[int] = []
    pieces: list[numpy.ndarray] = []
    nothing = numpy.zeros(len(Part))
    for step, parts in zip(steps, by_step, strict=True):
        begin_ns = step.begin_ns - step.host_gap_ns
        if edges and begin_ns < edges[-1]:
            begin_ns = edges[-1]
        edges += [begin_ns, max(begin_ns, step.end_ns)]
        pieces += [nothing, parts]
    sums = numpy.cumsum(pieces, axis=0) if pieces else numpy.zeros((0, len(Part)))
    return Timeline(numpy.array(edges, dtype=float), sums, by_step)


def _divided(books: Books) -> numpy.ndarray:
    """[steps, parts] in ns: each row sums to the step with its host gap."""
    steps = books.steps
    if not steps:
        return numpy.zeros((0, len(Part)))
    found = numpy.zeros((len(steps), len(Part)))
    length = numpy.array([step.length_ns for step in steps], dtype=float)
    found[:, Part.GC] = numpy.minimum(_collecting_ns(books), length)
    found[:, Part.CPU_WAIT] = numpy.minimum([step.cpu_wait_ns or 0 for step in steps], length - found[:, Part.GC])
    room = length - found[:, Part.GC] - found[:, Part.CPU_WAIT]
    usual = derive.usual_off_share(steps)
    found[:, Part.STOPPED] = numpy.minimum([derive.stopped_ns(step, usual) for step in steps], room)
    left = numpy.maximum(0.0, room - found[:, Part.STOPPED]) / numpy.maximum(1.0, length)
    found[:, Part.HOST] = [s.host_gap_ns + s.plan_ns + s.launch_ns + s.commit_ns for s in steps] * left
    found[:, Part.SAMPLE] = [step.sample_ns for step in steps] * left
    found[:, Part.MOVES] = [step.moves_ns for step in steps] * left
    found[:, Part.RANKS] = [min(step.collective_ns, step.device_ns) for step in steps] * left
    device = numpy.array([step.device_ns for step in steps]) * left - found[:, Part.RANKS]
    found[:, Part.PROMPTS] = prompts_ns(steps, numpy.maximum(0.0, device))
    found[:, Part.DEVICE] = numpy.maximum(0.0, device) - found[:, Part.PROMPTS]
    return found


def _collecting_ns(books: Books) -> numpy.ndarray:
    engine = books.facts.process("engine") or books.facts.process("llm") if books.facts is not None else None
    pauses = union((begin_ns, begin_ns + ns) for begin_ns, ns in (engine.pauses if engine is not None else ()))
    if not pauses:
        return numpy.zeros(len(books.steps))
    begins = [step.begin_ns - step.host_gap_ns for step in books.steps]
    return numpy.array([overlap_ns(b, s.end_ns, pauses) for b, s in zip(begins, books.steps, strict=True)], dtype=float)


def prompts_ns(steps: Sequence[StepRecord], device_ns: numpy.ndarray) -> numpy.ndarray:
    """What prompts took of each step's device time: all beyond the decode rows' usual time."""
    prefills = numpy.array([step.prefill_tokens for step in steps])
    decodes = numpy.array([step.decode_tokens for step in steps])
    quiet = (prefills == 0) & (decodes > 0)
    rows = numpy.stack([numpy.ones(len(steps)), decodes, _decode_context(steps)], axis=1)
    if quiet.sum() >= MIN_QUIET_STEPS:
        usual = rows @ step_cost.robust_fit(rows[quiet], device_ns[quiet])
    else:
        usual = device_ns * decodes / numpy.maximum(1, prefills + decodes)
    usual = numpy.where(decodes > 0, usual, 0.0)
    return numpy.where(prefills > 0, numpy.maximum(0.0, device_ns - usual), 0.0)


def _decode_context(steps: Sequence[StepRecord]) -> numpy.ndarray:
    """Cached tokens that the rows of one token read."""
    return numpy.array([sum(start + n for _, start, n in step.rows if n == 1) for step in steps], dtype=float)


def prompt_ns_of_rows(steps: Sequence[StepRecord], line: Timeline) -> dict[str, float]:
    """By request: its own tokens' part of what prompts took of the steps that it was in."""
    found: dict[str, float] = {}
    for step, parts in zip(steps, line.by_step, strict=True):
        if step.prefill_tokens <= 0:
            continue
        for request_id, _, num_tokens in step.rows:
            if num_tokens > 1 or step.decode_tokens == 0:
                own_ns = float(parts[Part.PROMPTS]) * min(1.0, num_tokens / step.prefill_tokens)
                found[request_id] = found.get(request_id, 0.0) + own_ns
    return found
