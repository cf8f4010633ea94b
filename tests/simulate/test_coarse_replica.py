"""The coarse replica beside the full one: the same requests, nearly the same instants."""

import random
import statistics

import pytest

from splittime.core.errors import ConfigError
from splittime.core.facts import TokenCost
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.asked import Asked, asked_requests
from splittime.simulate.change import Change
from splittime.simulate.coarse import CoarseReplica, CoarseRequest
from splittime.simulate.costed import mixed_tokens
from splittime.simulate.data_sheet import replica_of_data_sheet
from splittime.simulate.replica import Replica

COST = TokenCost(
    weight_bytes=16_000_000_000,
    kv_bytes_per_token=131_072,
    operations_per_token=15_000_000_000,
    operations_per_sample=1_000_000_000,
    operations_per_context_token=524_288,
)


def sheet(**settings) -> Replica:
    config = SchedulerConfig(max_model_len=4096, max_num_batched_tokens=2048)
    return replica_of_data_sheet("L40S", COST, config).with_settings(settings)


def drawn(count: int, rate: float, most: int, seed: int = 3) -> list[tuple[int, int, int]]:
    """Returns (arrival in ns, prompt, output) of requests that come at random."""
    rng, at_s, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        found.append((round(at_s * 1e9), rng.randint(16, most), rng.randint(1, most // 4)))
    return found


def coarse_times(replica: Replica, asked: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Returns the instants of the first and the last token of each request."""
    coarse, requests, times = CoarseReplica(replica), [CoarseRequest(*one[1:]) for one in asked], {}

    def turns(until_ns: float) -> None:
        while coarse.next_ns <= until_ns and coarse.next_ns < float("inf"):
            for news in coarse.turn():
                times.setdefault(news.request, []).append(news.at_ns)

    for (at_ns, _, _), request in zip(asked, requests, strict=True):
        turns(at_ns)
        coarse.add(request, at_ns)
    turns(float("inf"))
    assert coarse.num_running == coarse.running_tokens == coarse.waiting_tokens == 0
    assert all(request.generated == request.output for request in requests)
    return [(times[request][0], times[request][-1]) for request in requests]


def full_times(replica: Replica, asked: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    told = [Asked(at, tuple(mixed_tokens(i + 1, 0, prompt)), output) for i, (at, prompt, output) in enumerate(asked)]
    requests = list(asked_requests(told, replica.approach, replica.config.max_model_len))
    books = replica.run(requests, Change(), seed=0)
    by_id = {account.request_id: account for account in books.accounts}
    ready = [by_id[one.request.request_id].token_ready_ns for one in requests]
    return [(one[0], one[-1]) for one in ready]


@pytest.mark.parametrize(
    ("settings", "count", "rate", "most", "error"),
    [
        ({}, 200, 4.0, 1500, 1e-6),
        ({"max_num_seqs": 8}, 120, 2.0, 1000, 1e-6),  # a queue for want of slots
        ({"max_prefill_tokens": 128}, 100, 3.0, 1500, 1e-6),
        ({"num_blocks": 400}, 120, 2.0, 1500, 0.12),  # for want of blocks, with preemptions
        ({"num_blocks": 400}, 120, 4.0, 1500, 0.03),  # and many who have waited for too long
    ],
)
def test_it_tells_nearly_what_the_full_replica_tells(settings, count, rate, most, error):
    replica, asked = sheet(**settings), drawn(count, rate, most)
    coarse, full = coarse_times(replica, asked), full_times(replica, asked)
    for which in (0, 1):
        ours = [times[which] - one[0] for times, one in zip(coarse, asked, strict=True)]
        theirs = [times[which] - one[0] for times, one in zip(full, asked, strict=True)]
        for figure in (statistics.median, statistics.mean, lambda times: sorted(times)[-len(times) // 20]):
            assert figure(ours) == pytest.approx(figure(theirs), rel=error)


def test_equal_blocks_are_computed_once():
    replica = sheet()
    first, second, other = (CoarseRequest(2048, 4, blocks) for blocks in ((1, 2, 3, 4), (1, 2, 9, 8), (5, 2, 3, 4)))
    coarse = CoarseReplica(replica)
    for request in (first, second, other):
        coarse.add(request, 0 if coarse.next_ns == float("inf") else int(coarse.next_ns))
        while coarse.next_ns < float("inf"):
            coarse.turn()
    assert [request.cached for request in (first, second, other)] == [0, 1024, 0]


def test_what_fails_has_the_tokens_that_were_ready():
    coarse, request = CoarseReplica(sheet()), CoarseRequest(100, 1000)
    coarse.add(request, 0)
    first = coarse.turn()[0].at_ns
    whole = coarse_times(sheet(), [(0, 100, 1000)])[0]
    middle_ns = (whole[0] + whole[1]) // 2
    assert coarse.fail(middle_ns) == [request]
    assert first == whole[0]
    assert request.generated == pytest.approx(500, abs=5)
    assert coarse.next_ns == float("inf")
    coarse.add(request, middle_ns)  # it goes on with them
    last_ns = 0
    while coarse.next_ns < float("inf"):
        last_ns = max([last_ns, *(news.at_ns for news in coarse.turn() if news.is_end)])
    assert last_ns - middle_ns == pytest.approx(whole[1] - middle_ns, rel=0.05)


def test_what_it_cannot_picture_is_refused():
    for name, value in (("policy", "priority"), ("batching", "static"), ("enable_chunked_prefill", False)):
        with pytest.raises(ConfigError, match=f"{name} {value}"):
            CoarseReplica(sheet(**{name: value}))
