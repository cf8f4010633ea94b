"""Servers with which nothing is wrong, of many kinds: the doctor must find nothing, and name no limit that is none. A
held-out load may be a little lighter or heavier than the tuned one."""

import random
from functools import partial
from typing import Any

from benchmarks.scenarios.doctor.illnesses import GUESSING
from benchmarks.scenarios.doctor.kinds import (
    Load,
    asking,
    behind,
    by_turns,
    each,
    hung_up,
    in_forms,
    made_of,
    messages,
    poisson,
)
from benchmarks.scenarios.doctor.loads import Size, chats, ids, schedule
from benchmarks.scenarios.doctor.patients import Patient
from benchmarks.scenarios.doctor.proxies import Deadline
from benchmarks.scenarios.doctor.wards import ADAPTERS, Ward, adapters, template
from splittime.bench.schedule import Schedule

_well = partial(poisson, is_ill=False)
CHATS: Load = _well(4, 24, 40, 9.0)
SHARED: Load = made_of(behind(30), 300, 4, is_ill=False)
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def one_long_prompt(seed: int, patient: Patient) -> Schedule:
    """Streams, and a single long prompt among them."""
    rng, size = random.Random(seed), Size.of(seed, patient, is_ill=False)
    streams = chats(rng, *size.load(4, 24, 60, 10.0))
    return schedule([*streams, (4.0, ids(rng, size.tokens(1500)), 8)], seed)


def small_groups(seed: int, patient: Patient) -> Schedule:
    """Four at a time, as a page that asks for four things does."""
    rng, size = random.Random(seed), Size.of(seed, patient, is_ill=False)
    rate, duration_s, prompt, output = size.load(4, 24, 24, 10.0)
    moments = (4 * i / rate for i in range(int(duration_s * rate / 4)))
    return schedule([(at_s + 0.002 * i, ids(rng, prompt), output) for at_s in moments for i in range(4)], seed)


HEALTHY: tuple[Ward, ...] = (
    Ward(name="a few chats", expected=None, load=CHATS),
    Ward(name="nearly idle", expected=None, load=_well(2.2, 24, 24, 14.0)),
    Ward(name="more chats", expected=None, load=_well(8, 40, 24, 8.0)),
    Ward(name="streams at a moderate load", expected=None, load=_well(3, 24, 150, 10.0)),
    Ward(name="longer prompts", expected=None, load=_well(3, 180, 24, 10.0)),
    Ward(name="one long prompt among streams", expected=None, load=one_long_prompt),
    Ward(name="four at a time", expected=None, load=small_groups),
    Ward(name="shared prefixes, cache on", expected=None, load=SHARED),
    Ward(name="conversations that keep their thoughts", expected=None, load=by_turns(drops=False, is_ill=False)),
    Ward(name="chats by a template", expected=None, furnish=template, load=messages(CHATS, 20)),
    Ward(name="drawn answers", expected=None, load=asking(CHATS, temperature=0.8, top_p=0.95)),
    Ward(
        name="answers held to one form",
        expected=None,
        load=in_forms(_well(4, 24, 24, 9.0), lambda index: FORM),
    ),
    Ward(
        name="four adapters, room for all",
        expected=None,
        furnish=partial(adapters, count=4),
        load=each(CHATS, lambda planned: {"model": ADAPTERS[planned.index % 4]}),
    ),
    Ward(
        name="deadlines that are met",
        expected=None,
        spoiler=lambda patient: Deadline(20_000),
        load=CHATS,
    ),
    Ward(name="an SLO that is kept", expected=None, slo="ttft_p99=2s,itl_p99=500ms", load=CHATS),
    Ward(name="callers who leave, and are heard", expected=None, load=hung_up(CHATS, after=0.4, every=5)),
    Ward(name="a client's bound that is not reached", expected=None, max_in_flight=64, load=CHATS),
    Ward(name="short ones first, no contention", expected=None, settings=("--policy", "shortest_prefill"), load=SHARED),
    Ward(name="guessing ahead", expected=None, settings=GUESSING, load=CHATS),
    Ward(name="eight slots, enough", expected=None, settings=("--max-num-seqs", "8"), load=_well(5, 24, 40, 8.0)),
    Ward(name="a cache of int8", expected=None, settings=("--kv-cache-dtype", "int8"), load=CHATS),
    Ward(
        name="weights of int8",
        expected=None,
        on=("packaged",),  # a file of 4 bits cannot be rounded again
        settings=("--quantization", "int8"),
        load=CHATS,
    ),
    Ward(name="an encoder", expected=None, model="encoder", embeds=True, load=_well(6, 60, 1, 9.0)),
    Ward(name="a gateway in front", expected=None, has_gateway=True, load=CHATS),
)
