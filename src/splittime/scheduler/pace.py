"""How keys share the time of steps: whose rows sit one out.

A step takes as long for one row as for all that are in it. Where the rows of one key make the steps of another longer
than its share of them justifies, they sit out until the other has caught up. Each key has a counter of the time of its
steps, by its share of their tokens and by its weight; who has more than the least sits out, if a step of all takes
longer than one of the least key alone by more than the weights allow: twice as long for two equal keys. Where a batch
costs little more than a row, as on a card, nobody does.

What a step of a key alone takes is seen when the others sit out. Where that is not known, or not any more
(`LOOK_EVERY`), it is taken to be as much less as it had fewer of the tokens.
"""

from collections.abc import Collection, Iterable, Mapping

from splittime.core.shares import UNIT, KeyShare
from splittime.core.step import Row
from splittime.scheduler.state import RequestState

LOOK_EVERY = 64  # steps of several keys


class KeyPace:
    """Only where several keys have requests."""

    def __init__(self) -> None:
        self._spent: dict[str, int] = {}
        self._alone_ns: dict[str, float] = {}
        self._longest_ns = 0  # what the latest step of several keys took
        self._parts: dict[str, float] = {}  # of its tokens
        self._planned: dict[int, tuple[int, dict[str, tuple[int, KeyShare]], bool]] = {}
        self._num_together = 0
        self._committed_ns = 0

    def who_sits_out(self, shares: Mapping[str, KeyShare]) -> Collection[str]:
        """shares: of the keys that run or wait. Changes nothing: a plan that comes to nothing is in no record."""
        spent = self._spent_by(shares)
        least = min(shares, key=lambda name: (spent[name], name))
        alone_ns = self._alone_ns.get(least, self._longest_ns * self._parts.get(least, 0.0))
        bound = sum(each.weight for each in shares.values()) / shares[least].weight
        if alone_ns and self._longest_ns <= alone_ns * bound:
            return ()
        return [name for name in shares if spent[name] > spent[least]]

    def _spent_by(self, shares: Mapping[str, KeyShare]) -> dict[str, int]:
        known = {name: spent for name, spent in self._spent.items() if name in shares}
        start = min(known.values(), default=0) - 1  # a newcomer comes first
        return {name: known.get(name, start) for name in shares}

    def begin(
        self,
        step_id: int,
        now_ns: int,
        rows: Iterable[Row],
        by_id: Mapping[str, RequestState],
        shares: Mapping[str, KeyShare],
    ) -> None:
        """A step was planned, while these keys ran or waited."""
        self._spent = self._spent_by(shares)
        tokens: dict[str, tuple[int, KeyShare]] = {}
        decodes = True
        for row in rows:
            share = by_id[row.request_id].share
            tokens[share.name] = (tokens.get(share.name, (0, share))[0] + row.num_tokens, share)
            decodes = decodes and len(row.token_ids) == 1
        self._planned[step_id] = (now_ns, tokens, decodes)

    def end(self, step_id: int, now_ns: int) -> None:
        """Learn what the step took, which was committed now."""
        planned_ns, tokens, decodes = self._planned.pop(step_id, (0, {}, False))
        took_ns = now_ns - max(planned_ns, self._committed_ns)
        self._committed_ns = now_ns
        total = sum(count for count, _ in tokens.values())
        for name, (count, share) in tokens.items():
            if name in self._spent:
                self._spent[name] += took_ns * count * share.unit // (total * UNIT)
        if len(tokens) == 1 and decodes:
            self._alone_ns[next(iter(tokens))] = took_ns
        elif len(tokens) > 1:
            self._longest_ns = took_ns
            self._parts = {name: count / total for name, (count, _) in tokens.items()}
            self._num_together += 1
            if self._num_together % LOOK_EVERY == 0:
                self._alone_ns.clear()
