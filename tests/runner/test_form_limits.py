"""Forms of strangers: what they may take, where they walk, and what is kept of them."""

import contextlib
import fcntl
import os
import resource
import signal
import socket
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path

import msgspec
import numpy as np
import pytest
from test_grammars import ids, walked

from benchmarks.scenarios.form_schemas import schemas
from patience import until
from splittime.assemble.model_source import load_tokenizer, locate
from splittime.core.background import NICER
from splittime.core.errors import Overloaded, RequestError
from splittime.core.forked import ForkLimits, frame, read_message
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted
from splittime.kernels.draw import has_bits
from splittime.runner import far_forms, form_process
from splittime.runner import grammars as compiled
from splittime.runner.batch import Slots
from splittime.runner.far_forms import FarWalk, FormGone, FormProcess
from splittime.runner.form_process import Tried, is_small
from splittime.runner.form_walk import FormPlace, FoundMask, FoundMasks, GrammarWalk, key_of
from splittime.runner.grammars import FormMasks, Grammars
from splittime.runner.slot import Slot
from splittime.text import grammars

pytestmark = pytest.mark.timeout(120)
PASSWORD = {
    "type": "string",
    "minLength": 8,
    "maxLength": 64,
    "allOf": [{"pattern": "[a-z]"}, {"pattern": "[A-Z]"}, {"pattern": "[0-9]"}, {"pattern": "[!@#$%]"}],
}
PRODUCTS = {"allOf": [{"type": "integer", "multipleOf": number} for number in (101, 103, 107, 109)]}
SLOW_LATER = grammars.of_lark('start: X "!" A\nX: /x+/\nA: /(a{1000}b{1000}){50}/', "grammar")
LARGE = grammars.of_regex("x*(ab){9000}", "regex")


def of_schema(schema: object) -> str:
    return grammars.of_json_schema(schema, "schema")


@pytest.fixture(scope="module")
def known() -> Grammars:
    made = Grammars(load_tokenizer(locate(None)).to_json, 4096, ForkLimits(cpu_s=0.4, memory_bytes=192 << 20))
    yield made
    made.close()


def slot_of(known: Grammars, grammar: str, outputs: list[int], name: str = "r") -> Slot:
    slot = Slot(Admitted(name, (1, *outputs), len(outputs), SamplingParams(grammar=grammar), (0,)), 64, 4096, 0)
    slot.grammar = walked(known, grammar)
    return slot


def looked(walk: FarWalk | GrammarWalk, outputs: list[int], num_sure: int) -> FoundMask:
    place = FormPlace(walk, np.array(outputs, np.int64), num_sure, (0,))
    found = walk.look(place).result(60) if isinstance(walk, FarWalk) else FormMasks(4096, 0, 1).look([place])
    return found[place.key]


# ---- compiling


@pytest.mark.parametrize(
    "schema",
    [
        PRODUCTS,
        {"type": "integer", "multipleOf": 5_000_011},
        {"allOf": [{"type": "string", "pattern": f".*{number}.*"} for number in range(20)]},
        {"properties": {"deep": {"items": PRODUCTS}}},
    ],
    ids=["products", "multiple", "patterns", "inside"],
)
def test_a_form_that_takes_too_much_is_refused_and_its_process_gone(known: Grammars, schema: dict) -> None:
    with pytest.raises(RequestError, match=r"more than 0\.4 s of processor time or 192 MiB of memory") as caught:
        known.compile(of_schema(schema))
    assert (caught.value.info.code, bool(caught.value.info.hint)) == ("grammar", True)
    begin_s = time.process_time()
    with pytest.raises(RequestError, match="more than"):
        known.compile(of_schema(schema))  # what was said is kept
    assert time.process_time() - begin_s < 0.1
    assert known.far.num_alive == 0


def test_memory_has_a_limit_of_its_own(known: Grammars) -> None:
    walk = walked(known, LARGE)
    looked(walk, [], 0)
    pid = walk._form._process._pid
    most_bytes, _ = resource.prlimit(pid, resource.RLIMIT_AS)
    has_bytes = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    assert has_bytes < most_bytes <= has_bytes + (192 << 20)


def test_what_nobody_wants_any_more_ends_where_it_is(known: Grammars) -> None:
    slow = Grammars(load_tokenizer(locate(None)).to_json, 4096, ForkLimits(cpu_s=60.0, memory_bytes=8 << 30))
    wanted = threading.Event()
    wanted.set()
    processes = []
    start = slow._processes.start
    slow._processes.start = lambda: (processes.append(start()), wanted.clear())[0] or processes[0]
    with pytest.raises(FormGone):
        slow.compile(of_schema(PRODUCTS), "", wanted.is_set)
    assert processes[0].is_ended
    assert not slow.is_known(of_schema(PRODUCTS))
    slow.close()


def test_a_form_that_is_slow_gives_way_to_others_forms(known: Grammars) -> None:
    """And each to the threads that serve: niceness counts within a session alone."""
    seen: list[int] = []
    process = known._processes.start()

    def is_wanted() -> bool:
        if process._pid is not None:
            seen.extend(niceness(process._pid))
            assert os.getsid(process._pid) == os.getsid(0)
        return set(seen[-2:]) != {at(NICER)}  # of both threads

    with pytest.raises(FormGone):
        process.compile(of_schema(PRODUCTS), is_wanted)
    assert seen[:2] == [at(0)] * 2
    assert set(seen[-2:]) == {at(NICER)}


def niceness(pid: int) -> list[int]:
    """Returns that of each of its threads."""
    return [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]


def at(nicer: int) -> int:
    return min(19, os.nice(0) + nicer)


def test_a_form_that_waits_for_a_processor_is_not_slow(known: Grammars) -> None:
    """It would wait the longer, for having waited."""
    process = known._processes.start()
    process.compile(of_schema({"type": "integer"}))
    os.kill(process._pid, signal.SIGSTOP)
    until(lambda: not any(") T " not in told.read_text() for told in Path(f"/proc/{process._pid}/task").glob("*/stat")))
    seen: list[int] = []

    def is_wanted() -> bool:
        seen.extend(niceness(process._pid))
        if len(seen) > 8:
            os.kill(process._pid, signal.SIGCONT)
        return True

    assert process.compile(of_schema({"type": "boolean"}), is_wanted).said == ""
    assert len(seen) > 8
    assert set(seen) == {at(0)}
    process.end()


def test_a_password_of_four_patterns_is_a_form(known: Grammars) -> None:
    (quote,) = ids('"')
    for text, may_end in (("aB3!aB3!", True), ("aB3aB3aB", False), ("aB3!aB3", False), ("ab3!ab3!", False)):
        outputs = ids(f'"{text}')
        found = looked(walked(known, of_schema(PASSWORD)), outputs, len(outputs))
        assert bool(has_bits(found.allowed, 4096)[quote]) is may_end, text


def test_no_drawn_schema_is_refused_or_large() -> None:
    drawn = schemas(500)
    assert all(is_small(of_schema(schema)) for schema in drawn)


def test_usual_forms_walk_beside_the_steps(known: Grammars) -> None:
    asked = [
        *map(of_schema, schemas(12)),
        grammars.of_choice(["yes", "no"], "choice"),
        grammars.of_regex("[a-z]+", "r"),
    ]
    assert {type(walked(known, grammar)) for grammar in asked} == {GrammarWalk}


def test_large_schemas_of_the_usual_kind_are_compiled(known: Grammars) -> None:
    """Some 100 KB, as of an API's description."""
    parts = {
        f"Resource{number}": {
            "type": "object",
            "description": "What stands for a thing that somebody may ask for. " * 3,
            "properties": {
                "id": {"type": "string", "pattern": "^[a-z0-9-]{8,36}$"},
                "kind": {"enum": [f"kind_{number}_{other}" for other in range(6)]},
                "count": {"type": "integer", "minimum": 0, "maximum": 10_000},
                "next": {"$ref": f"#/$defs/Resource{(number + 1) % 150}"},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 64}, "maxItems": 16},
            },
            "required": ["id", "kind"],
            "additionalProperties": False,
        }
        for number in range(150)
    }
    schema = {"$ref": "#/$defs/Resource0", "$defs": parts}
    assert len(of_schema(schema)) > 90_000
    known.compile(of_schema(schema))


# ---- what is small


@pytest.mark.parametrize(
    ("grammar", "small"),
    [
        (grammars.of_regex("[a-z]{3,40}(foo|bar)*", "x"), True),
        (grammars.of_regex("a{1000000}", "x"), False),
        (grammars.of_regex("[a-z]*a[a-z]{400}", "x"), False),
        (grammars.of_regex("([a-z]*a|b)[a-z]{20}", "x"), False),
        (grammars.of_regex("([a-z]{20}x)*", "x"), False),
        (grammars.of_regex("[a-z]{20}x*y{3}", "x"), True),
        (of_schema({"type": "string", "pattern": "a[a-z]{40}"}), False),
        (of_schema({"type": "string", "pattern": "^a[a-z]{40}$"}), True),
        (grammars.of_regex("((a{50}b){50}c){50}", "x"), False),
        (grammars.of_regex(r"\p{L}+", "x"), False),
        (of_schema({"type": "string", "pattern": "^(x{300}){300}$"}), False),
        (of_schema({"patternProperties": {"^(x{300}){300}$": True}}), False),
        (of_schema({"type": "string", "format": "email", "pattern": "a"}), True),
        (of_schema({"type": "string", "maxLength": 5000, "pattern": "a"}), False),
        (of_schema({"type": "array", "minItems": 10**6, "items": {"const": 1}}), False),
        (of_schema({"enum": ["a" * 100_000]}), False),
        (of_schema({"$ref": "#/$defs/a", "$defs": {"a": {"const": "a" * 100_000}}}), False),
        (of_schema({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}}}}), True),
        (of_schema({"type": "integer", "multipleOf": 5_000_011}), False),
        (of_schema({"type": "integer", "multipleOf": 5}), True),
        (of_schema(PASSWORD), False),
        (of_schema({"allOf": [{"properties": {"a": True}}, {"properties": {"b": True}}]}), True),
        (of_schema({"anyOf": [{"const": str(number)} for number in range(600)]}), False),
        (grammars.of_choice([f"choice {number}" for number in range(500)], "x"), True),
        (grammars.of_lark('start: a{2000}\na: B{2000}\nB: "xy"', "x"), False),
        (grammars.of_lark('start: B~1..200000\nB: "xy"', "x"), False),
        (grammars.of_lark('start: "a" start "b" | %json {"const": "' + "a" * 30_000 + '"}', "x"), False),
        (grammars.of_lark('start: "a" start "b" | "c"', "x"), True),
        (grammars.of_lark("\n".join(["start: r1", *(f'r{one}: "a" r{one + 1}' for one in range(400))]), "x"), False),
        ("no grammar", False),
    ],
)
def test_a_form_is_small_where_its_text_bounds_what_it_takes(grammar: str, small: bool) -> None:
    assert is_small(grammar) is small


@pytest.mark.parametrize(
    "written",
    [
        'start: "a"' + "\n" * 100_000 + '| "b"',
        "start: a\n" + "a[\n" * 30_000,
        "start: a " + "{" + " " * 100_000 + '"x"',
        'start: "a"' + " " * 100_000 + '| "b"',
    ],
    ids=["lines", "brackets", "counts", "spaces"],
)
def test_how_large_a_form_is_takes_time_in_proportion_to_its_text(written: str) -> None:
    """At first 100,000 lines took minutes, without the interpreter's lock for anybody else."""
    begin_ns = time.thread_time_ns()
    is_small(grammars.of_lark(written, "grammar"))
    assert time.thread_time_ns() - begin_ns < 300_000_000


def test_the_engine_reads_no_form_itself(known: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_process, "_Schema", None)  # here; not in the process that tries it
    assert isinstance(walked(known, of_schema({"enum": ["read", "elsewhere"]})), GrammarWalk)


def test_where_steps_are_planned_ahead_no_form_may_keep_all_waiting() -> None:
    """At first each of its masks could take a second, with everybody's step."""
    ahead = Grammars(load_tokenizer(locate(None)).to_json, 4096, is_ahead=True)
    usual = of_schema({"enum": ["a", "b"]})
    assert walked(ahead, usual).elsewhere is None
    with pytest.raises(RequestError) as caught:
        ahead.compile(LARGE)
    assert "--async-scheduling" in caught.value.info.hint
    assert ahead.far.num_alive == 0
    ahead.kept.drop("", usual)
    with pytest.raises(Overloaded) as lost:
        ahead.walk(usual)
    assert (lost.value.info.status, lost.value.info.retry_after_s) == (429, 1.0)
    ahead.close()


# ---- what is not kept any more


def test_a_walk_of_what_is_not_kept_compiles_nothing_and_its_looks_do(known: Grammars) -> None:
    """At first the engine's step waited for it, as long as forms may take."""
    grammar = grammars.of_regex("not kept|nothing", "regex")
    known.compile(grammar)
    near = looked(known.walk(grammar), [], 0)
    known.kept.drop("", grammar)
    num_alive = known.far.num_alive
    walks = [known.walk(grammar) for _ in range(3)]
    assert known.far.num_alive == num_alive
    assert {type(walk) for walk in walks} == {FarWalk}
    for walk in walks:
        assert (looked(walk, [], 0).allowed == near.allowed).all()
    assert known.far.num_alive == num_alive + 1


@pytest.mark.parametrize("grammar", [of_schema(PRODUCTS), of_schema({"not": {"type": "integer"}})])
def test_a_look_of_what_is_not_kept_says_why_the_form_cannot_be(known: Grammars, grammar: str) -> None:
    with pytest.raises(RequestError) as caught:
        known.compile(grammar)
    known.kept.drop("", grammar)
    assert looked(known.walk(grammar), [], 0).error == caught.value.info


def test_an_answer_is_held_to_the_form_that_is_kept_for_its_tenant(known: Grammars) -> None:
    slots, held = Slots(64, 4096), SamplingParams(grammar=grammars.of_regex("of one tenant", "regex"))
    known.compile(held.grammar, "one")
    slots.grammars = known
    slots.update((), [Admitted(name, (1,), 0, held, (0,), tenant=name) for name in ("one", "other")])
    assert isinstance(slots["one"].grammar, GrammarWalk)
    assert isinstance(slots["other"].grammar, FarWalk)  # for whom it is compiled with the first look
    assert (slots["one"].grammar.owner, slots["other"].grammar._form.owner) == ("one", "other")


def test_a_form_that_many_walked_is_compiled_anew_for_who_comes_and_not_in_a_walk(
    known: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = grammars.of_regex("walked often", "regex")
    known.compile(grammar)
    monkeypatch.setattr(known._processes, "start", None)
    assert {type(known.walk(grammar)) for _ in range(compiled.MOST_WALKS + 20)} == {GrammarWalk}
    assert not known.is_known(grammar)
    monkeypatch.undo()
    known.compile(grammar)
    assert known.is_known(grammar)


def test_kept_forms_and_what_failed_weigh_their_text_and_more(known: Grammars) -> None:
    before = known.kept.weight
    known._keep("its own", "x" * 1000, RequestError("no").info)
    assert known.kept.weight == before + compiled.LEAST_KEPT_BYTES + 1000
    known._keep("its own", "x" * 1000, RequestError("no").info, 5)
    assert known.kept.weight == before + compiled.LEAST_KEPT_BYTES + 1005


def test_who_leaves_does_not_wait_for_room_of_a_process(known: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known.far, "_makes_room", lambda form: False)
    with pytest.raises(FormGone):
        known.far.begin(known._late("any", ""), lambda: False)


# ---- walking elsewhere


def test_a_form_that_walks_elsewhere_has_the_masks_of_one_that_walks_here(known: Grammars) -> None:
    near = _compiled(known, LARGE)
    for text, num_drafts in (("", 0), ("x", 0), ("xab", 2), ("xa", 1), ("xxa", 0), ("xb", 1), ("ab", 0)):
        outputs, far = ids(text), walked(known, LARGE)
        assert isinstance(far, FarWalk)
        num_sure = max(0, len(outputs) - num_drafts)
        one, other = looked(far, outputs, num_sure), looked(GrammarWalk(near), outputs, num_sure)
        assert one.error == other.error
        assert (one.allowed is None) == (other.allowed is None)
        assert one.allowed is None or (one.allowed == other.allowed).all()


def test_a_walk_elsewhere_goes_on_from_look_to_look_with_drafts_and_without(known: Grammars) -> None:
    outputs, walk = ids("xxab") + ids("a"), walked(known, LARGE)
    for num_outputs in range(len(outputs) + 1):
        for num_drafts in (1, 0):
            num_sure = max(0, num_outputs - num_drafts)
            anew = looked(walked(known, LARGE), outputs[:num_outputs], num_sure)
            assert (looked(walk, outputs[:num_outputs], num_sure).allowed == anew.allowed).all()


def _compiled(known: Grammars, grammar: str) -> object:
    return compiled._compile(known._known_tokenizer(), grammar)


def test_a_process_that_was_put_away_is_another_ones_place_and_its_form_goes_on(
    known: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_forms, "MOST_ALIVE", 1)
    walks = [walked(known, grammars.of_regex("x*" + "(ab){9000}" + letter, "regex")) for letter in "cd"]
    for _ in range(2):
        for walk in walks:
            assert looked(walk, ids("xa"), len(ids("xa"))).allowed is not None
            assert known.far.num_alive == 1


def test_a_process_that_ends_in_a_look_ends_its_request_and_the_next_has_another(known: Grammars) -> None:
    """As the kernel ends one that takes too much."""
    walk = walked(known, LARGE)
    looked(walk, [], 0)
    os.kill(walk._form._process._pid, signal.SIGKILL)
    found = looked(walk, ids("x"), 1)
    assert (found.allowed, found.error.status, found.error.code) == (None, 400, "grammar")
    assert looked(walked(known, LARGE), ids("x"), 1).allowed is not None


def test_a_form_that_is_slow_only_later_costs_its_request_alone(known: Grammars) -> None:
    """Its masks are slow, or too much, behind what was tried; there is an answer, and another form's."""
    walk = walked(known, SLOW_LATER)
    assert isinstance(walk, FarWalk)
    for text in ("x", "x!", "x!a"):
        found = looked(walk, ids(text), len(ids(text)))
        if found.error is not None:
            assert found.error.status == 400
            break
    assert looked(walked(known, LARGE), ids("x"), 1).allowed is not None


AMBIGUOUS = grammars.of_lark(
    "start: /[0-9]{100}/ x\nx: "
    + " | ".join(f"y{number}" for number in range(60))
    + "".join(f"\ny{number}: x /[a-z0-9 ]/ x | /[a-z]/" for number in range(60)),
    "grammar",
)


def test_a_form_that_takes_too_much_here_goes_on_elsewhere_with_its_request(known: Grammars) -> None:
    """Behind more tokens than it was tried with. Its row sits out once; then it has the masks of one that was there
    from the beginning, and the next request begins there."""
    found: list[str] = []
    masks, outputs = FormMasks(4096, 0, 1, found.append), ids("1" * 100)
    slot = slot_of(known, AMBIGUOUS, outputs)
    assert isinstance(slot.grammar, GrammarWalk)
    begin_ns = time.thread_time_ns()
    assert "Too many items" in looked(known.walk(AMBIGUOUS), outputs, len(outputs)).error.message
    assert time.thread_time_ns() - begin_ns < 25_000_000  # of 36 ms that the mask takes
    masks.begin([slot], [len(outputs)])
    wait(masks._begun.values())
    assert not masks.take([slot], [len(outputs)])
    assert (slot.is_late, slot.error, type(slot.grammar)) == (True, None, FarWalk)
    slot.late_mask[1].result(60)
    assert found == ["r"]
    (allowed,) = masks.take([slot], [len(outputs)]).values()
    assert [bool(has_bits(allowed, 4096)[ids(letter)[0]]) for letter in "a5"] == [True, False]
    assert isinstance(known.walk(AMBIGUOUS), FarWalk)


def test_where_nobody_can_be_told_the_step_waits_for_what_goes_on_elsewhere(known: Grammars) -> None:
    known.kept.drop("", AMBIGUOUS)
    outputs = ids("1" * 100)
    slot = slot_of(known, AMBIGUOUS, outputs)
    assert list(FormMasks(4096, 0, 1).take([slot], [len(outputs)])) == [0]
    assert isinstance(slot.grammar, FarWalk)


def test_what_a_parser_says_behind_a_draft_moves_no_request(known: Grammars) -> None:
    """The draft may be wrong: what is sampled behind it does not count."""
    masks, slot = FormMasks(4096, 0, 1), slot_of(known, of_schema({}), ids("{"))
    slot.tokens[2] = ids('"')[0]
    masks._found[key_of(slot.grammar, slot.tokens[1:3], 1)] = FoundMask(error="too much")
    assert list(masks.take([slot, slot], [1, 2])) == [0]
    assert (type(slot.grammar), slot.dead_end, slot.error) == (GrammarWalk, 2, None)


def test_an_answer_that_no_parser_knows_fails_with_what_the_process_says(known: Grammars) -> None:
    masks, outputs = FormMasks(4096, 0, 1), ids("zz")
    slot = slot_of(known, grammars.of_choice(["a b", "b"], "choice"), outputs)
    assert not masks.take([slot], [len(outputs)])
    assert (slot.error.status, slot.error.code) == (400, "grammar")


def test_a_step_waits_no_longer_for_walks_than_for_masks(known: Grammars) -> None:
    masks, slot = FormMasks(4096, 0, 1), slot_of(known, of_schema({}), [])
    with masks._walking:  # as a thread has them that looks for long
        begin_s = time.monotonic()
        assert masks.look_ahead([slot], finds_forced=True) == [()]
        assert time.monotonic() - begin_s < 1
        assert (masks._found, len(masks._begun)) == ({}, 1)
    assert list(masks.take([slot], [0])) == [0]


def test_owners_wait_for_their_own_looks_alone(known: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for little goes first, and one that is asked for much holds up nobody else's step."""
    masks, slots = FormMasks(4096, 0, 1, [].append), [slot_of(known, of_schema({}), [], str(one)) for one in range(3)]
    slots[2].grammar.owner = "other"
    told, looks_at, may_go, second = [], masks.look, threading.Event(), threading.Event()

    def look(places: list[FormPlace], parser: object) -> FoundMasks:
        told.append([place.walk.owner for place in places])
        if len(told) == 2:
            second.set()
            assert may_go.wait(20)
        return looks_at(places)

    monkeypatch.setattr(masks, "look", look)
    masks.begin(slots, [0] * 3)
    assert masks._begun[masks._asked[2][2]].result(20)
    assert second.wait(20)
    assert list(masks.take(slots, [0] * 3)) == [2]
    may_go.set()
    assert told == [["other"], ["", ""]]


def test_processes_end_with_who_asked(known: Grammars) -> None:
    other = Grammars(load_tokenizer(locate(None)).to_json, 4096)
    walk = walked(other, LARGE)
    looked(walk, [], 0)
    pid = walk._form._process._pid
    other.close()
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}/statm") or not _is_running(pid):
            return
        time.sleep(0.05)
    raise AssertionError("it still runs")


def _is_running(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"


def test_processes_that_take_too_much_together_are_put_away_as_they_answer(
    known: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No new one has to come for that; who answered last stays."""
    walks = [walked(known, grammars.of_regex("x*" + "(ab){9000}" + letter, "regex")) for letter in "ef"]
    looked(walks[0], ids("xa"), 1)
    monkeypatch.setattr(far_forms, "MOST_BYTES", walks[0]._form.num_bytes - 1)
    looked(walks[1], ids("xa"), 1)
    assert (walks[0]._form.num_bytes, known.far.num_alive) == (0, 1)
    assert walks[1]._form.num_bytes > 0


def test_processes_that_nobody_asks_are_ended(known: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = walked(known, LARGE)
    looked(walk, [], 0)
    monkeypatch.setattr(far_forms, "IDLE_S", 3600)
    known.far.put_away_idle()
    assert walk._form.num_bytes > 0
    assert known.far._watch.daemon
    known.far._watch.cancel()
    monkeypatch.setattr(far_forms, "IDLE_S", 0)
    known.far.put_away_idle()
    assert (known.far.num_alive, known.far._watch) == (0, None)
    assert looked(walk, ids("x"), 1).allowed is not None


GONE_PID = 4_194_305  # above any that the kernel gives


def process_of(ours: socket.socket, theirs: socket.socket, answer: Tried | None) -> FormProcess:
    """Returns a process that has this answer, or ends when it is asked."""

    def serve() -> None:
        theirs.sendall(frame(msgspec.msgpack.encode(GONE_PID)))
        read_message(theirs.makefile("rb"))
        if answer is None:
            theirs.close()
        else:
            theirs.sendall(frame(msgspec.msgpack.encode(answer)))

    threading.Thread(target=serve, daemon=True).start()
    return FormProcess(ours, compiled.LIMITS)


@pytest.mark.parametrize(("answer", "kills"), [(Tried(""), [GONE_PID]), (None, [])])
def test_a_process_is_killed_once_and_none_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, answer: Tried | None, kills: list[int]
) -> None:
    """Its number may be another's by then."""
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, how: killed.append(pid))
    ours, theirs = socket.socketpair()
    process = process_of(ours, theirs, answer)
    with contextlib.suppress(RequestError):
        process.compile("any")
    process.end()
    process.end()
    del process
    assert killed == kills


def test_a_process_is_heard_however_many_files_are_open() -> None:
    """`select` takes no descriptor above 1023."""
    ours, theirs = socket.socketpair()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2048), before[1]))
    high = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 1500))
    assert process_of(high, theirs, Tried("no")).compile("any").said == "no"
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_what_runs_out_of_memory_leaves_no_file_of_it(known: Grammars) -> None:
    walk = walked(known, LARGE)
    looked(walk, [], 0)
    assert resource.prlimit(walk._form._process._pid, resource.RLIMIT_CORE) == (0, 0)


# ---- masks that are late


class HeldWalk:
    """Looks when it is told to."""

    def __init__(self) -> None:
        self.looks: list[tuple[FormPlace, Future[FoundMasks]]] = []

    def must_come(self, outputs: np.ndarray) -> tuple[int, ...]:
        return ()

    def look(self, place: FormPlace) -> Future:
        self.looks.append((place, Future()))
        return self.looks[-1][1]

    def tell(self) -> None:
        place, told = self.looks[-1]
        told.set_result({place.key: FoundMask(np.full(128, 7, np.uint32))})


def test_a_late_mask_holds_up_its_own_row_alone_and_is_asked_for_once(known: Grammars) -> None:
    found: list[str] = []
    masks, held = FormMasks(4096, 0, 1, found.append), HeldWalk()
    late, other = slot_of(known, of_schema({}), [], "late"), slot_of(known, of_schema({}), [], "other")
    late.grammar = held
    assert list(masks.take([late, other], [0, 0])) == [1]
    assert (late.is_late, other.is_late, late.error) == (True, False, None)
    late.is_late = False  # the next row begins
    assert list(masks.take([late, other], [0, 0])) == [1]
    assert (len(held.looks), found) == (1, [])
    held.tell()
    assert found == ["late"]
    assert list(masks.take([late], [0])) == [0]
    assert len(held.looks) == 1


def test_nobody_is_told_of_a_mask_whose_request_has_left_its_slot(known: Grammars) -> None:
    """Its id may be another's by then, or its own, preempted and begun anew."""
    found: list[str] = []
    masks, held, slots = FormMasks(4096, 0, 1, found.append), HeldWalk(), Slots(64, 4096)
    for told in ([], ["x"]):
        slots.update((), [Admitted("x", (1,), 0, SamplingParams(max_tokens=9), (0,))])
        slots["x"].grammar = held
        masks.take([slots["x"]], [0])
        assert slots["x"].is_late
        if not told:
            slots.update(["x"], ())
        held.tell()
        assert found == told


def test_a_draft_whose_mask_is_late_counts_as_wrong_and_the_row_goes_on(known: Grammars) -> None:
    masks, held = FormMasks(4096, 0, 1, [].append), HeldWalk()
    slot = slot_of(known, of_schema({}), ids("{"))
    slot.grammar, slot.tokens[2] = held, ids('"')[0]
    masks.begin([slot, slot], [1, 2])
    place, told = held.looks[0]
    told.set_result({place.key: FoundMask(np.full(128, 7, np.uint32))})
    assert list(masks.take([slot, slot], [1, 2])) == [0]
    assert (slot.is_late, slot.dead_end, slot.error) == (False, 2, None)


def test_where_nobody_can_be_told_the_step_waits(known: Grammars) -> None:
    masks, held = FormMasks(4096, 0, 1), HeldWalk()
    slot = slot_of(known, of_schema({}), [])
    slot.grammar = held
    masks.begin([slot], [0])
    timer = threading.Timer(0.05, held.tell)
    timer.start()
    assert list(masks.take([slot], [0])) == [0]
    assert not slot.is_late


def test_a_step_waits_for_all_late_masks_together_not_for_each(
    known: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(compiled, "wait", lambda looks, timeout: asked.append((len(looks), timeout)) or wait(looks, 0))
    masks = FormMasks(4096, 0, 1, [].append)
    slots = [slot_of(known, of_schema({}), []) for _ in range(3)]
    for slot in slots:
        slot.grammar = HeldWalk()
    free = Slot(Admitted("free", (1,), 0, SamplingParams(), (0,)), 64, 4096, 0)
    assert not masks.take([*slots, free], [0] * 4)
    assert not masks.take(slots, [0] * 3)
    assert asked == [(3, compiled.LATE_NS / 1e9), (3, compiled.LATE_ALONE_NS / 1e9)]


@pytest.mark.parametrize(("count", "small"), [(256, True), (257, False)])
def test_a_grammar_of_many_rules_is_not_small(count: int, small: bool) -> None:
    rules = [f'r{number}: "a"' for number in range(count - 1)]
    assert is_small(grammars.of_lark("\n".join(['start: r0 "b"', *rules]), "grammar")) is small
