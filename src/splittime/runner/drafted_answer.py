"""What is kept of a request for a draft model: its text, how far that is computed, and its last drafts."""

from collections.abc import Sequence
from itertools import takewhile

from splittime.core.step import Admitted, Row
from splittime.runner.acceptance import Trust
from splittime.runner.draft_record import TenantRecord


class DraftedAnswer:
    """tokens: all that are known. table: the model's blocks; spare: further ones, for drafts. num_computed: positions
    that the draft model has computed, those of drafts in lent blocks among them. drafts: the last ones, which begin at
    the position `drafted_at`; probabilities: that the draft model gave to each; survival: of each the chance that it
    and all before it are right. record: of its tenant.
    """

    __slots__ = (
        *("drafted_at", "drafts", "is_broken", "most_tokens", "num_computed", "num_prompt", "probabilities"),
        *("record", "request_id", "spare", "stop_ids", "survival", "table", "tokens", "trust"),
    )

    def __init__(self, admitted: Admitted, most_tokens: int, record: TenantRecord) -> None:
        self.request_id, self.stop_ids = admitted.request_id, admitted.stop_token_ids
        self.record, self.trust = record, Trust()
        self.tokens = list(admitted.token_ids)
        self.num_prompt = len(self.tokens) - admitted.num_output_tokens
        self.most_tokens = min(most_tokens, self.num_prompt + (admitted.sampling.max_tokens or most_tokens))
        self.table: list[int] = []
        self.spare: list[int] = []
        self.num_computed = self.drafted_at = 0
        self.drafts: list[int] = []
        self.probabilities: list[float] = []
        self.survival: list[float] = []
        self.is_broken = False  # what the draft model computes for it is not finite

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_behind(self) -> int:
        """Returns how many known tokens the draft model has to compute for the first draft."""
        return len(self.tokens) - self.num_computed

    @property
    def may_go_on(self) -> bool:
        """Returns whether a further draft could be a token of the answer, which ends with one that is not drafted."""
        is_ended = bool(self.drafts) and self.drafts[-1] in self.stop_ids
        return not is_ended and len(self.tokens) + len(self.drafts) + 1 < self.most_tokens

    @property
    def survival_so_far(self) -> float:
        """Returns the chance that all its drafts are right; before the first, the request's own record."""
        return self.survival[-1] if self.survival else self.trust.factor

    def next_row(self) -> Row:
        """Returns the row that samples the next draft: behind the last one, or behind what is known."""
        if self.drafts:
            begin = len(self.tokens) + len(self.drafts) - 1
            return Row(self.request_id, begin, (self.drafts[-1],), (), 1)
        self.drafted_at = len(self.tokens)
        return Row(self.request_id, self.num_computed, tuple(self.tokens[self.num_computed :]), (), 1)

    def text_row(self, most_tokens: int) -> Row | None:
        """Returns the row that computes what is behind, but for the last token; None where there is none to compute."""
        num_tokens = min(self.num_behind - 1, most_tokens)
        end = self.num_computed + num_tokens
        token_ids = tuple(self.tokens[self.num_computed : end])
        return Row(self.request_id, self.num_computed, token_ids, (), 0) if num_tokens > 0 else None

    def add_draft(self, token_id: int, probability: float) -> None:
        self.survival.append(self.survival_so_far * self.record.confidence.chance(probability))
        self.drafts.append(token_id)
        self.probabilities.append(probability)

    def learn_drafts(self, num_verified: int) -> int:
        """Learns of the last drafts, of which so many were verified, how many were right, and forgets them. Returns up
        to which position the text is what was drafted from."""
        self.record.learn_verified(num_verified, len(self.drafts))
        came = self.tokens[self.drafted_at :]
        num_right = _num_equal(self.drafts, came)
        for place in range(min(num_right + 1, len(self.drafts), len(came))):
            self.record.confidence.learn(self.probabilities[place], place < num_right)
        self.trust.learn(sum(self.survival[: len(came)]) / self.trust.factor, num_right)
        self.drafts, self.survival, self.probabilities = [], [], []
        return self.drafted_at + num_right


def _num_equal(drafts: Sequence[int], came: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, came, strict=False)))
