"""What load to make, as asked: `LoadSpec`, whose fields are the flags of `splittime bench` with underscores.

Three choices do not depend on each other: when (an open loop with arrivals, or a closed loop), what (a workload), and
how clients behave (sessions, hanging up, slow reading). `spec_rules.check` refuses what cannot be, naming value, limit
and the way out; `draw` makes a schedule of what is left. The description of each field is its help, for which this file
is read without numpy.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from splittime.core.errors import ConfigError

Arrivals = Literal["constant", "poisson", "gamma", "trace"]
Workload = Literal["synthetic", "sharegpt", "jsonl", "trace"]
PromptForm = Literal["ids", "text", "chat"]
TimeUnit = Literal["s", "ms", "us", "ns"]

_LENGTH = "N, uniform:LOW:HIGH or lognormal:MEAN:CV"


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides a schedule, but for the server's vocabulary and limits, and the run's salt."""

    rate: Annotated[float | None, Meta(description="Requests a second; sessions, where these have turns.")] = None
    rate_end: Annotated[float | None, Meta(description="A ramp: the rate grows linearly from --rate to this.")] = None
    ramp_s: Annotated[float | None, Meta(description="How long the ramp takes; default: the duration.")] = None
    arrivals: Annotated[
        Arrivals | None, Meta(description="Default: poisson; the trace's own with --trace and no rate.")
    ] = None
    cv: Annotated[float | None, Meta(description="Coefficient of variation of gamma gaps; 1 is Poisson.")] = None
    concurrency: Annotated[int | None, Meta(description="Closed loop: so many workers, no rate.")] = None
    num_requests: Annotated[int | None, Meta(description="Measured requests.")] = None
    duration_s: Annotated[
        float | None, Meta(description="Measured window, in which requests start; default: 60, or the whole trace.")
    ] = None
    warm_up_s: Annotated[float, Meta(description="Load before the window, not counted; no pause between.")] = 0.0
    warm_up_requests: Annotated[int, Meta(description="The same by number.")] = 0
    cool_down_s: Annotated[float, Meta(description="Load after the window, not counted.")] = 0.0
    cool_down_requests: Annotated[int, Meta(description="The same by number, in a closed loop.")] = 0
    seed: Annotated[int, Meta(description="Of all that is drawn.")] = 0

    workload: Annotated[Workload | None, Meta(description="Default: by the file that is given, else synthetic.")] = None
    dataset: Annotated[str | None, Meta(description="File of conversations (.json) or of requests (.jsonl).")] = None
    prompt_form: Annotated[
        PromptForm | None, Meta(description="Default: ids where lengths are exact, else what the file holds.")
    ] = None
    input_tokens: Annotated[
        str | None, Meta(description=f"Prompt lengths: {_LENGTH}. Default: 512, or the ledger's.")
    ] = None
    output_tokens: Annotated[
        str | None, Meta(description=f"Output lengths: {_LENGTH}. Default: 128, or the file's or ledger's.")
    ] = None
    lengths_file: Annotated[str | None, Meta(description="Draw both lengths from this file's rows.")] = None
    length_scale: Annotated[float, Meta(description="Times every length of a trace or lengths file.")] = 1.0
    exact_output: Annotated[
        bool | None, Meta(description="Ask for exactly so many tokens; default: unless prompts come from a dataset.")
    ] = None
    prefix_share: Annotated[float, Meta(description="Share of each prompt that its group has in common.")] = 0.0
    prefix_groups: Annotated[int, Meta(description="Number of such groups.")] = 1
    reuse_prompts: Annotated[bool, Meta(description="No salt: a repeated run may hit the prefix cache.")] = False

    trace: Annotated[str | None, Meta(description="CSV or JSONL of arrivals and lengths, .gz or plain.")] = None
    speed_up: Annotated[float, Meta(description="Replay the trace's times so much faster.")] = 1.0
    time_column: Annotated[str | None, Meta(description="Of a CSV with other names.")] = None
    time_unit: Annotated[TimeUnit, Meta(description="Of that column, if it holds numbers.")] = "s"
    input_column: Annotated[str | None, Meta(description="Of a CSV with other names.")] = None
    output_column: Annotated[str | None, Meta(description="Of a CSV with other names.")] = None

    turns: Annotated[str, Meta(description=f"Turns of a session: {_LENGTH}.")] = "1"
    turn_input_tokens: Annotated[
        str | None, Meta(description="What each later turn adds; default: as --input-tokens.")
    ] = None
    think_s: Annotated[str, Meta(description="Between an answer and the next turn; also exponential:MEAN.")] = "0"
    expected_ttft_ms: Annotated[float, Meta(description="With the next: when a turn should have ended.")] = 200.0
    expected_tpot_ms: Annotated[float, Meta(description="A later turn's intended start counts from then.")] = 20.0

    cancel_probability: Annotated[float, Meta(description="Share of requests hung up on.")] = 0.0
    cancel_after_s: Annotated[str, Meta(description="How long after sending; also exponential:MEAN.")] = "exponential:1"
    slow_reader_share: Annotated[float, Meta(description="Share of clients that read slowly.")] = 0.0
    slow_reader_delay_ms: Annotated[float, Meta(description="What those wait before reading each chunk.")] = 50.0

    @property
    def is_closed(self) -> bool:
        return self.concurrency is not None

    @property
    def arrival_kind(self) -> Arrivals:
        if self.arrivals is not None:
            return self.arrivals
        return "trace" if self.trace and self.rate is None else "poisson"

    @property
    def workload_kind(self) -> Workload:
        if self.workload is not None:
            return self.workload
        if self.dataset is not None:
            return "jsonl" if ".jsonl" in Path(self.dataset).suffixes else "sharegpt"
        return "trace" if self.trace else "synthetic"

    @property
    def has_sessions(self) -> bool:
        return self.turns != "1"


def spec_of(load: dict[str, Any]) -> LoadSpec:
    """Returns the spec with these fields. Raises `ConfigError` for a value of the wrong type."""
    try:
        return msgspec.convert(load, LoadSpec)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].rstrip("`")
        raise ConfigError(f"--{name.replace('_', '-')}: {error}", param=name, value=load.get(name)) from error


def choices_of(name: str) -> tuple[str, ...]:
    """The words that a field may be; empty if it is no list of words."""
    hint = get_type_hints(LoadSpec)[name]
    return tuple(word for part in (hint, *get_args(hint)) if get_origin(part) is Literal for word in get_args(part))
