"""Every flag that a rule can prescribe starts the server: by the real script, with the model in the package."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from test_confusion import ILL
from test_rules_decode import bound
from test_rules_device import books_of as on_a_card
from test_rules_order import refused
from test_rules_prompts import PROMPTS, SHARED, after_another
from test_rules_queue import poisson
from test_rules_speculation_off import again
from test_rules_speculation_off import books_of as not_guessing
from test_rules_start_measurement import measured
from ward import Case, Ward, ids

import splittime.diagnose.rules
from splittime.assemble.settings import BY_NAME, load, worker_settings
from splittime.core.errors import ConfigError
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.finding import OUR_PROGRAM, changed_by, flags_of

SCRIPT = str(Path(sys.executable).with_name("splittime"))
LIMIT_S = 120
SLOW_STEPS = {"step_ms": 4.0, "token_ms": 0.02}
MORE = {
    "weights of 16 bits": lambda: bound(Ward(**SLOW_STEPS).run(*poisson(10, 80, output=60)), weight_bytes=3_600_000),
    "weights of 8 bits": lambda: bound(
        Ward(**SLOW_STEPS).run(*poisson(10, 80, output=60)), settings={"weights": "int8"}, weight_bytes=3_600_000
    ),
    "long contexts": lambda: bound(
        Ward(**SLOW_STEPS).run(*(Case(200 * i, ids(300, i), 30) for i in range(40))), kv_bytes_per_token=11_000
    ),
    "torch's kernels": lambda: Ward(
        step_ms=1, token_ms=0.01, gap_ms=2, told={"kernels": "torch", "quantization": None}
    ).run(*poisson(10, 80)),
    "a card that waits": lambda: on_a_card(execution="captured"),
    "short prompts behind long ones": lambda: Ward(
        token_ms=0.1, settings={"max_num_batched_tokens": 256, "max_prefill_tokens": 128}
    ).run(
        *(Case(35 * i, ids(16, i), 3) for i in range(120)),
        *(Case(200 + 600 * i, ids(2000, 1000 + i), 1) for i in range(6)),
    ),
    "no cache of prefixes": lambda: Ward(**PROMPTS, settings={"enable_prefix_caching": False}).run(
        *after_another(*(SHARED + ids(32, i) for i in range(40)))
    ),
    "answers that come again": lambda: not_guessing(again()),
    "a bad moment at the start": lambda: measured(
        Ward(step_ms=4.0, token_ms=0.5, settings={"max_prefill_tokens": 64}).run(*poisson(3, 60, 200, 25)), 100_000
    ),
    **{
        f"refused for too many {what}": lambda what=what: refused(
            Ward(told={f"max_{what}": 1}).run(*poisson(10, 120)), 6, what
        )
        for what in ("queued_requests", "queued_prompt_tokens")
    },
}

Prescription = tuple[str, ...]


@cache
def prescribed() -> dict[Prescription, str]:
    """Returns what the rules prescribe for the worlds of the confusion matrix and for those above, and where."""
    worlds = {name: make for name, (_, make) in ILL.items()} | MORE
    cures = ((one.cure, name) for name, make in worlds.items() for one in diagnose(make()).findings)
    return {cure.flags: name for cure, name in cures if cure.flags and cure.program == OUR_PROGRAM}


def of_rules() -> Iterator[str]:
    """Yields our flags that stand in the rules' source."""
    for path in Path(splittime.diagnose.rules.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            told = str(node.value) if isinstance(node, ast.Constant) else ""
            if re.fullmatch("--[a-z-]+", told) and told.removeprefix("--").replace("-", "_") in BY_NAME:
                yield told


def kinds(flags: Prescription) -> set[str]:
    """Returns what makes a prescription unlike another: its flags, with values that are words."""
    return {f"{flag} {value}" if re.match("[^0-9]", value or "") else flag for flag, value in flags_of(flags)}


def settings_with(flags: Prescription) -> bytes:
    """Returns what an engine is started with; raises ConfigError as the script does."""
    model = Path(splittime.__file__).parent / "packaged" / "code"
    return worker_settings(load(dict(map(changed_by, flags_of(flags))), environ={}), model)


def starts() -> list[Prescription]:
    """Returns few prescriptions that together hold each kind: joined where no setting is in two of them and the
    settings' own checks take them together."""
    groups, seen = list[Prescription](), set[str]()
    for flags in sorted(prescribed()):
        if kinds(flags) <= seen:
            continue
        seen |= kinds(flags)
        for number, group in enumerate(groups):
            if not {name for name, _ in flags_of(flags)} & {name for name, _ in flags_of(group)}:
                try:
                    settings_with(group + flags)
                except ConfigError:
                    continue
                groups[number] = group + flags
                break
        else:
            groups.append(flags)
    return groups


def test_each_flag_of_the_rules_is_prescribed_in_some_world():
    given = {name for flags in prescribed() for name, _ in flags_of(flags)}
    assert set(of_rules()) == given


def test_each_prescribed_flag_starts_the_server(tmp_path: Path):
    for group in starts():
        start([shlex.split(word)[0] for word in group], tmp_path)


def start(flags: list[str], folder: Path) -> None:
    """Start a server and end it; what it says is in the assertion where it does not come."""
    log = folder / "stderr"
    with log.open("wb") as errors:
        server = subprocess.Popen(
            [SCRIPT, "serve", *flags, "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"XDG_CACHE_HOME": str(folder)},
        )
    try:
        line = server.stdout.readline()
        assert line, f"{shlex.join(flags)}: {log.read_text()}"
        assert json.loads(line)["url"]
    finally:
        server.terminate()
        server.wait(LIMIT_S)
