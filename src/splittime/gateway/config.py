"""What `gateway.toml` may say: one struct for each table, each key with its meaning and its bounds.

`config_file` reads the file; the guide's table is made from these declarations.
"""

from typing import Annotated, Literal

import msgspec

from splittime.core.settings import Doc

NAME = r"^[A-Za-z0-9._:-]{1,64}$"
Name = Annotated[str, msgspec.Meta(pattern=NAME)]
Endpoint = Literal["chat", "completions", "responses", "messages", "count_tokens", "embeddings", "rerank", "score"]
Kind = Literal["openai", "splittime"]


class Strictly(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table in which every key means something."""


class UpstreamConfig(Strictly, frozen=True, kw_only=True):
    """`[[upstream]]`: a server that answers requests. Time-outs are in seconds."""

    name: Annotated[Name, Doc("Its name in accounts and metrics.")]
    url: Annotated[str, Doc("Its base URL, with or without /v1. Requests can name no other.")]
    owner: Annotated[str | None, Doc("Who answers for it: a team, an address. For `inventory`.")] = None
    models: Annotated[tuple[str, ...], Doc("The models it serves, by the names that requests use.")]
    kind: Annotated[
        Kind, Doc("openai: any server with OpenAI's API; splittime: it keeps accounts, which are nested in ours.")
    ] = "openai"
    key_env: Annotated[str | None, Doc("The environment variable that holds its API key.")] = None
    key_file: Annotated[str | None, Doc("The file that holds its API key.")] = None
    max_in_flight: Annotated[int, Doc("Requests that it is given at once, each answer counted; 0: none.", 0, 65536)] = (
        64
    )
    region: Annotated[Name | None, Doc("Where it is; requests go to the nearest region.")] = None
    resume: Annotated[
        bool, Doc("A stream that breaks off goes on at another upstream of its model and kind that has this set too.")
    ] = False
    queue_wait_s: Annotated[
        float | None,
        Doc("The wait in its own queue from which it is given fewer at once; default: it is not adapted.", 0.001, 3600),
    ] = None
    connect_s: Annotated[float, Doc("To find its address and to connect.", 0.001, 3600)] = 1.0
    first_byte_s: Annotated[
        float,
        Doc("From sending a request to a stream's first byte, or to a first look after a whole answer.", 0.001, 86400),
    ] = 60.0
    whole_answer_s: Annotated[
        float | None, Doc("From sending a request to an answer that is no stream; default: total_s.", 0.001, 86400)
    ] = None
    between_s: Annotated[float, Doc("Between two pieces of an answer.", 0.001, 86400)] = 15.0
    total_s: Annotated[float, Doc("For a request, all attempts and waiting included.", 0.001, 86400)] = 600.0

    @property
    def whole_s(self) -> float:
        """Returns how long an answer may take that is no stream."""
        return self.total_s if self.whole_answer_s is None else self.whole_answer_s


class TenantConfig(Strictly, frozen=True, kw_only=True):
    """`[[tenant]]`: the holder of a key. Without any, no key is asked for, and the gateway listens on loopback only."""

    name: Annotated[Name, Doc("Its name in accounts.")]
    key_env: Annotated[str | None, Doc("The environment variable that holds its key.")] = None
    key_file: Annotated[str | None, Doc("The file that holds its key.")] = None
    sha256: Annotated[str | None, Doc("The SHA-256 of its key, in hexadecimal.")] = None
    operator: Annotated[bool, Doc("May ask for everything: metrics, and everybody's accounts.")] = False
    weight: Annotated[float, Doc("Its share of tokens beside the others' weights.", 0.001, 1e6)] = 1.0
    max_open_requests: Annotated[int | None, Doc("Requests that it may have at once, each answer counted.", 1)] = None
    requests_per_minute: Annotated[int | None, Doc("Likewise, that it may send in a minute.", 1)] = None
    tokens_per_minute: Annotated[int | None, Doc("Tokens that it may use in a minute.", 1)] = None
    tokens_per_day: Annotated[int | None, Doc("Tokens in a day (UTC); needs budget_file.", 1)] = None
    tokens_per_month: Annotated[int | None, Doc("Tokens in a month (UTC); needs one of them too.", 1)] = None


class RuleConfig(Strictly, frozen=True, kw_only=True):
    """`[[rule]]`: who gets the requests that it matches. All that it asks for must hold; the first that matches
    decides."""

    name: Annotated[Name, Doc("Its name in accounts and metrics.")]
    models: Annotated[tuple[str, ...], Doc("Matches these names, as asked for; a star at the end is any rest.")] = ()
    headers: Annotated[dict[str, str], Doc('Matches requests with these headers; "*" is any value.')] = {}
    tenants: Annotated[tuple[str, ...], Doc("Matches requests of these tenants.")] = ()
    endpoint: Annotated[Endpoint | None, Doc("Matches requests of this endpoint.")] = None
    min_prompt_tokens: Annotated[int | None, Doc("Matches prompts of as many tokens, as estimated, or more.", 0)] = None
    max_prompt_tokens: Annotated[int | None, Doc("Matches prompts of as many tokens, as estimated, or fewer.", 0)] = (
        None
    )
    model: Annotated[str | None, Doc("The model that they get; its name replaces theirs in the body.")] = None
    upstreams: Annotated[tuple[str, ...], Doc("The upstreams that may have them; default: all of the model.")] = ()


class EscalateConfig(Strictly, frozen=True, kw_only=True):
    """`escalate` of a `[[difficulty]]`: nothing of the small model's answer is given before its first tokens have been
    looked at; where it seems unsure, the large one is asked in its place."""

    below: Annotated[
        float | None, Doc("The mean log-probability below which the large one is asked; or labels.", -100, 0)
    ] = None
    labels: Annotated[str | None, Doc("JSONL file of judged answers, from which below is found for the target.")] = None
    tokens: Annotated[int, Doc("Of how many first tokens; of all of a shorter answer.", 1, 256)] = 16
    at_most: Annotated[float, Doc("Of the latest 100 answers, the share that is asked anew at the most.", 0, 1)] = 0.5


class DifficultyConfig(Strictly, frozen=True, kw_only=True):
    """`[[difficulty]]`: a name for which a small model is asked, and a large one where that seems unsure."""

    model: Annotated[str, Doc("The name that requests use; no upstream has it.")]
    small: Annotated[str, Doc("The small model, of an upstream.")]
    large: Annotated[str, Doc("The large model, of an upstream.")]
    escalate: Annotated[EscalateConfig, Doc("What decides whether the large one is asked.")]
    target: Annotated[float, Doc("With escalate.labels: the worth of answers, its interval's lower end.", 0, 1)] = 0.95


class QueueConfig(Strictly, frozen=True, kw_only=True):
    """`[queue]`: what waits while every upstream of its model is full."""

    max_requests: Annotated[int, Doc("Requests that may wait; one more is refused (429).", 1)] = 1024
    max_tokens: Annotated[int, Doc("Tokens that may wait, prompts and answers as estimated; more is 429.", 1)] = 500_000
    sign_of_life_s: Annotated[
        float | None, Doc("A stream that waits is told so, so often, by a comment; its head goes first.", 0.01, 3600)
    ] = None
    shed_from: Annotated[float, Doc("Of a tenant's part, from which newcomers are refused by chance.", 0, 1)] = 0.5
    max_wait_s: Annotated[
        float, Doc("The longest wait; who would wait longer, or did, is refused (429).", 0.001, 86400)
    ] = 30.0
    assumed_max_tokens: Annotated[int, Doc("The answer's length where a request has no max_tokens.", 1)] = 256


class RetryConfig(Strictly, frozen=True, kw_only=True):
    """`[retries]`: only before an answer's first byte."""

    max_attempts: Annotated[int, Doc("Attempts of one request, the first included.", 1, 10)] = 3
    ratio: Annotated[float, Doc("A tenant's retries of the window, as a share of its requests.", 0, 1)] = 0.1
    spare: Annotated[int, Doc("Retries of the window beyond that share, of each tenant.", 0)] = 1
    window_s: Annotated[float, Doc("The length of the window.", 1, 3600)] = 60.0
    pause_s: Annotated[float, Doc("The longest pause before the second attempt; doubles with each.", 0, 60)] = 0.05


class AffinityConfig(Strictly, frozen=True, kw_only=True):
    """`[affinity]`: a request goes to the upstream that served the longest beginning of its prompt of late, beyond what
    most conversations share, unless that has much more to do than the others."""

    load_cap: Annotated[float, Doc("It may have so many times the tokens of the least loaded one,", 1, 100)] = 1.25
    slack_tokens: Annotated[int, Doc("so many beyond that, and those that it need not compute again.", 0)] = 4096
    max_blocks: Annotated[
        int, Doc("Pieces of 256 bytes that are remembered, of all prompts; 0.3 KB each.", 4096, 2**22)
    ] = 65_536


class BreakerConfig(Strictly, frozen=True, kw_only=True):
    """`[breaker]`: an upstream that fails again and again is left alone for a while."""

    failures: Annotated[int, Doc("Failures in a row that open it; what is the request's own fault is none.", 1)] = 5
    open_s: Annotated[
        float, Doc("How long it stays open, until the gateway asks it whether it lives.", 0.001, 3600)
    ] = 10.0
    max_backoff_s: Annotated[float, Doc("The longest that Retry-After of a 429 is obeyed.", 0.001, 3600)] = 60.0


class CacheConfig(Strictly, frozen=True, kw_only=True):
    """`[cache]`: where answers are kept. Which are, `[[cache_route]]` says; without one, none."""

    file: Annotated[str | None, Doc("SQLite file for answers; default: memory, until the gateway ends.")] = None
    valkey: Annotated[str | None, Doc("redis://HOST:PORT of a Valkey or Redis that several gateways share.")] = None
    max_bytes: Annotated[int, Doc("Answers kept, in memory or in the file; who is used least goes first.", 1)] = 2**28
    max_answer_bytes: Annotated[int, Doc("A longer answer is not kept, nor shared.", 1, 2**26)] = 2**20
    max_questions: Annotated[int, Doc("Questions whose vectors are held in memory.", 1, 10**6)] = 10_000


class CacheRoute(Strictly, frozen=True, kw_only=True):
    """`[[cache_route]]`: a model whose answers are kept, and given again to equal requests of one tenant."""

    model: Annotated[str, Doc("The model, by the name that requests use.")]
    max_age_s: Annotated[int, Doc("An older answer is not given.", 1, 10**8)] = 3600
    sampled: Annotated[bool, Doc("Requests without temperature 0 too: one draw is given again and again.")] = False
    pace: Annotated[float, Doc("A kept stream's gaps: 1 as they came, 0 none at all.", 0, 1)] = 1.0
    semantic: Annotated[bool, Doc("Like questions too; needs embedder and verifier.")] = False
    threshold: Annotated[float, Doc("The least cosine of a like question.", 0.9, 1)] = 0.97
    shadow_share: Annotated[float, Doc("Hits for which the model runs all the same, to compare.", 0, 1)] = 0.05


class EmbedderConfig(Strictly, frozen=True, kw_only=True):
    """`[embedder]`: what makes the vectors of questions, which say what is near."""

    url: Annotated[str, Doc("Base URL of a server with /v1/embeddings.")]
    model: Annotated[str, Doc("The model that it is asked for.")]
    key_env: Annotated[str | None, Doc("The environment variable that holds its API key.")] = None
    key_file: Annotated[str | None, Doc("The file that holds its API key.")] = None
    timeout_s: Annotated[float, Doc("A question without a vector in this time is a miss.", 0.001, 60)] = 0.5


class VerifierConfig(Strictly, frozen=True, kw_only=True):
    """`[verifier]`: which model says whether two near questions have the same answer. It is asked only where an
    upstream has room that nobody waits for, and its tokens are charged to the tenant that asks."""

    model: Annotated[str, Doc("The model, of an upstream: a small one, or the one that is served.")]
    timeout_s: Annotated[float, Doc("A question without a verdict in this time is a miss.", 0.001, 60)] = 1.0
    form: Annotated[bool, Doc("Its answer is held to yes or no by response_format; false: by words alone.")] = True


class DegradationConfig(Strictly, frozen=True, kw_only=True):
    """`[[degradation]]`: a stage of lesser answers, the lightest first; each has one of its last three keys."""

    name: Annotated[Name, Doc("Its name in answers, accounts and metrics.")]
    enter_wait_s: Annotated[float, Doc("It is entered when somebody has waited in the queue for so long.", 0.001, 3600)]
    leave_wait_s: Annotated[float, Doc("It is left when nobody has waited for longer than this, for hold_s.", 0, 3600)]
    hold_s: Annotated[float, Doc("How long the queue must have been calm before it is left.", 0, 3600)] = 5.0
    max_tokens: Annotated[int | None, Doc("Answers have at most so many tokens.", 1)] = None
    model: Annotated[str | None, Doc("Requests go to this model in place of their own.")] = None
    answer: Annotated[str | None, Doc("This text is the answer, and no upstream is asked.")] = None


class CanaryConfig(Strictly, frozen=True, kw_only=True):
    """`[canary]`: what decides on a config that a share of tenants tries (`splittime gateway apply --canary`)."""

    min_requests: Annotated[int, Doc("Requests of each arm at the first look; twice as many at each next.", 10)] = 100
    max_s: Annotated[float, Doc("What is not decided by then is rolled back.", 1, 10**6)] = 3600.0
    margin: Annotated[float, Doc("A difference that does not matter, as of `bench compare`.", 0.001, 0.999)] = 0.1
    confidence: Annotated[float, Doc("That nothing is found where there is nothing.", 0.5, 0.9999)] = 0.95


class AuditConfig(Strictly, frozen=True, kw_only=True):
    """`[audit]`: a file of who asked for what, a line each."""

    file: Annotated[str, Doc("The file; it is gone on with.")]
    prompts: Annotated[bool, Doc("Bodies of requests too, 64 KiB of each.")] = False
    max_queue: Annotated[int, Doc("Records that may wait to be written; more are dropped, and counted.", 1)] = 10_000


class MetricsConfig(Strictly, frozen=True, kw_only=True):
    """`[metrics]`: a key for `/metrics` alone, so that a scraper needs no operator's. It has one of the three."""

    key_env: Annotated[str | None, Doc("The environment variable that holds it.")] = None
    key_file: Annotated[str | None, Doc("The file that holds it.")] = None
    sha256: Annotated[str | None, Doc("Its SHA-256, in hexadecimal.")] = None


class TracingConfig(Strictly, frozen=True, kw_only=True):
    """`[tracing]`: OpenTelemetry spans of each request's stages, to a collector (OTLP over HTTP, JSON)."""

    url: Annotated[str, Doc("Base URL of the collector, as http://127.0.0.1:4318; /v1/traces is added.")]
    key_env: Annotated[str | None, Doc("The environment variable that holds its API key, if it asks for one.")] = None
    key_file: Annotated[str | None, Doc("The file that holds its API key.")] = None
    service_name: Annotated[str, Doc("The name of the gateway in traces.")] = "splittime-gateway"
    share: Annotated[float, Doc("Of the traces, chosen by their ids.", 0, 1)] = 1.0
    max_queue: Annotated[int, Doc("Spans that may wait to be sent; more are dropped, and counted.", 1)] = 20_000


class LintConfig(Strictly, frozen=True, kw_only=True):
    """`[lint]`: what prompts carry for nothing (`splittime gateway lint`). They are looked at and not kept."""

    share: Annotated[float, Doc("Of the requests, by chance, that are looked at.", 0, 1)] = 0.01


class GatewayConfig(Strictly, frozen=True, kw_only=True):
    """The file's own keys and its tables."""

    upstream: tuple[UpstreamConfig, ...]
    tenant: tuple[TenantConfig, ...] = ()
    rule: tuple[RuleConfig, ...] = ()
    difficulty: tuple[DifficultyConfig, ...] = ()
    aliases: Annotated[dict[str, str], Doc("Other names of models; they are replaced in the body.")] = {}
    queue: QueueConfig = QueueConfig()
    retries: RetryConfig = RetryConfig()
    affinity: AffinityConfig | None = None
    breaker: BreakerConfig = BreakerConfig()
    owner: Annotated[str | None, Doc("Who answers for the gateway: a team, an address. For `inventory`.")] = None
    cache: CacheConfig = CacheConfig()
    cache_route: tuple[CacheRoute, ...] = ()
    embedder: EmbedderConfig | None = None
    verifier: VerifierConfig | None = None
    degradation: tuple[DegradationConfig, ...] = ()
    metrics: MetricsConfig | None = None
    tracing: TracingConfig | None = None
    lint: LintConfig | None = None
    canary: CanaryConfig = CanaryConfig()
    audit: AuditConfig | None = None
    region: Annotated[Name | None, Doc("Where it is: of equally near upstreams, those there come first.")] = None
    host: Annotated[str, Doc("Address to bind; any but loopback needs a tenant.")] = "127.0.0.1"
    port: Annotated[int, Doc("TCP port; 0 lets the system choose.", 0, 65535)] = 8100
    shared_port: Annotated[
        int | None, Doc("One more port, at which other gateways of its user listen too (Linux).", 1, 65535)
    ] = None
    allowed_hosts: Annotated[tuple[str, ...], Doc("Names by which requests may call it, as of `serve`.")] = ()
    ssl_certfile: Annotated[str | None, Doc("PEM file of a certificate, to serve HTTPS.")] = None
    ssl_keyfile: Annotated[str | None, Doc("PEM file of its key; default: in ssl_certfile.")] = None
    ledger_file: Annotated[str | None, Doc("SQLite file for all accounts; default: memory only.")] = None
    budget_file: Annotated[str | None, Doc("SQLite file for what budgets have used.")] = None
    max_file_accounts: Annotated[int, Doc("Accounts kept in the ledger file.", 1)] = 100_000
    max_body_bytes: Annotated[int, Doc("A longer request body is refused (413).", 1)] = 4 * 2**20
    max_answer_bytes: Annotated[int, Doc("A longer answer that is no stream is refused (502).", 1)] = 64 * 2**20
    body_timeout_s: Annotated[float, Doc("Seconds for a client to send its body (408).", 0.001)] = 60.0
    slow_reader_s: Annotated[float, Doc("Seconds without progress at which a client is dropped.", 0.001)] = 20.0
    grace_s: Annotated[float, Doc("Seconds that open requests get after SIGTERM.", 0)] = 30.0

    @property
    def send_buffer_bytes(self) -> int:
        return 256 * 1024  # of each connection, as the server's
