"""A drafter for tests: it knows what comes, and is wrong now and then, the same way each time."""

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from zlib import crc32

from benchmarks.fake_runner import FakeRunner
from splittime.core.step import Admitted, StepPlan, StepResult
from splittime.runner.drafting import Draft, Drafter, DraftingRunner, Look


class Guesser:
    """following: what comes after these tokens, that many. Of each draft some tokens are right, and some after them are
    not; now and then there are none. chance: that it tells of each token; None: of none, and the scheduler takes all
    that fit."""

    def __init__(
        self,
        following: Callable[[str, Sequence[int], int], Sequence[int]],
        vocab_size: int,
        chance: float | None = None,
    ) -> None:
        self._following, self._chance = following, chance
        self._vocab_size = vocab_size
        self.num_right = self.num_wrong = 0  # in all drafts
        self.num_learnt = self.num_learnt_right = 0  # of those that were verified
        self._tokens: dict[str, list[int]] = {}

    def admit(self, admitted: Admitted) -> None:
        self._tokens[admitted.request_id] = list(admitted.token_ids)

    def release(self, request_id: str, is_preempted: bool = False) -> None:
        self._tokens.pop(request_id, None)

    def learn(self, request_id: str, num_drafts: int, num_right: int) -> None:
        assert 0 <= num_right <= num_drafts
        self.num_learnt += num_drafts
        self.num_learnt_right += num_right

    def forget(self) -> None:
        """It keeps nothing."""

    def draft(self, plan: StepPlan, result: StepResult, look: Look) -> Mapping[str, Draft]:
        drafts = {}
        for row in result.rows:
            request_id = row.request_id
            if not row.token_ids or row.error is not None:
                continue
            self._tokens[request_id] += row.token_ids
            guessed = tuple(self._guess(request_id, self._tokens[request_id]))
            chance = self._chance_of(request_id)
            survival = () if chance is None else tuple(chance**place for place in range(1, len(guessed) + 1))
            drafts[request_id] = Draft(guessed, survival)
        return {request_id: draft for request_id, draft in drafts.items() if draft.token_ids}

    def _chance_of(self, request_id: str) -> float | None:
        return self._chance

    def _guess(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        mixed = crc32(array("I", token_ids).tobytes())
        num_right, num_wrong = mixed % 5, (mixed >> 8) % 4
        known = list(self._following(request_id, token_ids, num_right + num_wrong))
        drafts = known[:num_right] + [(token + 1) % self._vocab_size for token in known[num_right:]]
        self.num_right += min(num_right, len(known))
        self.num_wrong += len(drafts) - min(num_right, len(known))
        return drafts


class DraftsAhead(DraftingRunner):
    """A drafting runner whose next step is planned while one runs. No setting allows that; the scheduler does."""

    def __init__(self, runner: FakeRunner, drafter: Drafter, now_ns: Callable[[], int]) -> None:
        super().__init__(runner, drafter, now_ns)
        self._launching, self._launched = runner, deque[StepPlan]()

    def launch(self, plan: StepPlan) -> None:
        self._launching.launch(plan)
        self._launched.append(plan)

    def collect(self) -> StepResult:
        result, plan = self._launching.collect(), self._launched.popleft()
        return self._with_drafts(plan, result, self._take_in(plan))
