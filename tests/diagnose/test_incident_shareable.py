"""What of a record goes into an incident: no planted text comes out, and what was equal stays equal."""

import random

import msgspec
import pytest
from ward import Case, Ward, ids

from splittime.core.engine import SleepReport
from splittime.core.errors import ErrorInfo
from splittime.diagnose.incident.gather import AS_THEY_ARE, LEFT_OUT, SAFE_LABELS, Shareable, shareable_metrics
from splittime.diagnose.rules.speculation import blocks_of, tokens_guessed
from splittime.gateway.metrics import GATEWAY_METRICS
from splittime.ledger.account import ClosedAccount
from splittime.ledger.attempts import (
    AffinityDecision,
    Attempt,
    Considered,
    DifficultyDecision,
    FirstTokens,
    RouteDecision,
)
from splittime.ledger.export.metrics import METRICS
from splittime.ledger.export.prometheus import ALIASES
from splittime.ledger.facts import Process, ServerFacts
from splittime.ledger.prompt_parts import answer_hashes, prefix_list, prompt_hashes
from splittime.ledger.steps import StepRecord
from splittime.simulate.trace import StandIns

PLANTED = "sk-planted.SECRET:1"  # what a request id may hold too
RENAMED = {
    *("request_id", "group_id", "model", "endpoint", "finish_reason", "error", "prompt_parts", "prefixes"),
    *("answer_prefixes", "cache_salt", "tenant", "trace_id", "parent_id", "attempts", "degraded", "routing"),
    "config_version",
}
NOT_SAFE_LABELS = {"tenant", "model_name", "model", "running_lora_adapters", "waiting_lora_adapters"}
FACTS = ServerFacts(version="1", model="/home/planted/SECRET/small, code", max_model_len=9)


def account(**fields) -> ClosedAccount:
    about = {"request_id": "r", "group_id": "r", "model": "small", "endpoint": "chat", "finish_reason": "stop"}
    times = {"started_at_unix_ns": 0, "start_ns": 0, "end_ns": 9, "intervals": ()}
    return ClosedAccount(**{**about, **times, **fields})


def written(record) -> str:
    return msgspec.json.encode(record).decode()


def test_each_field_of_an_account_is_decided():
    assert set(ClosedAccount.__struct_fields__) == {*AS_THEY_ARE, *RENAMED}


DECIDED = {
    Attempt: "upstream request_id considered begin_ns end_ns status first_byte_ns error num_events knows_tokens nested "
    "nested_fault resumed_by resumed_after lost_tokens first_tokens affinity",
    Considered: "upstream requests tokens rtt_ns wait_ns",
    AffinityDecision: "result why upstream matched_bytes shared_bytes tokens cap_tokens",
    RouteDecision: "policy rule asked_model model upstreams prompt_tokens headers difficulty",
    DifficultyDecision: "choice",
    FirstTokens: "verdict num_tokens mean_logprob below held_ns why",
}
"""What `incident/gather.py` has decided on. A field that is new there is left out until somebody has."""


@pytest.mark.parametrize("kind", DECIDED)
def test_each_field_of_an_attempt_is_decided(kind):
    assert " ".join(kind.__struct_fields__) == DECIDED[kind]


def test_no_text_of_a_client_or_an_upstream_comes_out():
    attempt = Attempt(
        upstream=f"http://me:{PLANTED}@host/",
        request_id=PLANTED,
        considered=(Considered(f"http://{PLANTED}", 1, 2),),
        begin_ns=0,
        end_ns=1,
        error=PLANTED,
        nested_fault=PLANTED,
        resumed_by=PLANTED,
        first_tokens=FirstTokens(verdict=PLANTED, mean_logprob=-0.25, below=-1.0),
        affinity=AffinityDecision(result=PLANTED, why=PLANTED, upstream=f"{PLANTED}/"),
    )
    routing = RouteDecision(
        policy="0af3",
        rule="code",
        asked_model=PLANTED,
        model=PLANTED,
        prompt_tokens=3,
        headers=(("X-Team", PLANTED),),
        difficulty=DifficultyDecision(choice=PLANTED),
    )
    texts = ("request_id", "group_id", "model", "endpoint", "finish_reason", "cache_salt", "tenant", "trace_id")
    error = ErrorInfo("x", PLANTED, PLANTED, 400, PLANTED, PLANTED, [PLANTED], PLANTED)
    full = account(
        **dict.fromkeys((*texts, "parent_id", "config_version"), PLANTED),
        degraded=f"{PLANTED} !",
        error=error,
        attempts=(attempt,),
        routing=routing,
    )
    shown = Shareable(FACTS).account(full)
    assert "SECRET" in written(full)
    assert "SECRET" not in written(shown)
    assert "0.25" not in written(shown)  # by a figure of the text, guesses of it could be tried
    assert shown.error == ErrorInfo("x", "other", "other", 400)
    assert shown.routing.rule == "code"


def test_ids_of_our_own_stay_and_those_of_clients_are_told_apart():
    own, shareable = "0123456789abcdef01234567", Shareable(FACTS)
    assert shareable.request_id(own) == own
    assert shareable.request_id(f"chatcmpl-{own}-3") == f"chatcmpl-{own}-3"
    mine = shareable.request_id("mine@acme")
    assert shareable.request_id("cmpl-mine@acme") == f"cmpl-{mine}"
    assert mine != shareable.request_id("mine@other")
    assert "mine" not in mine
    assert "acme" not in mine
    assert Shareable(FACTS).request_id("mine@acme") != mine  # another bundle's key


def test_models_that_are_served_keep_their_names_without_folders():
    shareable = Shareable(FACTS)
    assert shareable.model("code") == "code"
    assert shareable.model("/home/planted/SECRET/small") == "small"
    assert shareable.model("what do I say") == shareable.model("what do I say") != "what do I say"
    assert shareable.facts(FACTS).model == "small, code"


def test_of_settings_numbers_stay_and_texts_do_not():
    settings = {
        "max_num_seqs": 8,
        "kernels": "native",
        "kv_cache_dtype": f"{PLANTED} and more",
        "model_path": f"/home/{PLANTED}",
        "api_key": [PLANTED],
        "speculative_config": {"method": "suffix", "model": PLANTED, "num_speculative_tokens": 3},
        "upstreams": [{"name": "a", "url": f"http://{PLANTED}", "max_in_flight": 2}],
        f"{PLANTED}": 1,
        "quantization": None,
    }
    sleeping = Process(name="engine", started_ns=1, sleeps=(SleepReport(action="sleep", level=1, note=PLANTED),))
    facts = msgspec.structs.replace(FACTS, settings=settings, processes=(sleeping,), simulated=PLANTED, engine="!")
    shown = Shareable(facts).facts(facts)
    assert "SECRET" not in written(shown)
    assert (shown.settings["max_num_seqs"], shown.settings["kernels"], shown.settings["quantization"]) == (
        8,
        "native",
        None,
    )
    assert shown.settings["speculative_config"] == {
        "method": "suffix",
        "model": LEFT_OUT,
        "num_speculative_tokens": 3,
    }
    assert shown.settings["upstreams"] == [{"name": "a", "url": LEFT_OUT, "max_in_flight": 2}]


def test_a_step_keeps_its_numbers_and_names_the_accounts_requests():
    numbers = dict.fromkeys(StepRecord.__struct_fields__, 1)
    lists = {
        "rows": ((PLANTED, 0, 5),),
        "victims": (PLANTED,),
        "verified": ((PLANTED, 3, 2),),
        "drafts": ((PLANTED, 2),),
        "late": ((PLANTED, 1),),
        "comings": (5, (PLANTED, "came"), (PLANTED, 9)),
    }
    full, shareable = StepRecord(**{**numbers, **lists, "execution": "eager"}), Shareable(FACTS)
    shown, name = shareable.step(full), shareable.request_id(PLANTED)
    assert shown.rows == ((name, 0, 5),)
    assert (shown.victims, shown.verified, shown.drafts) == ((name,), ((name, 3, 2),), ((name, 2),))
    assert (shown.late, shown.comings) == (((name, 1),), (5, (name, "came"), (name, 9)))
    (foreign,) = shareable.step(msgspec.structs.replace(full, comings=((PLANTED, PLANTED),))).told_comings
    assert foreign == (name, "other")
    assert msgspec.structs.replace(shown, **lists) == full
    assert shareable.step(msgspec.structs.replace(full, execution=PLANTED, drafts=msgspec.UNSET)).execution == "host"


@pytest.fixture(scope="module")
def repeating():
    """Requests that share beginnings, and answers that repeat blocks of each other."""
    rng, shared = random.Random(3), ids(64, 1)
    found = []
    for number in range(40):
        prompt = [*shared[: rng.choice((16, 48, 64))], *ids(16 * rng.randrange(5), number % 7)]
        answer = ids(64, number % 5) * 2
        parts, prefixes, _ = prompt_hashes(prompt)
        found.append(
            account(
                request_id=f"r{number}",
                start_ns=100 * number,
                end_ns=100 * number + 150,
                prompt_tokens=len(prompt),
                output_tokens=len(answer),
                prompt_parts=parts,
                prefixes=prefixes,
                answer_prefixes=answer_hashes(prompt, answer),
            )
        )
    return found


def test_hashes_of_prompts_are_others_and_are_equal_where_they_were(repeating):
    shareable = Shareable(FACTS)
    shown = [shareable.account(each) for each in repeating]
    for take in (_beginnings, _parts):
        before, after = [take(each) for each in repeating], [take(each) for each in shown]
        known = {mark for marks in before for mark in marks}
        assert len(known) > 30
        assert known.isdisjoint(mark for marks in after for mark in marks)
        renamed = dict(zip(_flat(before), _flat(after), strict=True))
        assert len(set(renamed.values())) == len(renamed) == len(known)
        assert [[renamed[mark] for mark in marks] for marks in before] == after


def test_blocks_that_come_again_are_still_found(repeating):
    shareable = Shareable(FACTS)
    shown = [shareable.account(each) for each in repeating]
    for has_corpus in (False, True):
        before, after = tokens_guessed(repeating, has_corpus), tokens_guessed(shown, has_corpus)
        assert sum(before.values()) > 0
        assert list(before.values()) == list(after.values())
    assert set(map(len, map(blocks_of, shown))) == set(map(len, map(blocks_of, repeating)))


def test_what_a_replay_makes_of_the_hashes_is_equal_where_it_was(repeating):
    shareable = Shareable(FACTS)
    shown = [shareable.account(each) for each in repeating]

    def shared(accounts) -> list[int]:
        stand_ins, first = StandIns(accounts), None
        found = []
        for each in accounts:
            tokens, _ = stand_ins.tokens_of(each)
            first = first or tokens
            found.append(next((i for i, (a, b) in enumerate(zip(tokens, first, strict=False)) if a != b), -1) // 16)
        return found

    assert shared(repeating) == shared(shown)


def test_the_doctor_finds_the_same_in_what_is_shareable():
    from splittime.diagnose.doctor import diagnose

    cases = [Case(40 * i, ids(300, i), 20) for i in range(80)]
    books = Ward(settings={"max_num_seqs": 2}).run(*cases)
    shareable = Shareable(books.facts)
    shown = msgspec.structs.replace(
        books,
        facts=shareable.facts(books.facts),
        accounts=tuple(map(shareable.account, books.accounts)),
        steps=tuple(map(shareable.step, books.steps)),
    )
    before, after = diagnose(books), diagnose(shown)
    assert before.findings
    shares = [(finding.name, finding.share_of_time) for finding in before.findings]
    assert [(finding.name, finding.share_of_time) for finding in after.findings] == shares


def test_metrics_without_names_of_tenants():
    text = (
        "# HELP splittime_steps_total SECRET\n# TYPE splittime_steps_total counter\nsplittime_steps_total 3\n"
        'splittime_e2e_seconds_bucket{prompt_tokens="131073+",le="+Inf"} 2\n'
        'splittime_gateway_budget_used_tokens{tenant="SECRET",budget="day"} 4\n'
        'vllm:num_requests_running{model_name="/x/SECRET, \\"y\\"",engine="0"} 1\n'
        'splittime_steps_total{other="SECRET"} 1\n'
        "process_SECRET 1\nSECRET\n"
    )
    shown = shareable_metrics(text, Shareable(FACTS))
    assert "SECRET" not in shown
    assert "splittime_steps_total 3\n" in shown
    assert 'splittime_e2e_seconds_bucket{prompt_tokens="131073+",le="+Inf"} 2\n' in shown
    assert "# TYPE splittime_steps_total counter\n" in shown


def test_each_label_of_a_metric_is_decided():
    specs = (*METRICS, *GATEWAY_METRICS, *(alias.spec for alias in ALIASES))
    assert {name for spec in specs for name in spec.labels} <= SAFE_LABELS | NOT_SAFE_LABELS
    assert SAFE_LABELS.isdisjoint(NOT_SAFE_LABELS)


def _beginnings(each: ClosedAccount) -> list[bytes]:
    return prefix_list(each.prefixes + each.answer_prefixes)


def _parts(each: ClosedAccount) -> list[int]:
    return [mark for mark, _, _ in each.prompt_parts]


def _flat(lists):
    return [mark for marks in lists for mark in marks]
