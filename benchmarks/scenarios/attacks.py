"""What one key does to harm the others: a process that sends one kind of it for so many seconds.

    python -m benchmarks.scenarios.attacks NAME PORT --seconds 10 --seed 1

Bodies are small, or of the size that a server takes, and few are sent at once: what is asked is whether one client can
take everybody's time with little of its own. So the process leaves the processors to the others (a niceness of 19), as
a client on another machine would. It tells how each of its requests ended, by status.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

import aiohttp

from benchmarks.scenarios.guarded import MODEL, NARROW, WIDE

NICE = 19
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
LARGE = 3_900_000  # bytes; a server takes 4 MiB
SILENT = 1100  # connections
SLOW_S = 30.0  # of a slow reader
LINE_BREAK = 199  # the packaged model's token
Body = dict[str, Any]


class Attacker:
    """Asks as one key, and counts how that ended."""

    def __init__(self, session: aiohttp.ClientSession, port: int, key: str, seed: int) -> None:
        self._session, self.port, self._key = session, port, key
        self.draw, self.ends = random.Random(seed), Counter[str]()

    async def ask(self, path: str, body: Body, headers: dict[str, str] | None = None, leave_s: float = 600.0) -> bytes:
        """Return the answer, or nothing of one that is not awaited for longer than `leave_s`."""
        told = {"Authorization": f"Bearer {self._key}", **(headers or {})}
        try:
            async with (
                asyncio.timeout(leave_s),
                self._session.post(
                    f"http://127.0.0.1:{self.port}{path}", json={"model": MODEL, **body}, headers=told
                ) as answer,
            ):
                read = await answer.read()
                self.ends[str(answer.status)] += 1
                if answer.status != 200:
                    await asyncio.sleep(0.02)  # who is refused at once would only measure how fast it can ask
                return read
        except TimeoutError:
            self.ends["left"] += 1
        except (aiohttp.ClientError, OSError) as error:
            self.ends[type(error).__name__] += 1
            await asyncio.sleep(0.05)
        return b""

    def head(self, length: int) -> bytes:
        lines = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self._key}\r\n"
        return f"{lines}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()


Blow = Callable[[Attacker, dict[str, str]], Awaitable[object]]


class Attack(NamedTuple):
    """blow: is struck again and again by so many at once. key: who they are. It keeps what it likes in a mapping."""

    blow: Blow
    key: str
    at_once: int


# ---- the blows


def hostile_form(draw: random.Random) -> Body:
    """Return a form of a few bytes that is costly to compile, to walk or to keep, and that nobody asked for before."""
    number = draw.randrange(10**6)
    primes = draw.sample((101, 103, 107, 109, 113, 127, 131, 137), 4)
    rules = [f"r{i}: /[a-z]{{1,{i % 9 + 2}}}/ r{(7 * i + number) % 2000}" for i in range(2000)]
    return draw.choice(
        (
            {"guided_json": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in primes]}},
            {"guided_json": {"type": "integer", "multipleOf": 5_000_011 + 2 * number}},
            {"guided_json": {"allOf": [{"type": "string", "pattern": f".*{number + i}.*"} for i in range(20)]}},
            {"guided_regex": f"a{{{900_000 + number % 90_000}}}"},
            {"guided_regex": f"(a{{1000}}b{{1000}}){{900}}c{{{number}}}"},
            {"guided_grammar": "start: r0\n" + "\n".join(rules)},
            {"guided_json": {"enum": [f"{number} " + "a" * 120_000]}},
            {"guided_json": {"allOf": [{"pattern": f"(?=.*[{c}].*){number}"} for c in ("a-z", "A-Z", "0-9", "!-/")]}},
        )
    )


async def forms(attacker: Attacker, kept: dict[str, str]) -> None:
    await attacker.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 64, **hostile_form(attacker.draw)})


async def choices(attacker: Attacker, kept: dict[str, str]) -> None:
    prompts = [f"a{attacker.draw.random()}" for _ in range(8)]
    body = {"prompt": prompts, "n": 16, "max_tokens": 2000, "ignore_eos": True, "temperature": 1}
    await attacker.ask(COMPLETIONS, body)


async def tokenize(attacker: Attacker, kept: dict[str, str]) -> None:
    await attacker.ask("/tokenize", {"prompt": "a b " * (LARGE // 4), "return_token_strs": True})


async def responses(attacker: Attacker, kept: dict[str, str]) -> None:
    """Once a turn of 4 MB that the template leaves out of the prompt; then small ones behind it."""
    turn: Body = {"input": "hi", "max_output_tokens": 1}
    if kept:
        await attacker.ask(RESPONSES, turn | {"previous_response_id": kept["id"], "store": False})
        return
    thought = {"type": "reasoning_text", "text": '"[' * 20}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought] * 4000}
    answer = await attacker.ask(RESPONSES, turn | {"input": [reasoning, {"role": "user", "content": "hi"}]})
    with suppress(ValueError, KeyError):
        kept["id"] = json.loads(answer)["id"]


async def brackets(attacker: Attacker, kept: dict[str, str]) -> None:
    await attacker.ask(COMPLETIONS, {"prompt": '"[' * (LARGE // 3), "max_tokens": 1})


async def silent(attacker: Attacker, kept: dict[str, str]) -> None:
    """Connections that say nothing, opened again when they are closed."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4 * SILENT, most), most))

    async def one() -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", attacker.port)
                attacker.ends["opened"] += 1
                await reader.read(1)
                writer.close()
            await asyncio.sleep(0.5)

    await asyncio.gather(*(one() for _ in range(SILENT)))


async def tools(attacker: Attacker, kept: dict[str, str]) -> None:
    """A tool whose parameters are a maze, offered to a model that can say nothing but line breaks."""
    maze: Body = {"type": "string"}
    for _ in range(30):
        maze = {"anyOf": [maze, {"type": "array", "items": maze}]} if len(str(maze)) < 20_000 else {"items": maze}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": maze}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": function}]}
    more: Body = {"max_tokens": 1900, "ignore_eos": True, "stream": True, "logit_bias": {str(LINE_BREAK): 100}}
    if attacker.draw.random() < 0.3:
        more = {"max_tokens": 64, "tool_choice": "required"}
    await attacker.ask(CHAT, body | more)


async def slow_readers(attacker: Attacker, kept: dict[str, str]) -> None:
    """Ask for a long stream and read none of it."""
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 20}
    body = json.dumps(asked).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            await loop.sock_connect(connection, ("127.0.0.1", attacker.port))
            await loop.sock_sendall(connection, attacker.head(len(body)) + body)
            attacker.ends["asked"] += 1
            await asyncio.sleep(SLOW_S)
    await asyncio.sleep(0.1)


async def disconnects(attacker: Attacker, kept: dict[str, str]) -> None:
    body = {"prompt": f"def f{attacker.draw.random()}(", "max_tokens": 400, "ignore_eos": True, "stream": True}
    await attacker.ask(COMPLETIONS, body, leave_s=attacker.draw.uniform(0.001, 0.3))


async def deadlines(attacker: Attacker, kept: dict[str, str]) -> None:
    """What nobody could answer in time, so that a 429 of its own making comes back."""
    name = attacker.draw.choice(("x-llm-d-slo-ttft-ms", "X-Request-Deadline-Ms"))
    body = {"prompt": f"{attacker.draw.random()} word " * 200, "max_tokens": 2}
    await attacker.ask(COMPLETIONS, body, {name: str(attacker.draw.randint(1, 5))})
    await asyncio.sleep(0.05)


async def max_tokens(attacker: Attacker, kept: dict[str, str]) -> None:
    await attacker.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 500_000, "ignore_eos": True, "stream": True})


async def whole_answers(attacker: Attacker, kept: dict[str, str]) -> None:
    await attacker.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 1900, "ignore_eos": True})


async def early_leavers(attacker: Attacker, kept: dict[str, str]) -> None:
    """Long prompts, left before the first byte."""
    body = {"prompt": f"{attacker.draw.random()} word " * 200, "max_tokens": 500, "ignore_eos": True}
    await attacker.ask(COMPLETIONS, body, leave_s=attacker.draw.uniform(0.01, 0.06))


ATTACKS = {
    "forms": Attack(forms, WIDE, 60),
    "choices": Attack(choices, NARROW, 2),
    "choices-unlimited": Attack(choices, WIDE, 2),
    "tokenize": Attack(tokenize, NARROW, 12),
    "responses": Attack(responses, WIDE, 2),
    "brackets": Attack(brackets, WIDE, 2),
    "silent": Attack(silent, WIDE, 1),
    "tools": Attack(tools, WIDE, 4),
    "slow-readers": Attack(slow_readers, WIDE, 16),
    "disconnects": Attack(disconnects, WIDE, 20),
    "deadlines": Attack(deadlines, WIDE, 4),
    "max-tokens": Attack(max_tokens, WIDE, 4),
    "whole-answers": Attack(whole_answers, WIDE, 16),
    "early-leavers": Attack(early_leavers, WIDE, 8),
}


async def attack(name: str, port: int, seconds: float, seed: int) -> dict[str, int]:
    """Return how often a request ended how."""
    chosen = ATTACKS[name]
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        attacker = Attacker(session, port, chosen.key, seed)

        async def again_and_again() -> None:
            kept: dict[str, str] = {}
            while True:
                await chosen.blow(attacker, kept)

        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(again_and_again() for _ in range(chosen.at_once)))
    return dict(attacker.ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ATTACKS)
    parser.add_argument("port", type=int)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.nice(NICE)
    begin_s = time.process_time()
    ends = asyncio.run(attack(args.name, args.port, args.seconds, args.seed))
    print(json.dumps({"ends": ends, "cpu_s": time.process_time() - begin_s}))


if __name__ == "__main__":
    main()
