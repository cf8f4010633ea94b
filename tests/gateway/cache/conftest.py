"""A gateway that keeps answers, in front of an upstream that counts what it is asked, and answers as it is told."""

import asyncio
import json

import pytest

from ..conftest import gateway_of, upstream
from ..hostile import STREAM_HEAD, Hostile, chunk, event, whole

ROUTE = '[[cache_route]]\nmodel = "{model}"\n{more}\n'


class Echoing(Hostile):
    """Its answers tell how many requests there were. A body's `act` says how it ends, `gate` whether it waits."""

    def __init__(self) -> None:
        self.numbers = 0
        super().__init__()

    async def do_echo(self, reader, writer, body) -> bool:
        self.numbers += 1
        text = body.get("says") or f"answer {self.numbers}"
        last, number = body.get("ends", "stop"), self.numbers
        while body.get("waits") and not self.hold.is_set():
            await asyncio.sleep(0.002)
        if body.get("act") == "fails":
            writer.write(whole(500, {"error": {"message": "it broke"}}))
        elif not body.get("stream"):
            choice = {"index": 0, "message": {"content": text}, "finish_reason": last}
            told = {"id": f"up-{number}", "choices": [choice], "timing": {"secret": 1}}
            told["usage"] = {"prompt_tokens": 7, "completion_tokens": 3}
            writer.write(whole(200, told))
        else:
            return await self._echo_stream(reader, writer, body, text, last)
        return False

    async def _echo_stream(self, reader, writer, body, text, last) -> bool:
        writer.write(STREAM_HEAD)
        for part in (text[:3], text[3:]):
            piece = {"id": "up", "choices": [{"index": 0, "delta": {"content": part}, "finish_reason": None}]}
            writer.write(chunk(event(piece)))
            await writer.drain()
            await asyncio.sleep(body.get("pause_s", 0))
            while body.get("halts") and not self.hold.is_set():
                await asyncio.sleep(0.002)
        if body.get("act") == "dies":
            await asyncio.sleep(0.05)
            return True
        ending = {"id": "up", "choices": [{"index": 0, "delta": {}, "finish_reason": last}], "timing": {"secret": 1}}
        usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
        for each in (ending, usage, b"[DONE]"):
            writer.write(chunk(event(each)))
        writer.write(b"0\r\n\r\n")
        return False

    async def do_judge(self, reader, writer, body) -> bool:
        """Of the verifier: yes where only `!` and `,` differ. The second text says where it waits or breaks off."""
        pair = json.loads(body["messages"][-1]["content"])
        plain = [text.replace("!", "").replace(",", "") for text in pair.values()]
        while "waits" in plain[1] and not self.hold.is_set():
            await asyncio.sleep(0.002)
        if "breaks" in plain[1]:
            return True
        said = {"message": {"content": json.dumps({"same": "yes" if plain[0] == plain[1] else "no"})}}
        told = {"choices": [{"index": 0, **said, "finish_reason": "stop"}]}
        writer.write(whole(200, told | {"usage": {"prompt_tokens": 100, "completion_tokens": 6}}))
        return False

    async def do_vectors(self, reader, writer, body) -> bool:
        """Of `/v1/embeddings`: a vector that depends on the first word alone; none of a text that says so."""
        if "refused" in body["input"]:
            writer.write(whole(413, {"error": {"message": "too long"}}))
            return False
        first = sum(body["input"].split()[0].encode())
        vector = [1.0, float(first % 7)]
        writer.write(whole(200, {"data": [{"index": 0, "embedding": vector}]}))
        return False


@pytest.fixture(scope="session")
def echoing():
    server = Echoing()
    yield server
    server.stop()


def config(echoing, *routes: str, **tables: dict) -> str:
    """The text of a config: a route's text, for models `m0`, `m1` ..., and tables with their keys."""
    models = [f"m{number}" for number in range(len(routes))]
    text = upstream("echo", echoing.url("echo"), *models, "plain")
    text += upstream("judge", echoing.url("judge"), "judge", kind="splittime")
    text += "".join(ROUTE.format(model=model, more=more) for model, more in zip(models, routes, strict=True))
    for name, keys in tables.items():
        text += f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    return text


def like(echoing, **verifier) -> dict[str, dict]:
    """The tables that like questions need."""
    embedder = {"url": echoing.url("vectors"), "model": "e", "key_env": "E"}
    return {"embedder": embedder, "verifier": {"model": "judge", **verifier}}


@pytest.fixture(scope="module")
def caching(echoing, tmp_path_factory):
    """m0: exact. m1: samples too, at once. m2: like questions. m3: so too, each hit shadowed. m4: short-lived.

    The embedder finds all questions near that begin with one word, so that the verifier alone decides."""
    routes = (
        "shadow_share = 0.0",
        "sampled = true\npace = 0.0\nshadow_share = 0.0",
        "semantic = true\nthreshold = 0.9\nshadow_share = 0.0",
        "semantic = true\nthreshold = 0.9\nshadow_share = 1.0",
        "max_age_s = 1\nshadow_share = 0.0",
    )
    text = config(echoing, *routes, cache={"max_answer_bytes": 4000}, breaker={"failures": 1000}, **like(echoing))
    with gateway_of(tmp_path_factory.mktemp("caching"), text, E="a-key") as started:
        yield started
