"""Lengths of the requests that a server has served: a plan for it takes them, where nobody says others."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from splittime.core.request import FinishReason
from splittime.ledger.account import ClosedAccount

LENGTHS = ("input_tokens", "output_tokens")
OWN_LENGTHS = ("lengths_file", "trace", "dataset", "workload")  # such a load says all lengths


class Mix(NamedTuple):
    """rows: tokens of prompt and answer of each request. cached_share: of all prompts' tokens, those that were found
    in the prefix cache."""

    rows: tuple[tuple[int, int], ...]
    cached_share: float = 0.0

    def load(self, load: dict[str, Any]) -> dict[str, Any]:
        """Returns the load, with as much in common among its prompts as there was, if their lengths are the mix's."""
        said = {"input_tokens", "prefix_share", *OWN_LENGTHS} & set(load)
        return load if said or not self.cached_share else {"prefix_share": self.cached_share, **load}

    def words(self, load: dict[str, Any]) -> str:
        """Returns for people what the load takes of the mix; nothing if it says all itself."""
        taken = [] if set(OWN_LENGTHS) & set(load) else [name for name in LENGTHS if name not in load]
        if not taken:
            return ""
        of = "" if len(taken) > 1 else "prompts of " if taken == ["input_tokens"] else "answers of "
        shared = self.load(load).get("prefix_share") if "prefix_share" not in load else None
        cached = f", and {shared:.0%} of the prompts' tokens cached" if shared else ""
        return f"as the {of}{len(self.rows):,} requests that it served{cached}"


def mix_of(served: Iterable[ClosedAccount]) -> Mix | None:
    """Returns the mix of a ledger's requests. Of one that broke off nobody knows how long it would have been: it counts
    where no other is."""
    known = [account for account in served if account.prompt_tokens]
    whole = [a for a in known if a.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)] or known
    if not whole:
        return None
    rows = tuple((account.prompt_tokens, account.output_tokens) for account in whole)
    cached = sum(account.cached_tokens for account in whole)
    return Mix(rows, cached / sum(prompt for prompt, _ in rows))
