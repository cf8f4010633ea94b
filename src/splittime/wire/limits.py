"""What a server says of its own limits, to be asked before a schedule is drawn for it."""

from typing import Any

import aiohttp
import msgspec

from splittime.core.errors import EngineError
from splittime.wire.dialects import DIALECTS
from splittime.wire.samples import labels
from splittime.wire.scrape import ask_first, get, get_json
from splittime.wire.sse import body_text
from splittime.wire.target import Target

KEEP_BOOKS = ("splittime", "vllm")  # who may have a ledger: vLLM where our books are attached to it


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
