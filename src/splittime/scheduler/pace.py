"""How keys share the time of steps: whose rows sit one out.

A step takes as long for one row as for all that are in it. So the time of a step is shared among the keys in it, by
their tokens and weights (`KeyShare.spent_ns`), against a level: what one that always got its share has spent. Who has
spent more owes, and sits out while others have rows, until the level has come up to it. Three rules keep that from
being felt more than it helps:

* A step is charged only where it is dear: where one of its keys alone would have been faster by more than the weights
  allow, twice as fast for two equal keys. What that takes is learnt from the steps (`core.row_costs`): a step is taken
  to be dear until one with few rows shows otherwise, and one in `LOOK_EVERY` is charged whatever it is, to look again.
  Where a batch costs little more than a row, as on a card, nobody owes.
* Nobody owes more than the step that it was in, or two where the next is planned before that. The level rises whoever
  comes, so how long somebody sits out hangs on its own debt and on the weights of those that share, and not on
  newcomers: these begin at the level.
* A key that has no row in a step, and does not sit it out, has no part in it: it saves nothing up by waiting, and who
  goes on without it owes nothing. Nobody saves up by having little, either, more than those that are there owe.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from splittime.core.row_costs import RowCosts
from splittime.core.shares import UNIT, KeyShare
from splittime.core.step import Row
from splittime.scheduler.state import RequestState

LOOK_EVERY = 64  # steps of several keys
ROWS_WITHOUT = 0.1  # what a step takes is its rows, until one with few shows otherwise


class PacedStep(NamedTuple):
    """tokens: of each key with rows. is_plain: each row decodes one token, without drafts. owing: keys with rows that
    owed when it was planned."""

    planned_ns: int
    tokens: dict[str, int]
    shares: dict[str, KeyShare]
    sit_out: Mapping[str, KeyShare]
    is_plain: bool
    owing: frozenset[str]


class KeyPace:
    """Only where several keys have requests."""

    def __init__(self) -> None:
        self._level_ns = 0  # of a key of weight 1
        self._costs = RowCosts(ROWS_WITHOUT)  # of tokens
        self._planned: dict[int, PacedStep] = {}
        self._tokens: dict[str, int] = {}  # that keys with a part in the latest step have in one of all
        self._num_together = 0  # steps in which no key sat out
        self._committed_ns = 0

    def who_sits_out(self, shares: Mapping[str, KeyShare], running: Iterable[RequestState]) -> dict[str, KeyShare]:
        """shares: of the keys that run or wait. Changes nothing: a plan that comes to nothing is in no record."""
        owing = {name: share for name, share in shares.items() if share.spent_ns > self._level_ns}
        helps = owing and any(
            state.share.name not in owing and state.gets_row and not state.is_ahead for state in running
        )
        return owing if helps else {}

    def stay_alone(self, share: KeyShare) -> None:
        """One key has requests: it owes nobody."""
        self._level_ns = max(self._level_ns, share.spent_ns)

    def begin(
        self,
        step_id: int,
        now_ns: int,
        rows: Iterable[Row],
        by_id: Mapping[str, RequestState],
        sit_out: Mapping[str, KeyShare],
    ) -> None:
        """A step was planned, while several keys ran or waited."""
        tokens: dict[str, int] = {}
        shares: dict[str, KeyShare] = {}
        is_plain = True
        for row in rows:
            state = by_id[row.request_id]
            is_plain = is_plain and row.num_tokens == 1
            if not state.is_ahead:
                name = state.share.name
                shares[name] = state.share
                tokens[name] = tokens.get(name, 0) + row.num_tokens
        owing = frozenset(name for name, share in shares.items() if share.spent_ns > self._level_ns)
        self._planned[step_id] = PacedStep(now_ns, tokens, shares, sit_out, is_plain, owing)

    def end(self, step_id: int, now_ns: int) -> None:
        """Learn what the step took, which was committed now, and share it."""
        step = self._planned.pop(step_id, None)
        began_ns = max(step.planned_ns if step else 0, self._committed_ns)
        self._committed_ns = now_ns
        if step is None or not step.tokens:
            return
        took_ns = now_ns - began_ns
        if step.is_plain:
            self._costs.learn(sum(step.tokens.values()), took_ns)
        self._share(step, took_ns)

    def _share(self, step: PacedStep, took_ns: int) -> None:
        parts = {**step.sit_out, **step.shares}
        for name, share in parts.items():
            if name not in self._tokens:
                share.spent_ns = max(share.spent_ns, self._level_ns)
        self._tokens = {name: self._tokens_of(step, share) for name, share in parts.items()}
        weight = sum(share.weight for share in parts.values())
        is_dear = self._is_dear(step, parts, took_ns, weight)
        level_ns = self._level_ns + int(took_ns / weight)
        if is_dear:
            self._charge(step, took_ns)
            level_ns = max(level_ns, min(share.spent_ns for share in parts.values()))
        else:  # what is owed stays so, since who owes may have had its row planned before that was known
            for share in parts.values():
                share.spent_ns = level_ns if step.sit_out else share.spent_ns + level_ns - self._level_ns
        self._level_ns = level_ns
        self._bound_savings(parts.values())

    def _tokens_of(self, step: PacedStep, share: KeyShare) -> int:
        """Returns how many tokens a key has in a step of all: while it owes, as many as in one that it owes for."""
        owes = share.name in step.sit_out or share.spent_ns > self._level_ns
        return max(step.tokens.get(share.name, 0), self._tokens.get(share.name, 0) if owes else 0)

    def _charge(self, step: PacedStep, took_ns: int) -> None:
        """Who owed when the step was planned had rows because nobody was there to sit out for: it owes a step at most,
        or short requests, which are there in no plan, would stop it for as long as they came."""
        total = sum(step.tokens.values())
        for name, share in step.shares.items():
            spent_ns = share.spent_ns + took_ns * step.tokens[name] * share.unit // (total * UNIT)
            if name in step.owing:
                spent_ns = min(spent_ns, max(share.spent_ns, self._level_ns + took_ns * share.unit // UNIT))
            share.spent_ns = spent_ns

    def _is_dear(self, step: PacedStep, parts: Mapping[str, KeyShare], took_ns: int, weight: float) -> bool:
        """Whether a step of all takes longer than one of them alone by more than the weights allow, or that is to be
        seen."""
        if len(parts) == 1:
            return False
        if step.sit_out:  # of all it would have taken longer
            took_ns = max(took_ns, round(self._costs.expected_ns(sum(self._tokens.values()))))
        else:
            self._num_together += 1
        is_looked_at = not step.sit_out and self._num_together % LOOK_EVERY == 1
        return is_looked_at or any(
            took_ns * share.weight > weight * self._costs.expected_ns(self._tokens[name])
            for name, share in parts.items()
        )

    def _bound_savings(self, parts: Collection[KeyShare]) -> None:
        """Leave no more to be had than those that share owe: who owed may have gone."""
        off = [(share, (share.spent_ns - self._level_ns) * share.weight) for share in parts]
        owed, saved = sum(max(0, each) for _, each in off), -sum(min(0, each) for _, each in off)
        for share, each in off:
            if each < 0 and saved > owed:
                share.spent_ns = self._level_ns - int((self._level_ns - share.spent_ns) * owed / saved)
