"""What `splittime up` holds its gateways and replicas to; `splittime fleet` has the same on paper."""

from typing import TypedDict

LOST_S = 10.0  # without an answer to a question that takes a millisecond: a replica is lost
FIRST_FAILURES = 5  # after which a gateway leaves a dead replica alone, by its breaker's default
MAX_ATTEMPTS = 5  # of one request: replicas die side by side; so many die of a request that kills them


class RetryBounds(TypedDict):
    """What `[retries]` says where the cluster's config does not."""

    max_attempts: int
    spare: int


def max_in_flight(max_num_seqs: int) -> int:
    """Returns how many requests a replica is given at once: so many run, and as many wait to follow."""
    return 2 * max_num_seqs


def retry_bounds(max_num_seqs: int) -> RetryBounds:
    """Returns bounds with room for a replica's end: all that it had without a byte of an answer is sent again, though
    there may be few other requests."""
    return {"max_attempts": MAX_ATTEMPTS, "spare": max_in_flight(max_num_seqs) + FIRST_FAILURES}
