"""Drafts from what was said before: in the request's own text, and in what was answered to the same tenant.

Where the last tokens of a text stood before, what followed them is likely to follow again (Oliaro et al. 2024,
"SuffixDecoding"; prompt lookup is the case without a corpus). `kernels.native.suffix` finds the longest such end;
`acceptance` says how likely its followers are to be right.

A corpus is of one tenant (the request's `cache_salt`): what is guessed from another's answers would show in how fast
tokens come. It holds the newest `CORPUS_TOKENS` of the answers, and of the tenants the `MOST_TENANTS` who asked last.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from splittime.core.step import Admitted
from splittime.kernels.native.suffix import BETWEEN_TEXTS, Follower, SuffixBatch, SuffixText, suffix_batch
from splittime.runner.acceptance import MIN_MATCH, Acceptance, DraftKind, Trust, kind_of
from splittime.runner.drafting import Draft

CORPUS_TOKENS = 2**18
MOST_TENANTS = 64
LEAST_SURVIVAL = 0.05  # of a draft that is worth telling on the emptiest server
EXPLORE = 64  # in so many steps one row has a draft more than pays, or nothing would be learnt of such drafts


class DraftedText:
    """What is kept of a request. asked: the kind of its last drafts, and how many of each place should be right."""

    __slots__ = ("answer", "asked", "corpus", "stop_ids", "text", "trust")

    def __init__(self, text: SuffixText, corpus: SuffixText | None, stop_ids: tuple[int, ...]) -> None:
        self.text, self.corpus, self.stop_ids, self.trust = text, corpus, stop_ids, Trust()
        self.answer: list[int] = []
        self.asked: tuple[DraftKind, tuple[float, ...]] | None = None


class SuffixDrafter:
    """Implements `runner.drafting.Drafter`.

    most: drafts a row. min_match: the shortest end that counts. has_corpus: whether answers to others of the same
    tenant count.
    """

    def __init__(self, most: int, max_model_len: int, min_match: int = MIN_MATCH, has_corpus: bool = True) -> None:
        self._max_model_len, self._min_match, self._has_corpus = max_model_len, min_match, has_corpus
        self._acceptance, self._follower = Acceptance(most), Follower(most)
        self._requests: dict[str, DraftedText] = {}
        self._corpora: OrderedDict[str, SuffixText] = OrderedDict()
        self._together: list[DraftedText] = []  # who got tokens last, and their handles
        self._batch: SuffixBatch = suffix_batch((), ())
        self._num_steps = 0

    def admit(self, admitted: Admitted) -> None:
        text = SuffixText(self._max_model_len)
        text.append(admitted.token_ids)
        corpus = self._corpus(admitted.cache_salt) if self._has_corpus else None
        self._requests[admitted.request_id] = DraftedText(text, corpus, admitted.stop_token_ids)

    def release(self, request_id: str) -> None:
        gone = self._requests.pop(request_id, None)
        if gone is not None and gone.corpus is not None and gone.answer:
            gone.corpus.append([*gone.answer, BETWEEN_TEXTS])

    def learn(self, request_id: str, num_drafts: int, num_right: int) -> None:
        request = self._requests.get(request_id)
        if request is None or request.asked is None:
            return
        kind, survival = request.asked
        self._acceptance.learn(kind, num_drafts, num_right)
        request.trust.learn(sum(survival[:num_drafts]), num_right)

    def draft(self, new_tokens: Mapping[str, Sequence[int]], least_survival: float) -> Mapping[str, Draft]:
        together = [self._requests[name] for name in new_tokens]
        if together != self._together:
            self._together = together
            self._batch = suffix_batch([one.text for one in together], [one.corpus for one in together])
        self._follower.follow(self._batch, list(new_tokens.values()))
        for request, tokens in zip(together, new_tokens.values(), strict=True):
            request.answer += tokens
        self._num_steps += 1
        lengths, least_survival = self._follower.lengths, max(LEAST_SURVIVAL, least_survival)
        matched = [line for line in range(len(together)) if lengths[line] >= self._min_match]
        turn, rest = divmod(self._num_steps, EXPLORE)
        explored = matched[turn % len(matched)] if matched and not rest else None
        names = list(new_tokens) if matched else []
        drafts = {names[line]: self._draft(line, together[line], least_survival, line == explored) for line in matched}
        return {name: draft for name, draft in drafts.items() if draft is not None}

    def _draft(self, line: int, request: DraftedText, least_survival: float, explores: bool) -> Draft | None:
        """Returns the tokens that are likely enough to be right. explores: and one more, all of them whatever they
        cost."""
        kind = kind_of(self._follower.sources[line], self._follower.lengths[line])
        survival, factor = self._acceptance.survival(kind), request.trust.factor
        is_believed = survival[0] * factor >= least_survival
        if not is_believed:
            request.trust.recover()
        found = self._followers(line, request.stop_ids) if is_believed or explores else ()
        if not found:
            return None
        request.asked = kind, survival
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
        if len(self._corpora) > MOST_TENANTS:
            self._corpora.popitem(last=False)
        return corpus
