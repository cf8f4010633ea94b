"""What the device is bound by: told as a limit, with the batch up to which it holds; never as an illness."""

import re

import msgspec
import pytest
from test_rules_queue import poisson
from ward import Case, Ward, ids

from splittime.core.facts import Machine, TokenCost
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.floor import floors
from splittime.diagnose.rules.decode import _evidence, crossover_rows
from splittime.runner import machine, start_memory

GB_PER_S = 10**9  # so that a byte takes a nanosecond
MACHINE = Machine(cpu="any", threads=1, cores=2, read_bytes_per_s=GB_PER_S, operations_per_s=10**9, cache_bytes=0)
NOTHING = {"weight_bytes": 1, "kv_bytes_per_token": 0, "operations_per_token": 0, "operations_per_context_token": 0}


def bound(books, machine: Machine = MACHINE, settings: dict | None = None, **cost):
    """The same books on a machine and a model of which this would be the cost."""
    facts = msgspec.structs.replace(
        books.facts,
        cost=TokenCost(**(NOTHING | cost)),
        machine=machine,
        settings=books.facts.settings | {"weights": "bfloat16", "kv_cache_dtype": "bfloat16"} | (settings or {}),
    )
    return msgspec.structs.replace(books, facts=facts)


@pytest.fixture(scope="module")
def books():
    return Ward(step_ms=4.0, token_ms=0.02).run(*poisson(10, 80, output=60))


@pytest.fixture(scope="module")
def products():
    """Steps whose time is their tokens'."""
    return Ward(step_ms=0.1, token_ms=0.3).run(*poisson(10, 80, output=20))


def limits(books) -> list[str]:
    diagnosis = diagnose(books)
    assert diagnosis.healthy, "a limit is no illness"
    return [finding.name for finding in diagnosis.limits]


def test_weights(books):
    ill = bound(books, weight_bytes=3_600_000, operations_per_token=100_000)
    assert limits(ill) == ["weight_bandwidth_bound"]
    finding = diagnose(ill).limits[0]
    assert finding.cure.flags == ("--quantization", "int8")
    assert crossover_rows(ill) == pytest.approx(36)
    assert "up to about 36 rows" in finding.regime
    assert "64" in finding.regime


def test_the_size_of_the_cure_is_told(books):
    """A quarter of the bytes, so about a quarter of the reading: what each token would take."""
    ill = bound(books, weight_bytes=3_600_000, settings={"weights": "float32"})
    (told,) = (fact for fact in diagnose(ill).limits[0].evidence if "expected" in fact.what)
    then, _, now = str(told.value).partition(" instead of ")
    least, _, most = then.partition(" to ")
    assert "int8 (0.25 of the bytes)" in told.what
    assert float(least) < float(most) < 0.6 * float(now)


def test_what_else_a_step_reads_is_neither_waited_for_nor_saved():
    """Of 4 ms that a step of decoding takes, 1 ms is reading weights and 1.9 ms reading keys and values."""
    books = Ward(step_ms=4.0, token_ms=0.02).run(*(Case(200 * i, ids(300, i), 30) for i in range(40)))
    ill = bound(books, weight_bytes=1_000_000, kv_bytes_per_token=6_000, settings={"kv_cache_dtype": "float32"})
    (finding,) = diagnose(ill).limits
    assert finding.name == "kv_bandwidth_bound"
    assert "47% of such a step at the least" in finding.claim
    assert finding.share_of_time < 0.47, "of the reading alone, in decoding alone"
    (told,) = (str(fact.value) for fact in finding.evidence if "expected" in fact.what)
    assert told == "1.75 to 2.6 instead of 4.02"


@pytest.mark.parametrize(
    ("of_ceiling", "is_told"), [(0.2, False), (0.55, False), (0.65, True), (0.95, True), (1.1, False)]
)
def test_a_group_is_held_by_its_nearness_to_the_ceiling_whatever_a_cure_would_save(books, of_ceiling, is_told):
    """Beyond it the evidence refutes itself: what was measured is no ceiling."""
    ill = bound(books, weight_bytes=int(4_050_000 * of_ceiling), settings={"weights": "float32"})
    assert limits(ill) == ["weight_bandwidth_bound"] * is_told
    why = {one.name: one.why for one in diagnose(ill).abstentions}.get("weight_bandwidth_bound", "")
    assert ("is none: decode of" in why) is (of_ceiling > 1)


def test_no_evidence_is_beyond_the_ceiling_it_is_held_against(books):
    """The few steps of many rows are: they are left out, and the rest stands."""
    ill = bound(books, weight_bytes=3_000_000, kv_bytes_per_token=4_000)
    (finding,) = diagnose(ill).limits
    percents = [int(found) for fact in finding.evidence for found in re.findall(r"runs at (\d+) %", str(fact.value))]
    beyond = [group for group in floors(ill.steps, ill.facts) if (group.share or 0) > 1]
    assert beyond
    assert _evidence(beyond) == ()
    assert percents
    assert max(percents) <= 100


def test_a_prompt_is_not_decoding_that_waits_for_the_weights():
    """Nine tenths of the time are prompts, whose steps read the weights too."""
    books = Ward(token_ms=0.3).run(*(Case(1000 * i, ids(1500, i), 8) for i in range(30)))
    ill = bound(books, weight_bytes=3_600_000, operations_per_token=240_000)
    assert limits(ill) == ["compute_bound"]


def test_the_crossover_is_of_the_rate_at_which_so_many_bytes_are_read(books):
    rates = ((10**6, 4.0 * GB_PER_S), (10**8, 1.0 * GB_PER_S))
    cached = msgspec.structs.replace(MACHINE, read_rates=rates)
    ill = bound(books, machine=cached, weight_bytes=10**6, operations_per_token=100_000)
    assert crossover_rows(ill) == pytest.approx(10 / 4)


@pytest.mark.parametrize(
    ("weights", "flags"),
    [
        ("float32", ("--quantization", "int8")),
        ("int8", ("--quantization", "int4")),
        ("int8 x int8, router bfloat16", ("--quantization", "int4")),
        ("int4 in groups of 64, head int8", ()),
        ("gguf: int8 in groups of 32", ()),
        ("gguf: int4 in groups of 32, minima; head int8 in groups of 32", ()),
        ("awq: int4 in groups of 128, zero points; head bfloat16", ()),
        ("gguf: bfloat16", ()),
        ("something new", ()),
    ],
)
def test_what_is_small_or_came_quantised_is_prescribed_smaller_or_not_at_all(books, weights, flags):
    """By what was loaded: the setting is None for a checkpoint that came quantised, and any other is refused."""
    ill = bound(books, weight_bytes=3_600_000, settings={"weights": weights, "quantization": None})
    cure = diagnose(ill).limits[0].cure
    assert cure.flags == flags
    assert ("served as it is" in cure.sentence) is (": " in weights)


@pytest.mark.parametrize(("dtype", "flags"), [("bfloat16", ("--kv-cache-dtype", "int8")), ("int8", ()), ("fp8", ())])
def test_keys_and_values(dtype, flags):
    books = Ward(step_ms=4.0, token_ms=0.02).run(*(Case(200 * i, ids(300, i), 30) for i in range(40)))
    ill = bound(books, kv_bytes_per_token=11_000, settings={"kv_cache_dtype": dtype})
    assert limits(ill) == ["kv_bandwidth_bound"]
    assert diagnose(ill).limits[0].cure.flags == flags


def test_products(products):
    ill = bound(products, operations_per_token=270_000)
    assert limits(ill) == ["compute_bound"]
    assert diagnose(ill).limits[0].cure.flags == ("--num-threads", "2")
    busy = bound(products, machine=msgspec.structs.replace(MACHINE, threads=2), operations_per_token=270_000)
    assert diagnose(busy).limits[0].cure.flags == ()


def test_products_hold_a_step_at_the_kernels_rate_and_the_peak_is_told(products):
    fast = msgspec.structs.replace(MACHINE, peak_operations_per_s=8 * 10**9)
    ill = bound(products, machine=fast, operations_per_token=270_000)
    assert limits(ill) == ["compute_bound"]
    told = str(diagnose(ill).limits[0].evidence[0].value)
    assert "of what its kernels can" in told
    assert crossover_rows(ill) == crossover_rows(bound(products, operations_per_token=270_000))


def test_keys_and_values_behind_long_prompts_are_told_too():
    """Prompts have three quarters of the time; of what comes after the first token, reading the cache is most."""
    books = Ward(token_ms=0.3).run(*(Case(2000 * i, ids(1500, i), 30) for i in range(30)))
    ill = bound(books, kv_bytes_per_token=2_000, operations_per_token=200_000)
    assert limits(ill) == ["compute_bound", "kv_bandwidth_bound"]
    told = diagnose(ill).limits[1]
    assert told.cure.flags == ("--kv-cache-dtype", "int8")
    assert 0.1 < told.share_of_time < 0.3
    assert limits(bound(books, kv_bytes_per_token=100, operations_per_token=200_000)) == ["compute_bound"]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (start_memory.quickest_count({"a step": lambda: None}, lambda count: None, 1).reason, "measured at start"),
        (machine.choose_num_threads(1, 1)[1], "asked for"),
    ],
)
def test_threads_that_somebody_settled_are_not_prescribed_otherwise(products, reason, said):
    """By the very words of who settles them."""
    ill = bound(products, settings={"num_threads_reason": reason}, operations_per_token=270_000)
    cure = diagnose(ill).limits[0].cure
    assert cure.flags == ()
    assert said in cure.sentence
    assert "a second server use the 1 other core:" in cure.sentence
    by_rule = {"num_threads_reason": machine.choose_num_threads(None, 1)[1]}
    ruled = bound(products, settings=by_rule, operations_per_token=270_000)
    assert diagnose(ruled).limits[0].cure.flags == ("--num-threads", "2")


def test_far_below_every_ceiling_nothing_is_said(books):
    assert limits(bound(books, weight_bytes=1_000_000, operations_per_token=100_000)) == []


def test_weights_in_the_cache_are_not_read_from_memory(books):
    cached = msgspec.structs.replace(MACHINE, cache_bytes=10**9)
    assert limits(bound(books, machine=cached, weight_bytes=3_600_000)) == []


@pytest.mark.parametrize("rates", [{}, {"read_bytes_per_s": GB_PER_S}, {"operations_per_s": 10**9}])
def test_a_ceiling_that_is_not_measured_is_told_so_and_is_no_verdict(books, rates):
    """A young server that has always been busy, or whose measurement of products failed."""
    young = bound(books, machine=Machine(cpu="any", threads=1, cores=2, **rates), weight_bytes=3_600_000)
    assert limits(young) == []
    why = {one.name: one.why for one in diagnose(young).abstentions}
    assert all("not measured yet" in why[f"{name}_bound"] for name in ("weight_bandwidth", "kv_bandwidth", "compute"))


def test_without_ceilings_it_says_so(books):
    assert {a.name for a in diagnose(books).abstentions} >= {"weight_bandwidth_bound", "compute_bound"}
