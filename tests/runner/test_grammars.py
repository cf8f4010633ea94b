"""Answers that are held to a form, by the packaged model: what comes matches, and nobody else notices."""

import json
import re
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from splittime import LLM, SamplingParams
from splittime.assemble.model_source import load_tokenizer, locate
from splittime.core.errors import RequestError
from splittime.core.step import Admitted
from splittime.kernels.draw import has_bits
from splittime.runner import grammars as compiled
from splittime.runner.form_walk import MOST_FORCED, SLOW_NS, FormPlace, GrammarWalk
from splittime.runner.grammars import QUICK_NS, FormMasks, Grammars
from splittime.runner.slot import Slot
from splittime.text import grammars

jsonschema_rs = pytest.importorskip("jsonschema_rs")

pytestmark = pytest.mark.timeout(300)
SCHEMAS = (
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", 3, None, True]}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "number", "minimum": 0, "maximum": 5}, {"type": "boolean"}, {"const": 'ünïcode \\ "'}]},
    {"type": "string", "pattern": "^[A-Z]{2,4}-[0-9]+$", "maxLength": 9},
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"leaf": {"type": "boolean"}, "next": {"$ref": "#/$defs/tree"}},
                "required": ["leaf"],
                "additionalProperties": False,
            }
        },
    },
)
ANYTHING = grammars.of_regex("(?s:.)*", "regex")
PROMPTS = ["def add(a, b):", "# a list\n", "import ", "x = {"]
of_schema = partial(grammars.of_json_schema, param="schema")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_threads=1, max_num_seqs=8, max_model_len=256)


@pytest.fixture(scope="module")
def known() -> Grammars:
    tokenizer = load_tokenizer(locate(None))
    return Grammars(tokenizer.to_json, 4096)


def walked(known: Grammars, grammar: str) -> GrammarWalk:
    """Returns a walk of a form that was compiled before, as the gate has it."""
    known.compile(grammar)
    return known.walk(grammar)


def ids(text: str) -> list[int]:
    return load_tokenizer(locate(None)).encode(text, add_special_tokens=False)


def held(grammar: str, seed: int, **more: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "temperature": 1.0, "seed": seed, "grammar": grammar, **more})


# ---- answers


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema)[:40])
def test_an_answer_that_ended_matches_its_schema(llm: LLM, schema: dict) -> None:
    outputs = llm.generate(PROMPTS * 3, [held(of_schema(schema), seed) for seed in range(12)])
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}
    whole = [output.text for output in outputs if output.finish_reason == "stop"]
    assert whole
    for text in whole:
        assert jsonschema_rs.is_valid(schema, json.loads(text)), text
        assert not re.search(r"\s{70}", text)


def test_other_forms(llm: LLM) -> None:
    choice = grammars.of_choice(["yes", "no", 'may"be\n'], "choice")
    regex = grammars.of_regex(r"[0-9]{3}/[a-z]\/(\\|x)", "regex")
    lark = grammars.of_lark('start: "a" rest\nrest: "b"+ "c"', "grammar")
    asked = [held(grammar, seed) for grammar in (choice, regex, lark) for seed in range(4)]
    texts = [output.text for output in llm.generate(["x"] * 12, asked)]
    assert set(texts[:4]) <= {"yes", "no", 'may"be\n'}
    assert all(re.fullmatch(r"[0-9]{3}/[a-z]/(\\|x)", text) for text in texts[4:8])
    assert all(re.fullmatch("ab+c", text) for text in texts[8:])


def test_a_form_that_allows_all_texts_changes_no_greedy_answer(llm: LLM) -> None:
    """A drawn one may change: what is no text (half a character, a special token) has a share of the probability."""
    free, same = (
        llm.generate(PROMPTS, [held(grammar, seed, temperature=0.0, max_tokens=40) for seed in range(4)])
        for grammar in ("", ANYTHING)
    )
    assert [output.token_ids for output in free] == [output.token_ids for output in same]


def test_an_answer_is_the_same_alone_and_beside_others_who_notice_nothing(llm: LLM) -> None:
    free = [held("", seed) for seed in range(3)]
    forms = [held(of_schema(schema), 7) for schema in SCHEMAS[:3]]
    together = llm.generate(["a"] * 6, [one for pair in zip(free, forms, strict=True) for one in pair])
    alone = [llm.generate(["a"], one)[0] for pair in zip(free, forms, strict=True) for one in pair]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def test_guessing_ahead_changes_no_answer() -> None:
    asked = [held(of_schema(schema), seed, temperature=0.7) for seed, schema in enumerate(SCHEMAS)]
    plain, guessing = (
        LLM(num_threads=1, max_num_seqs=8, max_model_len=256, kernels="native", **more)
        for more in ({}, {"speculative_config": '{"method": "suffix"}'})
    )
    first = [output.token_ids for output in plain.generate(["x = "] * 5, asked)]
    for _ in range(2):  # the second time the answers are known, and guessed whole
        assert [output.token_ids for output in guessing.generate(["x = "] * 5, asked)] == first


def test_a_whole_answer_ends_though_more_tokens_were_wished(llm: LLM) -> None:
    (output,) = llm.generate(["x"], held(grammars.of_choice(["yes"], "choice"), 1, min_tokens=50))
    assert (output.text, output.finish_reason) == ("yes", "stop")


def test_penalties_and_biases_come_before_the_form(llm: LLM) -> None:
    first, second = ids("yes")[0], ids("no")[0]
    grammar = grammars.of_choice(["yes", "no"], "choice")
    for wanted, other in ((first, second), (second, first)):
        (output,) = llm.generate(["x"], held(grammar, 1, temperature=0.0, logit_bias={wanted: 100.0, other: -100.0}))
        assert output.token_ids[0] == wanted


@pytest.mark.parametrize(
    ("schema", "word"),
    [({"not": {"type": "string"}}, "not"), ({"type": "array", "uniqueItems": True}, "uniqueItems"),
     ({"type": "string", "pattern": "(?=a)b"}, "look-around")],
)  # fmt: skip
def test_a_schema_that_cannot_be_honoured_is_refused_and_harms_nobody(llm: LLM, schema: dict, word: str) -> None:
    bad, good = llm.generate(["x", "x"], [held(of_schema(schema), 0), held("", 0, max_tokens=3)])
    assert bad.error is not None
    assert (bad.error.status, bad.error.code) == (400, "grammar")
    assert word in bad.error.message
    assert len(good.token_ids) == 3


def test_a_parser_that_gives_up_ends_its_request_with_an_error(llm: LLM) -> None:
    """Rules that begin alike are more than it follows at once: 4,000 behind a token, 1,900 thrice for a mask."""
    for count, form in ((4000, "start: w"), (1900, "start: w w w")):
        words = " | ".join(f'"{number:05}"' for number in range(count))
        grammar = grammars.of_lark(f"{form}\nw: {words}", "g")
        bad, good = llm.generate(["x", "x"], [held(grammar, 0), held("", 0, max_tokens=9)])
        assert bad.finish_reason == "error"
        assert "items" in bad.error.message
        assert (bad.error.status, bad.error.code) == (400, "grammar")
        assert len(good.token_ids) == 9


def test_what_ends_a_request_comes_only_where_its_answer_is_whole(llm: LLM) -> None:
    """Though it is text, or the grammar names it."""
    (stop_id,) = ids("abc")
    regex = grammars.of_regex("abc[0-9]{5}", "regex")
    (output,) = llm.generate(["x"], held(regex, 1, stop_token_ids=(stop_id,)))
    assert output.finish_reason == "error" or re.fullmatch("abc[0-9]{5}", output.text)
    (output,) = llm.generate(["x"], held(grammars.of_lark('start: "a" <[0]> "b"', "g"), 1))
    assert output.finish_reason == "error"
    assert "allows no token" in output.error.message
    assert output.error.status == 400


def test_names_of_properties_are_written_in_one_way(known: Grammars) -> None:
    """Else a property of another type could hide behind an escape."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert allowed(walked(known, of_schema(schema)), ids('{"b\\n":"s"}'), 0) == [0]
    assert allowed(walked(known, of_schema(schema)), ids('{"\\u0061":"s"}'), 0) is None


CHAINS = r"""
import sys
from splittime.assemble.model_source import load_tokenizer, locate
from splittime.core.errors import RequestError
from splittime.runner.grammars import Grammars
from splittime.text import grammars
refs = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2500)} | {"a2500": {"type": "null"}}
lark = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(6000)) + 'r6000: "a"'
known = Grammars(load_tokenizer(locate(None)).to_json, 4096)
for grammar in (grammars.of_json_schema({"$ref": "#/$defs/a0", "$defs": refs}, "s"), grammars.of_lark(lark, "g")):
    try:
        known.compile(grammar)
    except RequestError as error:
        print("refused", error)
print("alive")
"""


def test_rules_that_refer_to_rules_do_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", CHAINS], capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("alive\n"), (done.returncode, done.stderr[-500:])


def test_ignore_eos_leaves_a_form_no_end() -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(grammar=ANYTHING, ignore_eos=True).validate()


# ---- walking


def allowed(walk: GrammarWalk, outputs: list[int], num_sure: int, masks: FormMasks | None = None) -> list[int] | None:
    place = FormPlace(walk, np.array(outputs, dtype=np.int64), num_sure, (0,))
    found = (masks or FormMasks(4096, 0, 1)).look([place])[place.key]
    assert found.error is None
    return None if found.allowed is None else tokens_of(found.allowed)


def tokens_of(allowed: np.ndarray) -> list[int]:
    return np.flatnonzero(has_bits(allowed, 4096)).tolist()


def test_drafts_are_followed_and_taken_back(known: Grammars) -> None:
    grammar = grammars.of_choice(["abc", "axyz"], "choice")
    a, b, c, x = (ids(letter)[0] for letter in "abcx")
    walk, fresh = walked(known, grammar), partial(walked, known, grammar)
    behind_a = allowed(fresh(), [a], 1)
    assert {b, x} <= set(behind_a)
    assert allowed(walk, [], 0) == allowed(fresh(), [], 0)
    assert allowed(walk, [a], 1) == behind_a
    assert c in allowed(walk, [a, b], 1)  # b is a draft
    assert allowed(walk, [a, b, c], 1) == [0]
    assert allowed(walk, [a, x], 2) == allowed(fresh(), [a, x], 2)  # it was wrong
    assert c not in allowed(walk, [a, x], 2)
    assert allowed(walk, [a, x, c], 2) is None  # a draft that cannot be
    assert allowed(walk, [a, x], 2) == allowed(fresh(), [a, x], 2)
    assert allowed(walk, [a], 1) == behind_a  # preempted, and on the way again


def test_a_draft_that_is_too_much_for_the_parser_does_not_end_its_request(known: Grammars) -> None:
    words = " | ".join(f'"0{number:04}"' for number in range(4000))
    grammar = grammars.of_lark(f'start: "x" | w\nw: {words}', "g")
    walk = GrammarWalk(compiled._compile(known._known_tokenizer(), grammar))
    zero, x = ids("0")[0], ids("x")[0]
    assert allowed(walk, [zero, zero], 0) is None
    assert x in allowed(walk, [], 0)
    assert allowed(walk, [x], 1) == [0]


def test_the_end_may_come_only_where_the_answer_could_end(known: Grammars) -> None:
    walk = walked(known, grammars.of_regex("ab?", "regex"))
    a, b = ids("a")[0], ids("b")[0]
    assert 0 not in allowed(walk, [], 0)
    assert {0, b} <= set(allowed(walk, [a], 1))
    assert allowed(walk, [a, b], 2) == [0]


def test_a_tokenizer_that_cannot_be_read_is_said() -> None:
    with pytest.raises(RequestError, match="tokenizer cannot hold"):
        Grammars(lambda: "{}", 10).compile(ANYTHING)


# ---- looking ahead


def slot_of(known: Grammars, grammar: str, outputs: list[int]) -> Slot:
    slot = Slot(Admitted("r", (1, *outputs), len(outputs), SamplingParams(grammar=grammar), (0,)), 64, 4096, 0)
    slot.grammar = walked(known, grammar) if grammar else None
    return slot


def test_what_was_begun_is_taken_and_drafts_are_looked_at_behind_what_is_known(known: Grammars) -> None:
    """In any order, one by one or together, and each line its own."""
    a, b, c = (ids(letter)[0] for letter in "abc")
    grammar, masks = grammars.of_choice(["abc", "axyz"], "choice"), known.masks()
    one, free, other = slot_of(known, grammar, [a]), slot_of(known, "", [b]), slot_of(known, grammar, [])
    masks.begin([other, one], [0, 1])
    one.tokens[2:4] = b, c  # drafts
    slots, counts = [one, free, one, other, one], [2, 1, 3, 0, 1]
    masks.begin(slots, counts)
    taken = masks.take(slots, counts)
    assert list(taken) == [0, 2, 3, 4]
    for line, outputs in ((0, [a, b]), (2, [a, b, c]), (3, []), (4, [a])):
        assert tokens_of(taken[line]) == allowed(walked(known, grammar), outputs, len(outputs))
    assert one.dead_end == 64


def test_where_nothing_may_come_a_draft_is_a_dead_end_and_an_answer_an_error(known: Grammars) -> None:
    a, x = (ids(letter)[0] for letter in "ax")
    grammar, masks = grammars.of_lark('start: "a" <[0]> "b"', "g"), known.masks()
    guessed, stuck = slot_of(known, grammar, []), slot_of(known, grammar, [a])
    guessed.tokens[1] = x
    assert list(masks.take([guessed, guessed, stuck], [0, 1, 1])) == [0]
    assert (guessed.dead_end, guessed.error) == (1, None)
    assert "allows no token" in stuck.error.message


def test_a_mistake_of_the_parser_ends_one_request_alone_unless_it_can_go_on_elsewhere(known: Grammars) -> None:
    grammar, masks = grammars.of_choice(["abcd"], "choice"), known.masks()
    good, bad, moved = (slot_of(known, grammar, []) for _ in range(3))
    for slot in (bad, moved):
        slot.grammar.matcher = object()
    bad.grammar.elsewhere = None
    masks_of = masks.take([bad, good, moved], [0, 0, 0])
    assert list(masks_of) == [1, 2]
    assert (masks_of[1] == masks_of[2]).all()
    assert "AttributeError" in bad.error or "TypeError" in bad.error
    assert (good.error, moved.error) == (None, None)


def test_the_wait_for_a_mask_is_told_once(known: Grammars) -> None:
    masks = known.masks()
    masks.take([slot_of(known, ANYTHING, [])], [0])
    assert masks.take_waited_ns() > 0
    assert masks.take_waited_ns() == 0


@pytest.mark.parametrize(("took_ns", "num_at_once"), [(QUICK_NS // 3, 3), (QUICK_NS // 2, 0)])
def test_what_is_quick_is_found_at_once_and_what_is_not_by_a_thread(
    known: Grammars, took_ns: int, num_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks, a = known.masks(), ids("a")
    slots = [slot_of(known, grammars.of_choice(["abc", "axyz"], "choice"), a) for _ in range(3)]
    for _ in range(2):
        masks._learn(took_ns, by_thread=False)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)
    assert masks.look_ahead(slots, True) == [()] * 3
    assert (len(masks._found), len(masks._begun)) == (num_at_once, 3 - num_at_once)
    for found in masks.take(slots, [1] * 3).values():
        assert tokens_of(found) == allowed(walked(known, slots[0].admitted.sampling.grammar), a, 1)
    assert not masks._found
    assert not masks._begun


@pytest.mark.parametrize(("outputs", "ticks", "num_at_once"), [("a", 5.5, 4), ("", 18.5, 2)])
def test_what_is_not_found_in_time_goes_to_the_thread(
    known: Grammars, outputs: str, ticks: float, num_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is read three times before, once for each that goes on, and where none does twice for each, and three
    times for a look."""
    clock = iter(range(0, 10**9, int(QUICK_NS / ticks)))
    masks, slots = known.masks(), [slot_of(known, ANYTHING, ids(outputs)) for _ in range(5)]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
    masks.look_ahead(slots, True)
    monkeypatch.undo()
    assert (len(masks._found), len(masks._begun)) == (num_at_once, 5 - num_at_once)
    assert len(masks.take(slots, [len(outputs)] * 5)) == 5


def test_what_must_come_is_asked_no_longer_than_is_quick(known: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is read eight times before, and once for each."""
    clock, abc = iter(range(0, 10**9, int(QUICK_NS / 9.5))), tuple(ids("abc"))
    masks, slots = known.masks(), [slot_of(known, grammars.of_choice(["abc"], "choice"), []) for _ in range(5)]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
    assert masks.look_ahead(slots, True) == [abc, abc, (), (), ()]
    monkeypatch.undo()
    assert [tokens_of(found) for found in masks.take(slots, [0] * 5).values()] == [[abc[0]]] * 5


def test_the_wait_for_the_thread_is_no_part_of_a_look(known: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, masks = [0], known.masks()

    class LongLock:
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            now_ns[0] += QUICK_NS // 2 if blocking else 0
            return blocking and timeout <= QUICK_NS / 1e9

        def release(self) -> None: ...

    masks._walking = LongLock()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns[0])
    masks.look_ahead([slot_of(known, ANYTHING, ids("a"))], True)
    assert masks._found
    assert masks._looks_ns == (0, 0, 0)


def test_what_was_found_for_an_answer_that_ended_is_forgotten_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], Grammars.masks
    monkeypatch.setattr(Grammars, "masks", lambda self: made.append(make(self)) or made[-1])
    llm = LLM(num_threads=1, max_num_seqs=1, max_model_len=64)
    llm.generate(["x"], SamplingParams(grammar=grammars.of_regex("[ab]+", "regex"), stop=["a", "b"]))
    (masks,) = made
    assert masks._found or masks._begun
    llm.generate(["x"], SamplingParams(max_tokens=1))
    assert not masks._found
    assert not masks._begun


def test_looking_at_once_is_in_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    look_ahead = FormMasks.look_ahead
    monkeypatch.setattr(FormMasks, "look_ahead", lambda self, *asked: (time.sleep(0.02), look_ahead(self, *asked))[1])
    llm = LLM(num_threads=1, max_num_seqs=1, max_model_len=64)
    llm.generate(["x"], SamplingParams(grammar=ANYTHING, max_tokens=3))
    steps = llm.ledger.steps(10)
    assert [step.mask_ns >= 20_000_000 for step in steps][:2] == [True, True]


def test_of_what_looks_take_one_that_was_interrupted_says_nothing_nor_does_a_thread_that_waited(
    known: Grammars,
) -> None:
    masks, said = known.masks(), []
    for took_ns, by_thread in (
        (40, False),
        (40, True),
        (9000, False),
        (50, False),
        (800, False),
        (10**9, True),
        (3, True),
        (2, True),
    ):
        masks._learn(took_ns, by_thread=by_thread)
        said.append(masks._look_ns)
    assert said == [0, 40, 40, 50, 800, 800, 800, 3]


def test_what_is_slow_one_time_in_three_is_the_threads(known: Grammars) -> None:
    masks, said = known.masks(), []
    for took_ns, by_thread in ((40, False), (40, False), (SLOW_NS, False), (40, True), (40, True), (40, True)):
        masks._learn(took_ns, by_thread=by_thread)
        said.append(masks._look_ns)
    assert said == [0, 40, SLOW_NS, SLOW_NS, SLOW_NS, 40]


def test_a_walk_goes_on_alike_whatever_was_looked_at_before(known: Grammars) -> None:
    """Steps of one token, rows of what must come, and several tokens at once: the masks are those of a walk anew."""
    grammar, rng = of_schema(SCHEMAS[0]), np.random.default_rng(0)
    masks, slot, came = known.masks(), slot_of(known, grammar, []), []
    for turn in range(60):
        (forced,) = masks.look_ahead([slot], True)
        slot.tokens[slot.num_known : slot.num_known + len(forced)] = forced
        counts = [len(came) + count for count in range(len(forced) + 1)]
        taken = masks.take([slot] * len(counts), counts)
        for line, count in enumerate(counts):
            outputs = [*came, *forced][:count]
            assert tokens_of(taken[line]) == allowed(walked(known, grammar), outputs, count)
        came += [*forced, int(rng.choice(tokens_of(taken[len(forced)])))]
        if came[-1] == 0:
            break
        for token in came[slot.num_known - 1 :]:
            slot.learn_sampled(slot.num_known, token)
        if turn % 5 == 4:  # preempted, and behind a token that nobody looked at
            slot.grammar = walked(known, grammar)
    assert len(came) > 9


def test_a_walk_anew_is_shown_all_outputs_though_the_last_alone_would_be_one(known: Grammars) -> None:
    a, b, x = (ids(letter)[0] for letter in "abx")
    assert known.masks().look_ahead([slot_of(known, grammars.of_choice(["abx", "bcd"], "choice"), [a, b])], True) == [
        (x,)
    ]


def test_masks_that_nobody_has_taken_yet_stay_as_they_are(known: Grammars) -> None:
    masks, a = known.masks(), ids("a")
    slots = [slot_of(known, grammar, a) for grammar in (grammars.of_choice(["abc", "axyz"], "choice"), ANYTHING)]
    for slot in slots:
        masks.look_ahead([slot], True)
    taken = masks.take(slots, [1, 1])
    for line, slot in enumerate(slots):
        assert tokens_of(taken[line]) == allowed(walked(known, slot.admitted.sampling.grammar), a, 1)


# ---- what must come


def test_what_must_come_takes_no_step_of_its_own_and_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [held(of_schema(schema), seed, logprobs=1) for seed, schema in enumerate(SCHEMAS * 2)]
    asked[3] = held(of_schema(SCHEMAS[0]), 3, frequency_penalty=0.5, min_tokens=4, logit_bias={5: 2.0}, max_tokens=7)

    def answers() -> tuple[list[object], list[tuple[int, int]]]:
        llm = LLM(num_threads=1, max_num_seqs=8, max_model_len=256, kernels="native")
        outputs = llm.generate(["x = "] * 10, asked)
        told = [(output.token_ids, output.finish_reason, output.logprobs) for output in outputs]
        return told, [tuple(counts) for step in llm.ledger.steps(10_000) for _, *counts in step.verified]

    quick, verified = answers()
    monkeypatch.setattr(GrammarWalk, "_ask_forced", lambda self, *where: [])
    assert answers() == (quick, [])
    assert len(verified) > 10
    assert all(num_drafts == num_right for num_drafts, num_right in verified)


def test_what_must_come_is_all_that_may(known: Grammars) -> None:
    schema = {"type": "object", "properties": {"colour": {"const": "red"}}, "required": ["colour"]}
    grammar, masks = of_schema(schema | {"additionalProperties": False}), known.masks()
    slot, taken = slot_of(known, grammar, ids('{"')), ids('{"')
    (forced,) = masks.look_ahead([slot], True)
    assert forced
    for token in forced:
        assert allowed(walked(known, grammar), taken, len(taken)) == [token]
        taken.append(token)
    assert masks.look_ahead([slot], False) == [()]
    assert masks.look_ahead([slot_of(known, ANYTHING, [])], True) == [()]
    ended = slot_of(known, grammars.of_choice(["a"], "choice"), ids("a"))
    assert masks.look_ahead([ended], True) == [()]  # but the end


@pytest.mark.parametrize("begin", ["", "|"], ids=["from_the_beginning", "behind_a_token"])
def test_of_a_long_text_the_parser_is_asked_once(begin: str, known: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said is handed out a row at a time; the masks of the drafts come of it too, and are the parser's."""
    text, follow, asked = "The quick brown fox jumps over the lazy dog, twice. " * 2, GrammarWalk.follow, []
    monkeypatch.setattr(GrammarWalk, "follow", lambda self, *where: (asked.append(where), follow(self, *where))[1])
    ask, ends = GrammarWalk._ask_forced, []
    monkeypatch.setattr(GrammarWalk, "_ask_forced", lambda self, *where: (ends.append(where), ask(self, *where))[1])
    grammar, masks, came = grammars.of_choice([begin + text], "choice"), known.masks(), ids(begin)
    slot = slot_of(known, grammar, came)
    while forced := masks.look_ahead([slot], True)[0]:
        slot.tokens[slot.num_known : slot.num_known + len(forced)] = forced
        taken = masks.take([slot] * (len(forced) + 1), range(len(came), len(came) + len(forced) + 1))
        *drafts, (last, *_) = [tokens_of(taken[line]) for line in range(len(forced) + 1)]
        assert drafts == [[one] for one in forced]
        for token in (*forced, last) if last else forced:  # as rows with drafts go
            came.append(token)
            slot.learn_sampled(slot.num_known, token)
    assert len(came) > 2 * MOST_FORCED
    assert {len(outputs) for outputs, _ in asked} - {0} == {len(came)}  # where no more was known
    assert [count for count, _ in ends] == [len(begin), len(came)]
    for count, token in enumerate(came[len(begin) :], len(begin)):
        assert allowed(walked(known, grammar), came[:count], count) == [token]


def test_a_forced_text_that_did_not_come_is_no_mask(known: Grammars) -> None:
    masks, abc = known.masks(), ids("abc")
    slot = slot_of(known, grammars.of_choice(["abc"], "choice"), [])
    for _ in range(2):  # it looks behind what must come
        assert masks.look_ahead([slot], True) == [tuple(abc)]
        assert tokens_of(masks.take([slot], [0])[0]) == abc  # of which the row that comes has nothing
    masks.look_ahead([slot], True)
    slot.tokens[1] = ids("x")[0]  # a draft of somebody else's
    assert masks.take([slot], [1]) == {}
    assert allowed(slot.grammar, [], 0) == abc[:1]
