"""The controller's decisions, on a small world that carries them out: replicas take time to start, are lost and have
tokens to finish."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splittime.cluster.config import ScaleSettings
from splittime.cluster.controller import (
    Fleet,
    FleetAction,
    FleetController,
    FleetDecision,
    FleetReplica,
    FleetState,
)

S = 10**9
CAPACITY = 1000
AWAKE = (FleetState.STARTING, FleetState.READY)


class FleetWorld:
    """Seconds pass one by one. start_s: from an order to start until a replica is ready."""

    def __init__(self, told: ScaleSettings, start_s: int = 5, drain_s: int = 3, trial: str | None = None) -> None:
        self.told, self.start_s, self.drain_s = told, start_s, drain_s
        self.controller = FleetController(told)
        self.revision, self.trial = "r1", trial
        self.at_s = 0
        self.replicas: dict[str, FleetReplica] = {}
        self.since: dict[str, int] = {}
        self.starts_fail = False
        self.num_started = 0
        self.load = 0

    def of_state(self, *states: FleetState) -> list[FleetReplica]:
        return [one for one in self.replicas.values() if one.state in states]

    def put(self, name: str, state: FleetState, **changed: object) -> None:
        old = self.replicas[name]
        values = {"revision": old.revision, "tokens": old.tokens, "capacity_tokens": CAPACITY, **changed}
        self.replicas[name] = FleetReplica(name, state, **values)
        self.since[name] = self.at_s

    def second(self) -> FleetDecision:
        self._grow()
        self._share_load()
        fleet = Fleet(self.revision, tuple(self.replicas.values()), self._held(), self.trial)
        decision = self.controller.decide(self.at_s * S, fleet)
        names = [order.name for order in decision.orders if order.name]
        assert len(names) == len(set(names)), "one order for each"
        for order in decision.orders:
            self._do(order)
        self.at_s += 1
        return decision

    def seconds(self, number: int) -> list[FleetDecision]:
        return [self.second() for _ in range(number)]

    def _held(self) -> int:
        return 0 if self.of_state(FleetState.READY) else self.load

    def _grow(self) -> None:
        for one in list(self.replicas.values()):
            lasted_s = self.at_s - self.since[one.name]
            if one.state in (FleetState.STARTING, FleetState.WARMING) and lasted_s >= self.start_s:
                is_warm = one.state is FleetState.WARMING
                good = FleetState.ASLEEP if is_warm else FleetState.READY
                self.put(one.name, FleetState.LOST if self.starts_fail else good)
            elif one.state is FleetState.DRAINING and one.tokens and lasted_s >= self.drain_s:
                self.replicas[one.name] = FleetReplica(one.name, one.state, one.revision, 0, CAPACITY)

    def _share_load(self) -> None:
        ready = self.of_state(FleetState.READY)
        draining = sum(one.tokens for one in self.of_state(FleetState.DRAINING))
        for number, one in enumerate(ready):  # each token is somebody's: what nobody had looked like an idle fleet
            tokens = (max(0, self.load - draining) + number) // len(ready)
            self.replicas[one.name] = FleetReplica(one.name, one.state, one.revision, tokens, CAPACITY)

    def _do(self, order) -> None:
        action, name = order.action, order.name
        if action in (FleetAction.START, FleetAction.WARM):
            self.num_started += 1
            name = f"s{self.num_started}"
            self.replicas[name] = FleetReplica(name, FleetState.STARTING, order.revision)
            self.put(name, FleetState.STARTING if action is FleetAction.START else FleetState.WARMING)
        elif action is FleetAction.STOP:
            one = self.replicas.pop(name)
            is_over = one.state is FleetState.LOST or self.at_s - self.since[name] >= self.told.drain_s
            assert one.tokens == 0 or is_over, "it has something to do"
            assert one.state is not FleetState.READY, "it drains first"
        elif action is FleetAction.WAKE:
            assert self.replicas[name].state is FleetState.ASLEEP
            self.put(name, FleetState.READY)
        elif action is FleetAction.ADMIT:
            was_warming = self.replicas[name].state is FleetState.WARMING
            self.put(name, FleetState.STARTING if was_warming else FleetState.READY)
        elif action is FleetAction.DRAIN:
            assert self.replicas[name].state is FleetState.READY
            self.put(name, FleetState.DRAINING)
        else:
            assert self.replicas[name].state is FleetState.DRAINING
            assert self.replicas[name].tokens == 0
            self.put(name, FleetState.ASLEEP)


SETTINGS = st.builds(
    lambda low, more, spare, up, down, warm, surge: ScaleSettings(
        min_replicas=low,
        max_replicas=max(1, low + more),
        spare=spare,
        up_delay_s=up,
        down_delay_s=down,
        warm_pool=warm,
        surge=surge,
        idle_s=20,
        drain_s=60,
    ),
    st.integers(0, 4),
    st.integers(0, 6),
    st.integers(0, 2),
    st.sampled_from([0.0, 2.0, 5.0]),
    st.sampled_from([5.0, 30.0]),
    st.integers(0, 3),
    st.integers(1, 3),
)


@given(SETTINGS, st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 25)), min_size=1, max_size=8), st.integers())
@settings(deadline=None, max_examples=60)
def test_whatever_the_load_there_are_never_too_many_and_from_the_start_on_never_too_few(told, loads, seed):
    world, draw = FleetWorld(told), random.Random(seed)
    for load, length in loads:
        world.load = load
        for _ in range(length):
            if world.replicas and draw.random() < 0.05:
                world.put(draw.choice(list(world.replicas)), FleetState.LOST, tokens=0)
            if draw.random() < 0.03:
                world.revision = f"r{draw.randint(1, 3)}"
            ready_before, awake_before = len(world.of_state(FleetState.READY)), len(world.of_state(*AWAKE))
            decision = world.second()
            assert len(world.replicas) <= told.max_replicas + told.surge
            assert len(world.of_state(*AWAKE)) >= min(awake_before, told.min_replicas)
            assert decision.wanted <= told.max_replicas
            gone = ready_before - len(world.of_state(FleetState.READY))
            assert gone <= 0 or len(world.of_state(FleetState.READY)) >= decision.wanted


TO_NONE = ScaleSettings(min_replicas=0, max_replicas=2, up_delay_s=0.0, down_delay_s=5.0, idle_s=20, drain_s=60)


@example(TO_NONE, 0, 1)  # less than a token for each
@given(SETTINGS, st.integers(0, 9000), st.integers(0, 9000))
@settings(deadline=None, max_examples=60)
def test_a_constant_load_comes_to_rest(told, before, load):
    world = FleetWorld(told)
    world.load = before
    world.seconds(20)
    world.load = load
    world.seconds(400)
    assert all(decision.orders == [] for decision in world.seconds(60))
    needed = world.second().needed
    assert len(world.of_state(FleetState.READY)) == needed
    assert len(world.of_state(FleetState.ASLEEP)) == min(told.warm_pool, told.max_replicas - needed)


def test_a_load_that_goes_up_and_down_faster_than_down_delay_moves_nothing():
    world = FleetWorld(ScaleSettings(max_replicas=8, down_delay_s=60))
    world.load = 2000
    world.seconds(30)
    for turn in range(20):
        world.load = 200 if turn % 2 else 2000
        assert all(decision.orders == [] for decision in world.seconds(10))


def test_three_times_the_load_is_answered_within_up_delay_and_what_starts():
    world = FleetWorld(ScaleSettings(max_replicas=12, up_delay_s=2, spare=1))
    world.load = 1400
    world.seconds(30)
    assert len(world.of_state(FleetState.READY)) == 3
    world.load = 4200
    orders = [order for decision in world.seconds(4) for order in decision.orders]
    assert [order.action for order in orders] == [FleetAction.START] * 4
    world.seconds(world.start_s)
    assert len(world.of_state(FleetState.READY)) == 7


def test_a_peak_shorter_than_up_delay_starts_nothing():
    world = FleetWorld(ScaleSettings(max_replicas=12, up_delay_s=3))
    world.load = 700
    world.seconds(30)
    world.load = 5000
    world.seconds(2)
    world.load = 700
    assert all(decision.orders == [] for decision in world.seconds(10))
    assert world.num_started == 2


def test_sleeping_replicas_are_woken_before_any_is_started():
    world = FleetWorld(ScaleSettings(max_replicas=8, warm_pool=2, up_delay_s=0))
    world.load = 700
    world.seconds(30)
    assert len(world.of_state(FleetState.ASLEEP)) == 2
    world.load = 2800
    actions = [order.action for order in world.second().orders]
    assert actions == [FleetAction.WAKE, FleetAction.WAKE, FleetAction.START]


def test_a_replica_that_drains_is_taken_back_first():
    world = FleetWorld(ScaleSettings(max_replicas=8, up_delay_s=0, down_delay_s=5), drain_s=30)
    world.load = 2100
    world.seconds(20)
    world.load = 1400
    world.seconds(7)
    assert len(world.of_state(FleetState.DRAINING)) == 1
    world.load = 2100
    assert [order.action for order in world.second().orders] == [FleetAction.ADMIT]


def test_a_replica_that_has_drained_and_is_needed_is_taken_back_and_not_ended():
    world = FleetWorld(ScaleSettings(max_replicas=8, up_delay_s=0, down_delay_s=5), drain_s=0)
    world.load = 2100
    world.seconds(20)
    world.load = 1400
    while not world.of_state(FleetState.DRAINING):
        world.second()
    assert world.second().orders == []
    world.load = 2100
    assert [order.action for order in world.second().orders] == [FleetAction.ADMIT]


def test_to_none_and_back():
    world = FleetWorld(ScaleSettings(min_replicas=0, spare=0, idle_s=20, down_delay_s=5))
    world.load = 500
    world.seconds(10)
    world.load = 0
    world.seconds(19)
    assert world.of_state(FleetState.READY), "not before idle_s"
    world.seconds(10)
    assert world.replicas == {}
    world.load = 500
    assert [order.action for order in world.second().orders] == [FleetAction.START]


def test_to_none_with_a_warm_pool_falls_asleep_and_is_woken_by_what_is_held():
    world = FleetWorld(ScaleSettings(min_replicas=0, spare=0, idle_s=20, down_delay_s=5, warm_pool=1))
    world.load = 500
    world.seconds(10)
    world.load = 0
    world.seconds(60)
    assert [one.state for one in world.replicas.values()] == [FleetState.ASLEEP]
    world.load = 500
    assert next(order.action for order in world.second().orders) is FleetAction.WAKE


@pytest.mark.parametrize("surge", [1, 2])
def test_another_revision_keeps_as_many_ready_as_are_wanted(surge):
    world = FleetWorld(ScaleSettings(max_replicas=4, surge=surge))
    world.load = 1400
    world.seconds(30)
    world.revision = "r2"
    for _ in range(80):
        world.second()
        assert len(world.of_state(FleetState.READY)) >= 3
    assert {one.revision for one in world.replicas.values()} == {"r2"}
    assert len(world.of_state(FleetState.READY)) == 3


@pytest.mark.parametrize(("after_s", "num_ready", "is_urgent"), [(20, 2, False), (2, 0, True)])
def test_the_first_of_another_revision_are_urgent_where_too_few_serve(after_s, num_ready, is_urgent):
    world = FleetWorld(ScaleSettings(min_replicas=2, max_replicas=4, spare=0))
    world.seconds(after_s)
    assert len(world.of_state(FleetState.READY)) == num_ready
    world.revision = "r2"
    orders = [order for decision in world.seconds(3) for order in decision.orders]
    assert {order.is_urgent for order in orders if order.action is FleetAction.START} == {is_urgent}


def test_a_revision_that_does_not_start_takes_no_replica_away():
    world = FleetWorld(ScaleSettings(max_replicas=4))
    world.load = 1400
    world.seconds(30)
    world.revision, world.starts_fail = "r2", True
    before = world.num_started
    world.seconds(300)
    assert len(world.of_state(FleetState.READY)) == 3
    assert world.num_started - before < 12, "each attempt waits longer than the one before"


def test_a_trial_is_one_replica_beside_the_others():
    world = FleetWorld(ScaleSettings(max_replicas=4), trial=None)
    world.load = 1400
    world.seconds(30)
    world.trial = "r2"
    world.seconds(30)
    revisions = [one.revision for one in world.of_state(FleetState.READY)]
    assert sorted(revisions) == ["r1", "r1", "r1", "r2"]
    world.trial = None
    world.seconds(30)
    assert [one.revision for one in world.replicas.values()] == ["r1"] * 3


def test_a_trial_that_fails_does_not_hold_up_those_that_are_lost():
    world = FleetWorld(ScaleSettings(max_replicas=4))
    world.load = 1400
    world.seconds(30)
    world.trial, world.starts_fail = "r2", True
    world.seconds(60)
    world.put(world.of_state(FleetState.READY)[0].name, FleetState.LOST, tokens=0)
    orders = [order for decision in world.seconds(2) for order in decision.orders if order.revision == "r1"]
    assert FleetAction.START in [order.action for order in orders]


def test_what_drains_for_too_long_is_stopped_with_what_it_has():
    world = FleetWorld(ScaleSettings(max_replicas=4, spare=0, down_delay_s=5, drain_s=20), drain_s=10**6)
    world.load = 1400
    world.seconds(20)
    world.load = 300
    world.seconds(12)
    assert len(world.of_state(FleetState.DRAINING)) == 1
    world.seconds(25)
    assert len(world.replicas) == 1


def test_all_that_are_lost_at_once_are_replaced_at_once():
    world = FleetWorld(ScaleSettings(min_replicas=10, max_replicas=20, spare=0))
    world.seconds(20)
    for name in list(world.replicas)[:5]:
        world.put(name, FleetState.LOST, tokens=0)
    actions = [order.action for order in world.second().orders]
    assert sorted(actions) == [FleetAction.START] * 5 + [FleetAction.STOP] * 5
