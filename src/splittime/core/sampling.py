"""How a request's tokens are chosen, and when it stops. A value: checked once where it enters, then only read."""

import msgspec

from splittime.core.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 256
MAX_GRAMMAR_CHARS = 2**20
MAX_REASONING_MARK_TOKENS = 64
POOLINGS = ("last", "cls", "mean")
LOGITS = "logits"
AHEAD = "ahead"
SCORE = "score"


class ReasoningLimit(msgspec.Struct, frozen=True, gc=False):
    """How much is thought before an answer: behind `max_tokens` tokens of reasoning, `end_ids` must come, unless one of
    the runs `closed_by` has shown that it is over. Reasoning begins where an answer begins with one of the runs
    `begin_ids`, be it behind some of `blank_ids`, tokens of white space; () where its prompt has opened it."""

    max_tokens: int
    end_ids: tuple[int, ...]
    begin_ids: tuple[tuple[int, ...], ...] = ()
    closed_by: tuple[tuple[int, ...], ...] = ()
    blank_ids: tuple[int, ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Sampling parameters, with the meanings that OpenAI's and vLLM's APIs give them.

    `temperature` 0 is greedy. `top_k` 0 is off. `seed` None lets the engine draw one; with a seed the tokens do not
    depend on what else is in the batch. `logprobs` is the number of alternatives beside the chosen token (0: only the
    chosen one; None: none at all). `min_tokens` holds back end-of-sequence, stop ids and stop strings until so many are
    out. `stop` strings are cut from the text; `stop_token_ids` end a request like end-of-sequence does. `grammar` is
    what the answer is held to, in the form of `text.grammars`; "" is none. `allowed_token_ids`: no other token comes;
    () is no such list. `bad_token_ids`: none of these runs of tokens comes whole, which is how `bad_words` are held
    (each is two: at a text's begin and behind a space). `pooling`: no token comes; what is answered is the last layer's
    output for the prompt: of its last token, of its first (`cls`), or the mean of all (`mean`); or what the model says
    of the `allowed_token_ids` behind it (`logits`), or what a head says of it (`score`). "" is none of these.
    `reasoning_limit`: of what is thought; None is no bound.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    pooling: str = ""
    reasoning_limit: ReasoningLimit | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def is_listed(self) -> bool:
        """Returns whether a list says which tokens may come, or may not."""
        return bool(self.allowed_token_ids or self.bad_token_ids)

    @property
    def computes_prompt(self) -> bool:
        """Returns whether a step computes each token of the prompt, so that none of it is taken from the cache."""
        return self.prompt_logprobs is not None or self.pooling in ("cls", "mean")

    @property
    def least_tokens(self) -> int:
        """Output tokens for which there must be room behind the prompt."""
        return 0 if self.pooling else 1

    def validate(self) -> None:
        """Raise `RequestError` naming the first parameter out of range, its value and the range."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # a NaN fails this too
                least_only = high == _INT64 and low >= 0
                why = f"must be at least {low}" if least_only else f"outside {low} to {high}"
                raise RequestError(f"{name} is {value}, {why}", param=name, value=str(value), limit=[low, high])
        if self.top_p == 0.0:
            raise RequestError("top_p is 0, must be above 0", param="top_p", value=0, limit=[0, 1])
        if self.repetition_penalty == 0.0:
            raise RequestError("repetition_penalty is 0, must be above 0", param="repetition_penalty", value=0)
        _check_count("stop", len(self.stop), MAX_STOP_STRINGS)
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        if len(self.grammar) > MAX_GRAMMAR_CHARS:
            words = f"grammar has {len(self.grammar)} characters, more than {MAX_GRAMMAR_CHARS}"
            raise RequestError(words, param="grammar", value=len(self.grammar), limit=MAX_GRAMMAR_CHARS)
        if self.grammar and self.ignore_eos:
            words = "ignore_eos leaves an answer that is held to a form no end"
            raise RequestError(words, param="ignore_eos", value=True, hint="leave ignore_eos out")
        self._check_lists()
        self._check_pooling()
        self._check_reasoning()
        if "" in self.stop:
            raise RequestError("stop contains an empty string", param="stop", value="")
        for token_id, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise RequestError(
                    f"logit_bias of token {token_id} is {bias}, outside -100 to 100",
                    param="logit_bias",
                    value=str(bias),
                    limit=[-100, 100],
                )

    def _check_pooling(self) -> None:
        kinds = (*POOLINGS, LOGITS, SCORE, AHEAD)
        if self.pooling and self.pooling not in kinds:
            words = f"pooling is {self.pooling!r}, and can be {', '.join(kinds)}"
            raise RequestError(words, param="pooling", value=self.pooling, limit=list(kinds))
        if self.pooling == LOGITS and not self.allowed_token_ids:
            words = "pooling of logits needs allowed_token_ids: of these"
            raise RequestError(words, param="allowed_token_ids", value=None)

    def _check_reasoning(self) -> None:
        limit = self.reasoning_limit
        if limit is None:
            return
        if not 0 <= limit.max_tokens <= _INT64:
            words, value = "a bound of the reasoning must be at least 0 tokens", str(limit.max_tokens)
            raise RequestError(words, param="reasoning_limit", value=value, limit=[0, _INT64])
        _check_count("reasoning_limit", len(limit.blank_ids), MAX_REASONING_MARK_TOKENS)
        for run in (limit.end_ids, *limit.begin_ids, *limit.closed_by):
            _check_count("reasoning_limit", len(run) or MAX_REASONING_MARK_TOKENS + 1, MAX_REASONING_MARK_TOKENS)

    def _check_lists(self) -> None:
        _check_count("bad_words", len(self.bad_token_ids), 2 * MAX_BAD_WORDS)
        for run in self.bad_token_ids:
            _check_count("bad_words", len(run) or MAX_BAD_WORD_TOKENS + 1, MAX_BAD_WORD_TOKENS)
        if self.grammar and self.is_listed:
            name = "allowed_token_ids" if self.allowed_token_ids else "bad_words"
            words, hint = f"{name} beside a form could leave no token", "write what is forbidden into the form"
            raise RequestError(words, param=name, hint=hint)


_INT64 = 2**63 - 1
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, _INT64),
    ("min_tokens", 0, _INT64),
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("top_k", 0, _INT64),
    ("min_p", 0.0, 1.0),
    ("seed", -(2**63), _INT64),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 10.0),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(f"{name} has {count} entries, more than {limit}", param=name, value=count, limit=limit)
