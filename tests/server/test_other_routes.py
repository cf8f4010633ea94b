"""Routes that clients of other servers ask for."""

from splittime import __version__

from .conftest import TEMPLATE, say


def test_small_questions_are_answered(launch) -> None:
    live = launch(say("x"))
    assert live.get("/version")[2] == {"version": __version__}
    assert live.get("/ping")[::2] == (200, {})
    assert live.post("/ping", b"")[::2] == (200, {})
    assert live.get("/v1/models/")[2] == live.get("/v1/models")[2]
    status, headers, icon = live.get("/favicon.ico")
    assert (status, headers["content-type"]) == (200, "image/svg+xml")
    assert icon.startswith(b"<svg")


def test_the_tokenizer_tells_what_a_client_needs_to_count_as_we_do(launch) -> None:
    told = launch(say("x")).get("/tokenizer_info")[2]
    assert told["special_tokens"] == {"eos_token": "<|end|>"}
    assert told["chat_templates"] == {"default": TEMPLATE}
    assert (told["vocab_size"], told["eos_token_ids"]) == (257, [256])


def test_resetting_the_prefix_cache_switches_it_off_and_on(launch) -> None:
    live = launch(say("x"))
    live.engine.knobs_now["enable_prefix_caching"] = True
    asked = []
    configure = live.engine.configure

    async def noted(knobs, *, lasts=True):
        asked.append((knobs, lasts))
        return await configure(knobs)

    live.engine.configure = noted
    assert live.post("/reset_prefix_cache", b"")[0] == 200
    assert asked == [({"enable_prefix_caching": is_on}, False) for is_on in (False, True)]  # told to no successor


def test_a_cache_that_is_off_stays_off(launch) -> None:
    live = launch(say("x"))
    live.engine.knobs_now["enable_prefix_caching"] = False
    assert live.post("/reset_prefix_cache", b"")[0] == 200
    assert live.engine.knobs_now["enable_prefix_caching"] is False
