"""Asking a server over HTTP for anything but a generation: one GET, of JSON or of metrics.

A server that lacks a path, answers something else or does not answer in time gives None or {}: what is not told is
absent, and whoever asked says so in a note. Only `ask` touches the network. It reads at most `max_bytes` of an answer,
and follows redirects on the server itself only: the load follows none, so one that leads away, or round in a circle,
is handed back as it is, and `ask_first` names it.

What a server says of its own limits, to be asked before a schedule is drawn for it.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import aiohttp
import msgspec
import orjson

from splittime.core.errors import ConfigError, EngineError, NobodyThere
from splittime.present.terminal import clipped
from splittime.wire.dialects import DIALECTS, Samples, labels, parse
from splittime.wire.sse import body_text
from splittime.wire.target import NOBODY, UNKNOWN_CERTIFICATE, Target, check_key

TIMEOUT_S = 10.0
MAX_BODY_BYTES = 16 * 2**20
MAX_REDIRECTS = 5
UNREACHED = (aiohttp.ClientConnectorError, TimeoutError)
KEEP_BOOKS = ("splittime", "vllm")  # who may have a ledger: vLLM where our books are attached to it


class Response(NamedTuple):
    """`is_too_long`: there was more than the asker takes; what was read is not kept."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_too_long: bool = False

    @property
    def json(self) -> Any:
        """The body as JSON; None if it is none, or the answer was no success."""
        if self.status != 200 or self.is_too_long:
            return None
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None

    @property
    def samples(self) -> Samples:
        """The body as metrics; {} if the answer was no success."""
        return parse(self.body.decode("utf-8", "replace")) if self.status == 200 else {}


async def ask(
    session: aiohttp.ClientSession, target: Target, path: str, timeout_s: float, max_bytes: int = MAX_BODY_BYTES
) -> Response:
    """One GET. Raises what aiohttp does if no answer came."""
    url = target.base_url + path
    async with asyncio.timeout(timeout_s):
        for _ in range(MAX_REDIRECTS):
            answer = await _ask_once(session, target, url, max_bytes)
            follows = _on_the_same_server(url, answer)
            if follows is None:
                break
            url = follows
    return answer


def _on_the_same_server(url: str, answer: Response) -> str | None:
    """Returns where a redirect leads, if it stays on the server."""
    if not is_redirect(answer):
        return None
    try:
        follows = urljoin(url, answer.headers["Location"])
        return follows if urlsplit(follows)[:2] == urlsplit(url)[:2] else None
    except ValueError:
        return None


async def _ask_once(session: aiohttp.ClientSession, target: Target, url: str, max_bytes: int) -> Response:
    headers = {"Accept-Encoding": "identity"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    async with session.get(url, headers=headers, allow_redirects=False) as response:
        body = bytearray()
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > max_bytes:
                response.close()
                return Response(response.status, response.headers, b"", is_too_long=True)
        return Response(response.status, response.headers, bytes(body))


def is_redirect(answer: Response) -> bool:
    return answer.status in (301, 302, 303, 307, 308) and "Location" in answer.headers


async def get(
    session: aiohttp.ClientSession,
    target: Target,
    path: str,
    timeout_s: float = TIMEOUT_S,
    max_bytes: int = MAX_BODY_BYTES,
) -> Response | None:
    """One GET; None if no answer came."""
    try:
        return await ask(session, target, path, timeout_s, max_bytes)
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


async def get_json(
    session: aiohttp.ClientSession,
    target: Target,
    path: str,
    timeout_s: float = TIMEOUT_S,
    max_bytes: int = MAX_BODY_BYTES,
) -> Any:
    """The JSON at a path, or None."""
    answer = await get(session, target, path, timeout_s, max_bytes)
    return answer.json if answer is not None else None


def _reason(error: Exception) -> str:
    """Returns what the system said; aiohttp's own sentence speaks of TLS where there is none."""
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        return str(error.strerror or error)
    return str(error)


async def ask_first(session: aiohttp.ClientSession, target: Target, path: str = "/v1/models") -> Response:
    """The first question to a server. Raises `NobodyThere`; `EngineError` if nothing can be done with what answers
    there; `ConfigError` for a key that it does not take."""
    base = target.base_url
    check_key(target.api_key)
    try:
        answer = await ask(session, target, path, TIMEOUT_S)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = f"no answer within {TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else clipped(_reason(error))
        hint = UNKNOWN_CERTIFICATE if isinstance(error, aiohttp.ClientConnectorCertificateError) else NOBODY
        is_reached = isinstance(error, aiohttp.ClientSSLError) or not isinstance(error, UNREACHED)
        kind = EngineError if is_reached else NobodyThere
        raise kind(f"nothing answers at {base}: {why}", param="url", value=target.url, hint=hint) from None
    if is_redirect(answer):
        where = clipped(answer.headers["Location"])
        what = f"{base} answers with a redirect (status {answer.status}) to {where}"
        hint = "A load follows no redirects. Give the address that it leads to, if it leads anywhere."
        raise EngineError(what, param="url", value=target.url, hint=hint)
    if answer.is_too_long:
        what = f"{base}{path} answers with more than {MAX_BODY_BYTES:,} bytes"
        hint = "That is no list of models. Is the address right?"
        raise EngineError(what, param="url", value=target.url, limit=MAX_BODY_BYTES, hint=hint)
    if answer.status in (401, 403):
        text = body_text(answer.body)
        what = f"{base} refuses the API key" + (f": {text}" if text else "")
        raise ConfigError(what, param="api_key", hint="Give the server's key: --api-key, or SPLITTIME_API_KEY.")
    return answer


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What is not told is None. block_size: of the prefix cache. takes_ids: prompts may be token ids."""

    vocab_size: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    takes_ids: bool = True

    def corrected(self, vocab_size: int | None, max_model_len: int | None) -> "ServerLimits":
        """Returns the limits as somebody who knows the server better says them; None leaves one as it is."""
        given = {"vocab_size": vocab_size, "max_model_len": max_model_len}
        return msgspec.structs.replace(self, **{name: value for name, value in given.items() if value is not None})


async def server_limits(target: Target) -> ServerLimits:
    """Raises `EngineError` if nothing answers there or its model is not loaded yet, `ConfigError` for a wrong key."""
    async with aiohttp.ClientSession() as session:
        answer = await ask_first(session, target)
        if answer.status == 503:
            what = f"{target.url} is not ready: {body_text(answer.body) or 'status 503'}"
            raise EngineError(what, param="url", value=target.url, hint="Ask again when its model is loaded.")
        card = _first_card(answer.json)
        owner = card.get("owned_by")
        facts = await get_json(session, target, "/ledger/facts") if owner in KEEP_BOOKS else None
        info = await get_json(session, target, "/info") if not card else None
        block_size = _whole(_dict(_dict(facts).get("settings")).get("block_size")) or await _told_block(session, target)
    meta, settings = _dict(card.get("meta")), _dict(_dict(facts).get("settings"))
    return ServerLimits(
        vocab_size=_whole(settings.get("vocab_size") or card.get("vocab_size") or meta.get("n_vocab")),
        max_model_len=_whole(card.get("max_model_len") or meta.get("n_ctx") or _dict(info).get("max_total_tokens")),
        block_size=block_size,
        takes_ids="max_total_tokens" not in _dict(info),  # TGI
    )


async def _told_block(session: aiohttp.ClientSession, target: Target) -> int | None:
    """Returns the block size of a server that tells it among the labels of its metrics."""
    answer = await get(session, target, "/metrics")
    samples = answer.samples if answer is not None else {}
    for dialect in DIALECTS.values():
        known = labels(samples, dialect.cache_config).get(dialect.block_label, "") if dialect.cache_config else ""
        if known.isdecimal() and int(known) > 0:
            return int(known)
    return None


def _first_card(listed: Any) -> dict[str, Any]:
    cards = _dict(listed).get("data")
    return _dict(cards[0]) if isinstance(cards, list) and cards else {}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
