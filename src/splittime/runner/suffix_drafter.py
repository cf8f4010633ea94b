"""Drafts from what was said before: in the request's own text, and in what was answered to the same tenant.

Where the last tokens of a text stood before, what followed them is likely to follow again (Oliaro et al. 2024,
"SuffixDecoding"; prompt lookup is the case without a corpus). `kernels.native.suffix` finds the longest such end;
`draft_record` says how likely its followers are to be right.

How often they are right is learnt from the text itself: what was found is held against the tokens that come, whether or
not it was drafted, since a row with drafts gives the tokens that rows without would have given. So where no draft pays
yet, the drafter still learns that they would, and nothing has to be tried for it.

A search takes microseconds, which a small model's step feels. So there is none where even a sure draft would not pay,
and a request whose last search came to nothing is left alone for a while (`SearchPace`), where time is short
(`runner.drafting`). Prompts are indexed when they come and answers when they end; in between, tokens are kept as they
come and indexed when a search wants them. In one step of `EXPLORE` all are searched, if there is time for any.

A corpus is of one tenant (the request's `cache_salt`), and so is what is learnt of how often drafts are right
(`draft_record`): what is guessed by another's answers would show in how fast tokens come. A corpus holds the newest
`CORPUS_TOKENS` of the answers; all together `MOST_TOKENS`, of the tenants who asked last.

A request's text is searched in the step after one that found a draft to tell, else after pauses that double. Pauses
end where the step's number is a multiple of their length, so that requests which are seldom asked are asked in the same
steps, and most steps have none to ask.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from operator import eq
from typing import NamedTuple

from splittime.core.step import Admitted, RowResult, StepPlan, StepResult
from splittime.kernels.native.suffix import BETWEEN_TEXTS, Follower, SuffixBatch, SuffixText, suffix_batch
from splittime.runner.config import CORPUS_TOKENS, MOST_TENANTS, MOST_TOKENS
from splittime.runner.draft_record import MIN_MATCH, Acceptance, ByTenant, DraftKind, Trust, kind_of
from splittime.runner.drafting import Draft, Look

LONGEST_PAUSE = 16  # steps; a power of two
CERTAIN = 1.0  # where drafts pay that are less likely than this, there is something to look for
LEAST_SURVIVAL = 0.05  # of a draft that is worth telling on the emptiest server
EXPLORE = 4 * LONGEST_PAUSE  # in so many steps one row has a draft more than pays, or nothing is learnt of such


class SearchPace:
    """next_step: when the request is to be searched again. num_steps: from one search to the one before, at most
    `LONGEST_PAUSE`."""

    __slots__ = ("_last", "_pause", "next_step", "num_steps")

    def __init__(self) -> None:
        self._last = self.next_step = self.num_steps = 0
        self._pause = 1

    def searched(self, step: int) -> None:
        """Takes in a search, due or not, that came to nothing unless `succeed` follows."""
        self.num_steps, self._last = min(step - self._last, LONGEST_PAUSE), step
        if step >= self.next_step:
            self.next_step = (step // self._pause + 1) * self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def succeed(self) -> None:
        """Takes in that the search came to something."""
        self.next_step, self._pause = 0, 1


class Found(NamedTuple):
    """What a search found to follow the first `begin` tokens of a request. survival: as it was believed then."""

    kind: DraftKind
    survival: tuple[float, ...]
    token_ids: tuple[int, ...]
    begin: int


class DraftedText:
    """What is kept of a request. text: the first `num_indexed` of its tokens. found: what is to be held against the
    tokens that come. acceptance: of its tenant's drafts."""

    __slots__ = (
        *("acceptance", "corpus", "found", "num_indexed", "num_prompt", "pace", "salt", "stop_ids", "text"),
        *("tokens", "trust"),
    )

    def __init__(self, admitted: Admitted, text: SuffixText, corpus: SuffixText | None, acceptance: Acceptance) -> None:
        self.text, self.corpus, self.acceptance, self.salt = text, corpus, acceptance, admitted.cache_salt
        self.stop_ids = admitted.stop_token_ids
        self.trust, self.pace = Trust(), SearchPace()
        self.tokens = list(admitted.token_ids)
        self.num_prompt = len(self.tokens) - admitted.num_output_tokens
        self.num_indexed = 0
        text.append(self.not_indexed())
        self.found: Found | None = None

    def not_indexed(self) -> list[int]:
        """Returns the tokens that the text does not have, once."""
        begin, self.num_indexed = self.num_indexed, len(self.tokens)
        return self.tokens[begin:]

    def learn(self) -> None:
        """Holds what was found against the tokens that came, once it is known how many of it are right."""
        if self.found is None:
            return
        kind, survival, token_ids, begin = self.found
        came = self.tokens[begin : begin + len(token_ids)]
        num_right = sum(1 for _ in takewhile(bool, map(eq, token_ids, came)))
        if num_right < len(came) or len(came) == len(token_ids):
            self.acceptance.learn(kind, len(token_ids), num_right)
            self.trust.learn(sum(survival), num_right)
            self.found = None


class SuffixDrafter:
    """Implements `runner.drafting.Drafter`.

    most: drafts a row. min_match: the shortest end that counts. has_corpus: whether answers to others of the same
    tenant count.
    """

    def __init__(self, most: int, max_model_len: int, min_match: int = MIN_MATCH, has_corpus: bool = True) -> None:
        self._max_model_len, self._min_match, self._has_corpus = max_model_len, min_match, has_corpus
        self._acceptances, self._follower = ByTenant(partial(Acceptance, most)), Follower(most)
        self._requests: dict[str, DraftedText] = {}
        self._corpora: OrderedDict[str, SuffixText] = OrderedDict()
        self._num_kept = 0  # tokens of all corpora
        self._together: list[DraftedText] = []  # who was searched last, and their handles
        self._batch: SuffixBatch = suffix_batch((), ())
        self._num_steps = self._next_step = 0  # the latter: before it nobody is to be searched

    def admit(self, admitted: Admitted) -> None:
        salt, text = admitted.cache_salt, SuffixText(self._max_model_len)
        corpus = self._corpus(salt) if self._has_corpus else None
        self._requests[admitted.request_id] = DraftedText(admitted, text, corpus, self._acceptances.of(salt))
        self._next_step = 0

    def release(self, request_id: str, is_preempted: bool = False) -> None:
        gone = self._requests.pop(request_id, None)
        if gone is not None and not is_preempted and len(gone.tokens) > gone.num_prompt:
            self._keep(gone)

    def forget(self) -> None:
        self._corpora.clear()
        self._num_kept = 0
        self._together, self._batch = [], suffix_batch((), ())

    def learn(self, request_id: str, num_drafts: int, num_right: int) -> None:
        """Does nothing: the tokens that come tell as much, also of what was not verified."""

    def draft(self, plan: StepPlan, result: StepResult, look: Look) -> Mapping[str, Draft] | None:
        self._take_in(result.rows)
        self._num_steps += 1
        explores, looks_everywhere = self._num_steps % EXPLORE == 0, look is Look.EVERYWHERE
        is_due = (looks_everywhere or self._num_steps >= self._next_step) and plan.least_survival < CERTAIN
        if look is Look.NOWHERE or not (is_due or explores):
            return None
        due = self._due(result.rows, looks_everywhere)
        found = self._search(due, max(LEAST_SURVIVAL, plan.least_survival), explores)
        self._next_step = min((one.pace.next_step for one in self._requests.values()), default=0)
        return found

    def _take_in(self, results: Sequence[RowResult]) -> None:
        requests = self._requests
        for row in results:
            request = requests.get(row.request_id)
            if request is not None:
                request.tokens += row.token_ids

    def _due(self, results: Sequence[RowResult], looks_everywhere: bool) -> dict[str, DraftedText]:
        """Returns whom to search: who is due, or all who have new tokens."""
        step, due = self._num_steps, {}
        for row in results:
            request = self._requests.get(row.request_id) if row.token_ids and row.error is None else None
            if request is not None and (looks_everywhere or request.pace.next_step <= step):
                request.pace.searched(step)
                due[row.request_id] = request
        return due

    def _search(self, due: dict[str, DraftedText], least_survival: float, explores: bool) -> dict[str, Draft]:
        """explores: one row, in turn, has a draft more."""
        if not due:
            return {}
        for request in due.values():
            request.learn()
        together = list(due.values())
        if together != self._together:
            self._together = together
            self._batch = suffix_batch([one.text for one in together], [one.corpus for one in together])
        self._follower.follow(self._batch, [one.not_indexed() for one in together])
        lengths, names = self._follower.lengths, list(due)
        matched = [line for line in range(len(together)) if lengths[line] >= self._min_match]
        turn = self._num_steps // EXPLORE
        explored = matched[turn % len(matched)] if matched and explores else None
        drafts = {names[line]: self._draft(line, together[line], least_survival, line == explored) for line in matched}
        return {name: draft for name, draft in drafts.items() if draft is not None}

    def _draft(self, line: int, request: DraftedText, least_survival: float, explores: bool) -> Draft | None:
        """Returns the tokens that are likely enough to be right. explores: and one more, all of them whatever they
        cost."""
        kind = kind_of(self._follower.sources[line], self._follower.lengths[line])
        survival, factor = request.acceptance.survival(kind), request.trust.factor
        is_believed = survival[0] * factor >= least_survival
        if not (is_believed or explores or request.found is None):
            return None
        found = self._followers(line, request.stop_ids)
        if request.found is None and found:
            request.found = Found(kind, survival[: len(found)], found, len(request.tokens))
        if not (found and (is_believed or explores)):
            return None
        if is_believed:
            request.pace.succeed()
        chances = tuple(chance for one in survival[: len(found)] if (chance := one * factor) >= least_survival)
        return Draft(found[: len(chances) + 1], ()) if explores else Draft(found[: len(chances)], chances)

    def _followers(self, line: int, stop_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Returns what followed, up to a token that ends the answer: nothing that comes behind would be told."""
        found = self._follower.drafts(line)
        ends = [place for place, token_id in enumerate(found, 1) if token_id in stop_ids]
        return tuple(found[: ends[0]] if ends else found)

    def _corpus(self, salt: str) -> SuffixText:
        corpus = self._corpora.get(salt)
        if corpus is None:
            corpus = self._corpora[salt] = SuffixText(CORPUS_TOKENS)
        self._corpora.move_to_end(salt)
        self._bound_corpora()
        return corpus

    def _keep(self, gone: DraftedText) -> None:
        corpus = gone.corpus
        if corpus is None or self._corpora.get(gone.salt) is not corpus:  # it was dropped meanwhile
            return
        num_before = corpus.num_tokens
        corpus.append([*gone.tokens[gone.num_prompt :], BETWEEN_TEXTS])
        self._num_kept += corpus.num_tokens - num_before
        self._bound_corpora()

    def _bound_corpora(self) -> None:
        while len(self._corpora) > 1 and (self._num_kept > MOST_TOKENS or len(self._corpora) > MOST_TENANTS):
            _, dropped = self._corpora.popitem(last=False)
            self._num_kept -= dropped.num_tokens
