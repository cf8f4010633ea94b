"""Adapters by HTTP: names are models, they come and go for an operator alone, and only from below the root."""

import threading
from pathlib import Path

import pytest

from patience import until
from splittime.core.errors import ConfigError
from splittime.server.adapters import FILES
from splittime.server.config import ServerConfig

from .conftest import LiveServer, say

OPERATOR, TENANT = ({"Authorization": f"Bearer {key}"} for key in ("operators", "tenants"))


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_bytes(b"{}")
    return folder


@pytest.fixture
def root(tmp_path) -> Path:
    make_folder(tmp_path / "root" / "sql")
    return tmp_path / "root"


@pytest.fixture
def live(launch, root) -> LiveServer:
    return launch(say("ok"), config={"api_key": ("operators", "tenants"), "lora_root": str(root)}, step_s=0.01)


def load(live: LiveServer, name: str, path: str, who: dict = OPERATOR) -> tuple:
    return live.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, who)


def unload(live: LiveServer, name: str, who: dict = OPERATOR) -> tuple:
    return live.post("/v1/unload_lora_adapter", {"lora_name": name}, who)


def ask(live: LiveServer, model: str, **more) -> tuple:
    return live.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "model": model, **more}, TENANT)


def test_an_adapter_is_a_model(live) -> None:
    assert load(live, "sql", "sql")[0] == 200
    cards = {card["id"]: card for card in live.get("/v1/models", **TENANT)[2]["data"]}
    assert (cards["sql"]["parent"], cards["fake"]["parent"], list(cards)) == ("fake", None, ["fake", "sql"])
    assert live.get("/v1/models/sql", **OPERATOR)[2] == cards["sql"]
    status, _, answer = ask(live, "sql")
    assert (status, answer["model"]) == (200, "sql")
    assert ask(live, "fake")[2]["model"] == "fake"
    chat = {"messages": [{"role": "user", "content": "x"}], "model": "sql"}
    assert live.post("/v1/chat/completions", chat, TENANT)[2]["model"] == "sql"
    first, second, third = live.engine.submitted
    assert first.adapter == third.adapter
    assert first.adapter.startswith("sql#")
    assert second.adapter == ""
    assert [account.model for account in live.ledger.accounts()] == ["sql", "fake", "sql"]


def test_a_name_that_is_none_is_a_404_as_openais(live) -> None:
    status, _, answer = ask(live, "sql")
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    load(live, "sql", "sql")
    assert "served: fake, sql" in str(ask(live, "nosql")[2])
    unload(live, "sql")
    assert ask(live, "sql")[0] == 404
    assert live.get("/v1/models/sql", **OPERATOR)[0] == 404


def test_one_that_is_loaded_again_is_another(live) -> None:
    for _ in range(2):
        load(live, "sql", "sql")
        ask(live, "sql")
        assert unload(live, "sql")[0] == 200
    first, second = live.engine.submitted
    assert first.adapter != second.adapter
    assert live.engine.adapters == {}


def test_only_an_operator_changes_what_is_served(live) -> None:
    assert load(live, "sql", "sql", TENANT)[0] == 403
    load(live, "sql", "sql")
    assert unload(live, "sql", TENANT)[0] == 403
    assert unload(live, "sql", {})[0] == 401


def test_nothing_is_loaded_from_outside_the_root(live, root, tmp_path) -> None:
    outside = make_folder(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    (root / "half").mkdir()
    for name in FILES:
        (root / "half" / name).symlink_to(outside / name)
    asked = ("../outside", str(outside), "link", "half", "sql/../../outside", "none", "/etc", "sql\0", "~", "x" * 4000)
    answers = [load(live, "a", path) for path in asked]
    assert {status for status, _, _ in answers} == {404}
    assert {answer["error"]["code"] for _, _, answer in answers} == {"adapter_not_found"}
    assert not live.engine.adapters
    assert load(live, "a", str(root / "sql"))[0] == 200


def test_without_a_root_nothing_is_loaded(launch, root) -> None:
    status, _, answer = load(launch(say("x")), "a", str(root / "sql"))
    assert (status, answer["error"]["code"]) == (403, "lora_root")


@pytest.mark.parametrize("name", ["", "a#1", "a,b", "-a", "fake", "a b", "é"])
def test_names_that_cannot_be(live, name) -> None:
    status, _, answer = load(live, name, "sql")
    assert (status, answer["error"]["param"]) == (400, "lora_name")


def test_a_name_is_taken_once_whoever_is_faster(live) -> None:
    answers: list[int] = []
    asking = [threading.Thread(target=lambda: answers.append(load(live, "sql", "sql")[0])) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(60)
    assert sorted(answers) == [200, 400, 400, 400]
    assert len(live.engine.adapters) == 1


def test_what_the_engine_refuses_is_the_requests_fault(live) -> None:
    live.engine.adapter_fault = ConfigError("use_dora = True is not supported", param="lora_path")
    status, _, answer = load(live, "sql", "sql")
    assert (status, answer["error"]["param"]) == (400, "lora_path")
    assert "use_dora" in answer["error"]["message"]
    assert ask(live, "sql")[0] == 404


def test_one_that_is_in_use_is_not_unloaded(launch, root) -> None:
    live = launch(say("a" * 2000), config={"lora_root": str(root)}, step_s=0.01)
    load(live, "sql", "sql", {})
    reading = live.events_later("/v1/completions", {"prompt": "x", "max_tokens": 2000, "model": "sql"})
    until(lambda: live.engine.running)
    status, _, answer = unload(live, "sql", {})
    assert (status, answer["error"]["code"]) == (409, "adapter_in_use")
    assert ask(live, "sql")[0] == 200
    live.engine.step_s = 0.0
    reading.join(60)
    until(lambda: unload(live, "sql", {})[0] == 200)


def test_one_that_goes_while_a_prompt_is_tokenised_is_a_404(live, monkeypatch) -> None:
    """Between the reading of a request and its hand-over."""
    from splittime.server.prompts import Prompts

    load(live, "sql", "sql")
    tokenize = Prompts.tokenize

    async def slowly(self, deadline_ns):
        live.service.model = live.model
        return await tokenize(self, deadline_ns)

    monkeypatch.setattr(Prompts, "tokenize", slowly)
    status, _, answer = ask(live, "sql")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert not live.engine.submitted


def test_unloading_what_is_none(live) -> None:
    status, _, answer = unload(live, "sql")
    assert (status, answer["error"]["code"]) == (404, "adapter_not_found")
    assert unload(live, "fake")[0] == 404


@pytest.mark.parametrize("entries", [("sql",), ("=x",), ("sql=",), ("a#1=x",), ("a=x", "a=y")])
def test_modules_are_names_with_folders(entries) -> None:
    with pytest.raises(ConfigError, match="NAME=FOLDER"):
        ServerConfig(lora_modules=entries).validate()
