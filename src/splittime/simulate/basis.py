"""What a step's time is made of: the terms of `simulate.shape.features_of`, and those that not every server has.

    step in pieces     1 for a step that a device runs kernel by kernel, where it runs others captured
    other experts      1 - (1 - k / E)^(tokens - 1), of a mixture that chooses k of E experts for a token

The second is the share of the experts that one token leaves alone and that the others of its step are expected to
choose, if each token chooses as if by lot. Its coefficient is what reading all of them takes. A text's tokens choose
more alike than that, so a few tokens are expected to read a little more than they do.
"""

from collections.abc import Sequence

import msgspec

from splittime.core.facts import TokenCost
from splittime.ledger.steps import StepRecord
from splittime.simulate.shape import StepShape, features_of

FEATURES = ("step", "step with prompts", "decode row", "prompt token", "KV position", "pair of prompt positions")
IN_PIECES, EXPERTS = "step in pieces", "other experts"


class Basis(msgspec.Struct, frozen=True):
    """captured_rows: steps of one token a row and at most so many rows are captured, others are not; None: all are run
    alike. idle_share: 1 - k / E; 0 for a model that is no mixture."""

    captured_rows: int | None = None
    idle_share: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        in_pieces = () if self.captured_rows is None else (IN_PIECES,)
        return (*FEATURES, *in_pieces, *((EXPERTS,) if self.idle_share else ()))

    def features(self, shape: StepShape) -> tuple[float, ...]:
        """Returns the values of `names`."""
        return (*features_of(shape), *self.more(shape))

    def more(self, shape: StepShape) -> tuple[float, ...]:
        """Returns the values that not every server has."""
        in_pieces = () if self.captured_rows is None else (float(self.is_in_pieces(shape)),)
        return (*in_pieces, 1 - self.idle_share ** (shape.tokens - 1)) if self.idle_share else in_pieces

    def host_features(self, shape: StepShape) -> tuple[float, ...]:
        in_pieces = () if self.captured_rows is None else (float(self.is_in_pieces(shape)),)
        return (1.0, shape.rows, shape.tokens, *in_pieces)

    def is_in_pieces(self, shape: StepShape) -> bool:
        return self.captured_rows is not None and (shape.tokens > shape.rows or shape.rows > self.captured_rows)


def basis_of(records: Sequence[StepRecord], cost: TokenCost | None) -> Basis:
    """Returns the terms of the steps of a ledger. cost: of the model, None: it is not known to be a mixture."""
    captured = [len(record.rows) for record in records if record.execution == "captured"]
    has_both = 0 < len(captured) < len(records)
    idle_share = 1 - cost.chosen_experts / cost.num_experts if cost is not None and cost.num_experts else 0.0
    return Basis(max(captured) if has_both else None, idle_share)
