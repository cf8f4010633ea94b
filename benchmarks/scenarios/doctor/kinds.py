"""The loads of the doctor's scenarios, each a function of its seed and of the model that is asked (`loads.Size` says
how further seeds and slower models differ)."""

import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from benchmarks.scenarios.doctor.loads import (
    LEAST_REQUESTS,
    MOST_S,
    TUNED_SEED,
    Ask,
    Size,
    chats,
    ids,
    instants,
    schedule,
)
from benchmarks.scenarios.doctor.patients import Patient
from splittime.bench.schedule import Planned, Schedule

DURATION_S = 9.0
LEAST_SHARED = 400  # tokens: what is shorter has no part that it could be told by

Load = Callable[[int, Patient], Schedule]


def poisson(rate: float, prompt: int, output: int, duration_s: float = DURATION_S, is_ill: bool = True) -> Load:
    def load(seed: int, patient: Patient) -> Schedule:
        size = Size.of(seed, patient, is_ill)
        return schedule(chats(random.Random(seed), *size.load(rate, prompt, output, duration_s)), seed)

    return load


def chats_and_long(rate: float, output: int, long_tokens: int, every_s: float, chat_tokens: int = 16) -> Load:
    def load(seed: int, patient: Patient) -> Schedule:
        rng, size = random.Random(seed), Size.of(seed, patient)
        rate_now, duration_s, prompt, answer = size.load(rate, chat_tokens, output, DURATION_S)
        asks: list[Ask] = chats(rng, rate_now, duration_s, prompt, answer)
        tokens = patient.tokens(long_tokens) - rng.randrange(100) * (seed != TUNED_SEED)
        pause_s = max(every_s, 1.5 * tokens * patient.pace.token_s)
        asks += [(0.5 + pause_s * i, ids(rng, tokens), 2) for i in range(int((duration_s - 0.5) / pause_s))]
        return schedule(asks, seed)

    return load


Make = Callable[[random.Random, tuple[int, ...], Callable[[float], int]], tuple[int, ...]]


def made_of(make: Make, shared: int, rate: float, output: int = 12, is_ill: bool = True, groups: int = 1) -> Load:
    """Prompts made of a shared part, one of so many, and of something of their own; make gets a function that says how
    long what is written down is for this seed and model. The rate is as if nothing were shared."""

    def load(seed: int, patient: Patient) -> Schedule:
        rng, size = random.Random(seed), Size.of(seed, patient, is_ill)
        length = shared_tokens(shared, size)
        parts = [ids(rng, length) for _ in range(groups)]
        rate_now, duration_s, _, answer = size.load(rate, shared, output, DURATION_S)
        rate_now = max(LEAST_REQUESTS / MOST_S, rate_now * size.tokens(shared) / length)
        duration_s = max(duration_s, min(MOST_S, LEAST_REQUESTS / rate_now))
        found = enumerate(instants(rng, rate_now, duration_s))
        return schedule([(at_s, make(rng, parts[i % groups], size.tokens), answer) for i, at_s in found], seed)

    return load


def shared_tokens(written: int, size: Size) -> int:
    """Returns how long a part is that prompts share: on a slow model too long enough to be told by its parts."""
    return max(min(written, LEAST_SHARED), size.tokens(written))


def behind(tokens: int) -> Make:
    """Something of its own behind the shared part."""
    return lambda rng, common, of_size: common + ids(rng, of_size(tokens))


def texts(seed: int, patient: Patient) -> Schedule:
    rng, size = random.Random(seed), Size.of(seed, patient)
    words = [f"word{i}" for i in range(200)]
    rate, duration_s, _, answer = size.load(5, 16, 8, DURATION_S)
    found = instants(rng, rate, duration_s)
    return schedule([(at_s, " ".join(rng.choices(words, k=6)), answer) for at_s in found], seed)


def wide_answers(seed: int, patient: Patient) -> Schedule:
    """Long answers with log-probabilities: about a kilobyte a token."""
    size = Size.of(seed, patient)
    wide: dict[str, Any] = {"logprobs": 10}
    rate, duration_s, prompt, answer = size.load(3, 16, 500, DURATION_S)
    plain = schedule(chats(random.Random(seed), rate, min(duration_s, DURATION_S), prompt, max(100, answer)), seed)
    return _with_body(plain, wide)


def from_the_start(seed: int, patient: Patient) -> Schedule:
    rng, size = random.Random(seed), Size.of(seed, patient)
    rate, _, prompt, output = size.load(10, 24, 8, DURATION_S)
    requests = [
        Planned(index=i, at_ns=int(1e9 * i / rate), prompt=ids(rng, prompt), output_tokens=output)
        for i in range(int(16 * rate))
    ]
    return Schedule(seed=seed, requests=tuple(requests))


def long_context(seed: int, patient: Patient) -> Schedule:
    """One long prompt, and when it is in the prefix cache, many that begin with it."""
    rng, size = random.Random(seed), Size.of(seed, patient)
    common = ids(rng, size.tokens(1000))
    later = [5.0 + at_s for at_s in instants(rng, 4.0 * size.load_factor, 11.0 * size.duration)]
    return schedule([(at_s, common + ids(rng, 8), 100) for at_s in [0.0, *later]], seed)


def mixed_answers(seed: int, patient: Patient) -> Schedule:
    """Every other answer is long."""
    rng, size = random.Random(seed), Size.of(seed, patient)
    found = chats(rng, *size.load(12, 24, 63, DURATION_S))
    short, long = size.tokens(6), size.tokens(120)
    return schedule([(at_s, prompt, short if i % 2 else long) for i, (at_s, prompt, _) in enumerate(found)], seed)


def asking(load: Load, **body: Any) -> Load:
    """The same requests, each with these fields."""
    return lambda seed, patient: _with_body(load(seed, patient), body)


def each(load: Load, body_of: Callable[[Planned], dict[str, Any]]) -> Load:
    """The same requests, each with fields of its own."""

    def ask(seed: int, patient: Patient) -> Schedule:
        plain = load(seed, patient)
        bodies = (msgspec.structs.replace(one, body=body_of(one)) for one in plain.requests)
        return msgspec.structs.replace(plain, requests=tuple(bodies))

    return ask


def long_ones_last(load: Load) -> Load:
    """The same requests; prompts of more than twice the usual length are of a low priority."""

    def ask(seed: int, patient: Patient) -> Schedule:
        plain = load(seed, patient)
        usual = statistics.median(len(one.prompt) for one in plain.requests)
        ranked = each(lambda *_: plain, lambda one: {"priority": 10 * (len(one.prompt) > 2 * usual)})
        return ranked(seed, patient)

    return ask


def in_forms(load: Load, forms: Callable[[int], dict[str, Any]]) -> Load:
    """The same requests, held to a JSON schema each; an answer may end before its length."""
    asked = each(load, lambda planned: {"response_format": _form(forms(planned.index))})

    def ask(seed: int, patient: Patient) -> Schedule:
        plain = asked(seed, patient)
        free = (msgspec.structs.replace(one, exact_output=False) for one in plain.requests)
        return msgspec.structs.replace(plain, requests=tuple(free))

    return ask


def _form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _with_body(plain: Schedule, body: dict[str, Any]) -> Schedule:
    requests = tuple(msgspec.structs.replace(planned, body=body) for planned in plain.requests)
    return msgspec.structs.replace(plain, requests=requests)


def messages(load: Load, words: int) -> Load:
    """The same times and lengths of answers, asked as chats: a system's message and so many words of a user."""

    def ask(seed: int, patient: Patient) -> Schedule:
        plain, rng = load(seed, patient), random.Random(seed)
        said = (" ".join(f"word{rng.randrange(500)}" for _ in range(words)) for _ in plain.requests)
        chat = (
            msgspec.structs.replace(one, prompt=(), messages=({"role": "user", "content": text},))
            for one, text in zip(plain.requests, said, strict=True)
        )
        return msgspec.structs.replace(plain, requests=tuple(chat))

    return ask


def hung_up(load: Load, after: float, every: int = 1) -> Load:
    """The same requests, of which each so-manieth is given up after this part of what it takes alone."""

    def ask(seed: int, patient: Patient) -> Schedule:
        plain = load(seed, patient)
        left = (
            one if one.index % every else msgspec.structs.replace(one, cancel_after_ns=_part_ns(one, patient, after))
            for one in plain.requests
        )
        return msgspec.structs.replace(plain, requests=tuple(left))

    return ask


def asked_again(load: Load, after: float, tries: int) -> Load:
    """Callers who give up after this part of what their request takes alone, and ask the same at once again."""

    def ask(seed: int, patient: Patient) -> Schedule:
        return _in_order(load(seed, patient), lambda one: _tries(one, _part_ns(one, patient, after), tries))

    return ask


def _tries(planned: Planned, patience_ns: int, tries: int) -> Iterator[Planned]:
    assert planned.at_ns is not None
    for number in range(tries):
        at_ns = planned.at_ns + number * (patience_ns + 50_000_000)
        yield msgspec.structs.replace(planned, at_ns=at_ns, cancel_after_ns=patience_ns)


def _in_order(plain: Schedule, made: Callable[[Planned], Iterator[Planned]]) -> Schedule:
    every = sorted((one for planned in plain.requests for one in made(planned)), key=lambda one: one.at_ns or 0)
    numbered = (msgspec.structs.replace(one, index=index) for index, one in enumerate(every))
    return msgspec.structs.replace(plain, requests=tuple(numbered))


def _part_ns(planned: Planned, patient: Patient, part: float) -> int:
    return int(part * 1e9 * patient.pace.work_s(len(planned.prompt), planned.output_tokens))


def burst(seed: int, patient: Patient) -> Schedule:
    """A steady few, and one sender's whole batch at once, twice."""
    rng, size = random.Random(seed), Size.of(seed, patient)
    rate, _, prompt, answer = size.load(6, 24, 12, MOST_S)
    steady = chats(rng, min(rate, 6.0), MOST_S, prompt, answer)
    long, output = size.tokens(200), size.tokens(40)
    at_once = [(at_s + i * 0.0005, ids(rng, long), output) for at_s in (3.5, 9.0) for i in range(40)]
    return schedule([*steady, *at_once], seed)


def one_burst(seed: int, patient: Patient) -> Schedule:
    """Seventy at once, and before and after it hardly anybody."""
    rng, size = random.Random(seed), Size.of(seed, patient)
    few = chats(rng, 1.0, 10.0, size.tokens(30), size.tokens(20))
    at_once = [(3.0 + i * 0.0005, ids(rng, size.tokens(60)), size.tokens(60)) for i in range(70)]
    return schedule([*few, *at_once], seed)


def short_and_long(seed: int, patient: Patient) -> Schedule:
    """Nearly more short prompts than can be served, and long ones among them."""
    rng, size = random.Random(seed), Size.of(seed, patient)
    asks = chats(rng, *size.load(60, 340, 4, 12.0))
    asks += [(0.5 + 0.9 * i, ids(rng, size.tokens(1500)), size.tokens(6)) for i in range(10)]
    return schedule(asks, seed)


def by_turns(drops: bool, is_ill: bool = True) -> Load:
    """Conversations of an agent: a user asks, the model thinks, calls and gets a result. drops: the client leaves the
    thoughts of earlier turns out; those of the latest one stay."""

    def load(seed: int, patient: Patient) -> Schedule:
        rng, size = random.Random(seed), Size.of(seed, patient, is_ill)
        system = ids(rng, size.tokens(200))
        talks = [_agent(rng, system, drops, lambda n: max(3 * n // 4, size.tokens(n))) for _ in range(5)]
        order = sorted((turn + place % 2, place, turn) for place, talk in enumerate(talks) for turn in range(len(talk)))
        prompts = [talks[place][turn] for _, place, turn in order]
        answer = size.tokens(8)
        mean = sum(map(len, prompts)) / len(prompts)
        pause_s = max(0.3, 1.3 * patient.pace.work_s(mean * (0.6 if drops else 0.45), answer))
        return schedule([(pause_s * i, prompt, answer) for i, prompt in enumerate(prompts)], seed)

    return load


def _agent(
    rng: random.Random, system: tuple[int, ...], drops: bool, of_size: Callable[[int], int]
) -> list[tuple[int, ...]]:
    prompts, past = [], system
    for _ in range(3):
        asked = past + ids(rng, of_size(60))
        thought, rest = ids(rng, of_size(150)), ids(rng, of_size(450))
        prompts += [asked, asked + thought + rest]
        past = asked + (() if drops else thought) + rest
    return prompts


def sliding(seed: int, patient: Patient) -> Schedule:
    """A client that sends the latest messages behind a system's, and cuts one off at each turn."""
    rng, size = random.Random(seed), Size.of(seed, patient)
    system, said = ids(rng, size.tokens(150)), [ids(rng, max(70, size.tokens(150))) for _ in range(46)]
    pause_s = max(0.25, 1.6 * patient.pace.work_s(len(system) + 6 * len(said[0]), size.tokens(8)))
    turns = range(max(24, min(40, int(MOST_S / pause_s))))
    prompts = [system + tuple(token for one in said[i : i + 6] for token in one) for i in turns]
    return schedule([(pause_s * i, prompt, size.tokens(8)) for i, prompt in enumerate(prompts)], seed)
