"""What a step needs of the card at the least, from the model's cost (`runner.config_sizes`) and what was counted. Pure.

    decode     max(bytes / bandwidth, operations / rate)
    bytes      of the weights that the step's products read, the head's among them, and of the context of every row
    operations 2 for each weight that a token is multiplied by, the head's for a row that samples, and 4 for each pair
               of a token and a position of its context, of each layer's heads and columns
    prefill    operations of all tokens of a prompt; token i attends to i positions, itself among them

The rows that the embedding looks up, norms, turns and activations are left out: well under a per cent.
"""

import math

from splittime.core.facts import TokenCost


def decode_bytes(cost: TokenCost, weight_bytes: float, context_tokens: float) -> float:
    """weight_bytes: counted, of a step. context_tokens: of all rows together."""
    return weight_bytes + context_tokens * cost.kv_bytes_per_token


def decode_operations(cost: TokenCost, rows: int, context_tokens: float) -> float:
    each = cost.operations_per_token + cost.operations_per_sample
    return rows * each + context_tokens * cost.operations_per_context_token


def prefill_operations(cost: TokenCost, tokens: int) -> float:
    """Of one prompt from its beginning, whose last token's row samples."""
    pairs = tokens * (tokens + 1) // 2
    return tokens * cost.operations_per_token + pairs * cost.operations_per_context_token + cost.operations_per_sample


def floor_s(num_bytes: float, operations: float, ceiling: dict[str, float]) -> float:
    """ceiling: bytes_per_s and operations_per_s, as measured."""
    return max(num_bytes / ceiling["bytes_per_s"], operations / ceiling["operations_per_s"])


def percentile(values: list[float], share: float) -> float:
    """The smallest value that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
