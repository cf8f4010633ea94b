"""What the scheduler has counted since it was started."""

from dataclasses import dataclass


@dataclass
class Counts:
    """`prefix_*` and `prompt_tokens` count a request at its first admission."""

    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_host_hit_tokens: int = 0  # of these
    prompt_tokens: int = 0
    output_tokens: int = 0
    draft_tokens: int = 0  # verified
    accepted_draft_tokens: int = 0  # of these, as the runner says
