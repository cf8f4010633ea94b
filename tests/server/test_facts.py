"""`/ledger/facts`: what the server knows of itself, as of now; and the parts of a prompt in its account."""

import gc

import msgspec
import orjson

from splittime.api.limits import ModelInfo
from splittime.core.facts import TokenCost
from splittime.drive import host_time
from splittime.ledger.facts import Process, ServerFacts
from splittime.ledger.prompt_parts import prompt_hashes
from splittime.ledger.store import Ledger, open_readonly
from splittime.server.config import ServerConfig
from splittime.server.service import Service

from .conftest import byte_tokenizer, say
from .fake_engine import FakeEngine

SAID = ServerFacts(
    version="9",
    model="FakeForCausalLM",
    max_model_len=77,
    settings={"block_size": 16},
    cost=TokenCost(weight_bytes=1, kv_bytes_per_token=2, operations_per_token=3, operations_per_context_token=4),
    processes=(Process(name="engine", started_ns=1, ready_ns=2),),
)


def asked(live) -> ServerFacts:
    status, _, body = live.get("/ledger/facts")
    assert status == 200
    return msgspec.json.decode(orjson.dumps(body), type=ServerFacts)


def test_of_an_engine_that_says_nothing(launch) -> None:
    facts = asked(launch())
    assert (facts.model, facts.max_model_len) == ("fake", 4096)
    assert facts.cost is facts.machine is None
    assert facts.settings["max_queued_requests"] == ServerConfig().max_queued_requests
    [server] = facts.processes
    assert server.name == "server"
    assert server.started_ns <= server.ready_ns


def test_of_both_processes_with_what_was_changed(launch) -> None:
    live = launch()
    live.engine.facts = lambda: SAID
    assert live.request("PATCH", "/knobs", {"max_queued_requests": 5})[0] == 200
    facts = asked(live)
    assert facts.model == "fake"  # as it is served, whatever the engine calls it
    assert facts.cost == SAID.cost
    assert facts.settings["block_size"] == 16
    assert facts.settings["max_queued_requests"] == 5
    assert [process.name for process in facts.processes] == ["server", "engine"]
    assert facts.process("engine") == SAID.processes[0]
    assert facts.process("gateway") is None


def test_long_collections_are_told(launch, monkeypatch) -> None:
    monkeypatch.setattr(host_time, "LONG_NS", 1)
    live = launch()
    live.call(lambda: live.service.settle(live.model))
    live.call(gc.collect)
    pauses = asked(live).process("server").pauses
    assert pauses
    assert all(duration_ns > 0 for _, duration_ns in pauses)
    gc.unfreeze()


def test_not_before_the_model_is_known() -> None:
    service = Service(FakeEngine(say("x")), byte_tokenizer(), Ledger(), ServerConfig(), None)
    assert service.facts() is None
    assert service.ledger.facts() is None
    service.close()


async def test_they_are_in_the_ledgers_file(tmp_path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    model = ModelInfo(("code",), 512, 257)
    service = Service(FakeEngine(say("x")), byte_tokenizer(), ledger, ServerConfig(), model)
    service.admission.bounds.max_queued_requests = 3
    ledger.close()
    service.close()
    facts = open_readonly(tmp_path / "l.sqlite").facts()
    assert facts.model == "code"
    assert facts.settings["max_queued_requests"] == 3


def test_an_account_holds_the_parts_of_its_prompt(launch) -> None:
    live = launch()
    text = "".join(f"line {number} says {number * 7919}\n" for number in range(40))
    for name, prompt in (("long", text), ("ids", list(range(3, 203))), ("short", "abc")):
        body = {"prompt": prompt, "max_tokens": 2}
        assert live.post("/v1/completions", body, {"X-Request-Id": name})[0] == 200
    parts = {name: live.get(f"/ledger/requests/{name}")[2]["prompt_parts"] for name in ("long", "ids", "short")}
    token_ids = tuple(live.app.service.tokenizer.encode(text))
    assert [tuple(part) for part in parts["long"]] == list(prompt_hashes(token_ids).parts)
    assert [tuple(part) for part in parts["ids"]] == list(prompt_hashes(range(3, 203)).parts)
    assert parts["short"] == []
