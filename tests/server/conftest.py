"""The application on a real loopback socket, in a thread of its own, with the scripted engine behind it."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import tokenizers
import uvloop
from tokenizers import decoders, models, pre_tokenizers

from splittime.api.limits import ModelInfo
from splittime.ledger.store import Ledger
from splittime.server.app import App, Service, listen, make_server
from splittime.server.config import ServerConfig
from splittime.text.foreign_code import byte_alphabet
from splittime.text.tokenizer import Tokenizer
from splittime.web import serving

from .fake_engine import FakeEngine

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EOS = 256


def byte_tokenizer(template: str = TEMPLATE, marks: tuple[str, ...] = ()) -> Tokenizer:
    """256 bytes, one token each (id = byte), one special end token, and these marks."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(list(marks))
    return Tokenizer(backend, config={"eos_token": "<|end|>"}, chat_template=template)


def say(text: str, *, end: bool = True) -> Callable[..., list[int]]:
    """A script that writes this text, byte by byte, for every request."""
    ids = list(text.encode()) + ([EOS] if end else [])
    return lambda request: ids


class LiveServer:
    """What a test holds: the address, and the parts behind it."""

    def __init__(self, engine: FakeEngine, config: ServerConfig, model: ModelInfo, template: str = TEMPLATE) -> None:
        self.engine, self.config, self.model, self.template = engine, config, model, template
        self.ledger = Ledger()
        self.marks: tuple[str, ...] = ()  # of its tokenizer, set before the start
        self.port = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._main()), daemon=True)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        tokenizer = byte_tokenizer(self.template, self.marks)
        self.service = Service(self.engine, tokenizer, self.ledger, self.config, self.model)
        self.app = App(self.service)
        listener = listen(self.config)
        self.port = listener.getsockname()[1]
        self.server = make_server(self.app, self.config)
        self._serving = self.loop.create_task(self.server.serve(sockets=[listener]))
        self._started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving
        await self._hang_up()
        self.service.close()

    async def _hang_up(self) -> None:
        state = self.server.server_state
        for connection in list(state.connections):
            connection.shutdown()
        for _ in range(100):
            if state.connections or state.tasks:
                await asyncio.sleep(0.001)

    def start(self) -> None:
        self._thread.start()
        self._started.wait(60)
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=60):
                return

    def stop(self) -> None:
        """At once: uvicorn would see that it should end at its next tick, and then give connections a tick to close."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(60)

    def __enter__(self) -> "LiveServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, function: Callable) -> object:
        """Run a function in the server's event loop. Raises RuntimeError if that has ended."""
        done: Future = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return done.result(60)

    def request(self, method: str, path: str, body: object = None, headers: dict | None = None):
        """(status, headers, body) of one exchange; JSON bodies are decoded."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers or {})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status, fields, raw = response.status, response.headers, response.read()
        except urllib.error.HTTPError as error:
            status, fields, raw = error.code, error.headers, error.read()
        with contextlib.suppress(RuntimeError):  # the server has ended behind its answer
            self.call(lambda: None)  # what it does right after its last byte is done too
        is_json = fields.get("content-type", "").startswith("application/json")
        return status, fields, json.loads(raw) if is_json else raw

    def get(self, path: str, **headers: str):
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: object, headers: dict | None = None):
        return self.request("POST", path, body, headers)

    def events_later(self, path: str, body: dict) -> threading.Thread:
        """The same exchange in a thread."""
        thread = threading.Thread(target=self.events, args=(path, body), daemon=True)
        thread.start()
        return thread

    def events(self, path: str, body: dict, headers: dict | None = None) -> list:
        """The events of a stream, decoded; the end mark as it is."""
        status, fields, raw = self.post(path, {**body, "stream": True}, headers)
        assert status == 200, raw
        assert fields["content-type"].startswith("text/event-stream")
        parts = [part.removeprefix("data: ") for part in raw.decode().split("\n\n") if part]
        return [part if part == "[DONE]" else json.loads(part) for part in parts]


@pytest.fixture(autouse=True)
def lines_are_told_anew() -> None:
    """The filters of lines stay for the life of a process; a test before may have used up its burst."""
    for name in serving.LOGGERS:
        for each in logging.getLogger(name).filters:
            getattr(each, "_windows", {}).clear()


@pytest.fixture
def launch() -> Iterator[Callable[..., LiveServer]]:
    """Start servers; they are stopped when the test ends."""
    live: list[LiveServer] = []

    def start(
        script=None, *, config: dict | None = None, model: dict | None = None, template: str = TEMPLATE, **engine
    ) -> LiveServer:
        info = {"names": ("fake",), "max_model_len": 4096, "vocab_size": 257, "eos_token_ids": (EOS,), **(model or {})}
        fake = FakeEngine(script or say("hello world"), **engine)
        server = LiveServer(fake, ServerConfig(port=0, **(config or {})), ModelInfo(**info), template)
        server.start()
        live.append(server)
        return server

    yield start
    for server in live:
        server.stop()
