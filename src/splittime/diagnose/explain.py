"""One request's life as text: where each millisecond went, and why. Reads a closed account and the server's books.

    explain(account, books)     a waterfall, one line for each (stage, cause), then what its tokens had to wait for
    bar(account)                the same in one line

Plain text first: it fits 80 columns and says the same without colour. A line's marks stand where in the request's time
the stage was: `#` for most of that column's time, `.` for some of it.

The waterfall is the account, but for what kept the engine's thread from running: that is a line of its own, here as
in all that is told below (`attribution`), so that a name has one figure.

`compare` says why this request was slow: against the usual request of its prompt-length bucket, and who caused the
difference. What is usual is the median of the others, stage by stage and cause by cause, one that did not occur
counting as 0. What kept the engine's thread from running counts by itself, not to the stage it fell into
(`attribution`). (Medians of stages need not sum to the median of the whole.) The three largest differences are told,
longest first, each with the requests that had what it waited for meanwhile (`bill`).

Longer answers take longer: what more tokens account for is told apart from what each token took more.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from rich.text import Text

from splittime.diagnose.attribution import (
    BY_DEPRIVED,
    DEPRIVED,
    Told,
    cut,
    meaning,
    owned,
    owners_between,
    stages_and_stops,
    told_as,
)
from splittime.diagnose.bill import BY_TOKENS, HELD, Charge, bill, billed_to
from splittime.diagnose.books import NO_BOOKS, Books
from splittime.diagnose.explain_trace import attempt_lines, in_ms, wrapped
from splittime.diagnose.known_prompts import computed_again
from splittime.diagnose.rules.evidence import is_whole, median, ms
from splittime.diagnose.timeline import Part, timeline
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import CAUSE_MEANING, Cause, Stage
from splittime.ledger.steps import StepRecord, device_time, sentence

TIMELINE_COLUMNS = 32
BAR_COLUMNS = 60
LEGEND_PER_LINE = 3
MAX_NEIGHBOURS = 5
MAX_BILLED = 3
MIN_TOLD = 0.01  # of the time that is divided among owners
COMPUTED = (Stage.PREFILL, Stage.DECODE, Stage.RECOMPUTE)  # as owners they have the forward pass of their steps alone
_LOOKS: dict[Stage, tuple[str, str]] = {  # of each stage its letter in a bar, and its colour
    Stage.RECEIVE: ("r", "cyan"),
    Stage.TOKENIZE_QUEUE: ("w", "red"),
    Stage.TOKENIZE: ("t", "cyan"),
    Stage.ADMIT: ("a", "cyan"),
    Stage.ROUTE: ("o", "cyan"),
    Stage.CACHE: ("C", "green"),
    Stage.UPSTREAM: ("U", "green"),
    Stage.NETWORK: ("N", "magenta"),
    Stage.HANDOFF: ("h", "cyan"),
    Stage.QUEUE: ("q", "red"),
    Stage.PREFILL: ("P", "blue"),
    Stage.PREFILL_STALL: ("p", "red"),
    Stage.DECODE: ("D", "green"),
    Stage.DECODE_STALL: ("d", "red"),
    Stage.PREEMPTED: ("x", "red"),
    Stage.RECOMPUTE: ("R", "magenta"),
    Stage.DELIVER: ("v", "yellow"),
    Stage.CLIENT_WAIT: ("c", "yellow"),
    Stage.UNATTRIBUTED: ("?", "bold red"),
}
WHY_AGAIN = {
    "cache_off": "The prefix cache is off.",
    "within_a_block": "They fill no whole block, and only whole blocks are found again.",
    "between_checkpoints": "The model keeps a state, and prompts go on only from its copies, every 64 tokens or so.",
    "not_kept": "The prefix cache had them no longer.",
    "not_given": "The prefix cache did not give them.",
    "salted_apart": "They were under another cache_salt, or another key: what is cached is apart.",
    "differs": "They stand behind the first difference, within prompt tokens {from_token} to {until_token}.",
    "lacks": "Before them {lacks} tokens of that prompt are gone, within prompt tokens {from_token} to {until_token}.",
}
LETTERS = {stage: letter for stage, (letter, _) in _LOOKS.items()}
STYLES: dict[str, str] = {stage: style for stage, (_, style) in _LOOKS.items()}
_NO_CAUSE: dict[str, str] = {Stage.QUEUE: " No cause: no step ran as it came, and the next one took it."}
WAITS = (Stage.TOKENIZE_QUEUE, *HELD, Stage.CLIENT_WAIT, Stage.UNATTRIBUTED)


def explain(account: ClosedAccount, books: Books = NO_BOOKS) -> Text:
    """The whole story of one request. books: of its server."""
    totals_ns = next(stages_and_stops(books, [account]))
    text, covered = _heading(account), _covered(account, books)
    for told, total_ns in sorted(totals_ns.items(), key=lambda each: each[0][0] in DEPRIVED):
        text.append_text(_stage_line(account, told, total_ns, covered[told]))
    text.append(f"{'sum':<29}{'':{TIMELINE_COLUMNS + 2}}{in_ms(sum(totals_ns.values())):>10}  100.0\n")
    text.append_text(_waits(totals_ns))
    text.append(
        "".join(wrapped(line) for line in (*_billed(account, books), *_again(account, books), *attempt_lines(account)))
    )
    in_its_time = steps_of(account, books.steps)
    if in_its_time:
        text.append(wrapped(owners_sentence("By whose doing", books, account, account.start_ns, account.end_ns)))
    text.append_text(_tokens(account, in_its_time, books))
    text.append(_copies(account, in_its_time))
    device = device_time(in_its_time)
    return text if device is None else text.append(wrapped(sentence(device)))


def steps_of(account: ClosedAccount, steps: Sequence[StepRecord]) -> list[StepRecord]:
    """The steps that ran in the account's time."""
    return [step for step in steps if step.end_ns > account.start_ns and step.begin_ns < account.end_ns]


def bar(account: ClosedAccount) -> Text:
    """The account as one stacked bar, a letter for each stage, and a legend with milliseconds."""
    by_stage = {stage: ns for stage, ns in derive.stage_ns(account).items() if ns > 0}
    cells = derive.apportion(BAR_COLUMNS, {stage.value: ns for stage, ns in by_stage.items()})
    text = Text("|")
    for stage in by_stage:
        text.append(LETTERS[stage] * cells[stage.value], style=STYLES[stage])
    text.append(f"| {in_ms(derive.e2e_ns(account))} ms")
    for i, (stage, duration_ns) in enumerate(by_stage.items()):
        text.append("  " if i % LEGEND_PER_LINE else "\n")
        text.append(f"{LETTERS[stage]} ", style=STYLES[stage])
        text.append(f"{f'{stage.value} {in_ms(duration_ns)}':<23}")
    return text


def _heading(account: ClosedAccount) -> Text:
    text = Text()
    text.append(account.request_id, style="bold")
    text.append(f"  {account.endpoint}  {account.model}  {account.finish_reason}\n")
    in_host = f", {account.host_tokens} of them in host memory" if account.host_tokens else ""
    if account.ahead_tokens:
        in_host += f", {account.ahead_tokens} of them computed ahead in {account.ahead_ns / 1e6:.1f} ms"
    cached = f" ({account.cached_tokens} cached{in_host})" if account.cached_tokens else ""
    preempted = f", {many(account.num_preemptions, 'preemption')}" if account.num_preemptions else ""
    asked, answered = many(account.prompt_tokens, "prompt token"), many(account.output_tokens, "output token")
    tokens = f"{asked}{cached}, {answered}{_reasoned(account)}{preempted}"
    text.append(wrapped(f"{tokens}, {in_ms(derive.e2e_ns(account))} ms from first byte to last"))
    if account.error is not None:
        text.append(wrapped(account.error.message), style="red")
    return text.append(f"\n{'stage: cause':<29}{'from 0 to end':<{TIMELINE_COLUMNS + 2}}{'ms':>10}{'%':>7}\n", "dim")


def _reasoned(account: ClosedAccount) -> str:
    most = account.most_reasoning_tokens
    bound = "" if most is None else f", bounded to {most} between its marks"
    return f" ({account.reasoning_tokens} of reasoning{bound})" if account.reasoning_tokens else ""


def _stage_line(account: ClosedAccount, told: Told, total_ns: int, covered: Sequence[float]) -> Text:
    name = _name(told)
    percent = 100 * total_ns / max(1, derive.e2e_ns(account))
    text = Text(f"{name:<29}|")
    marks = "".join("#" if share >= 0.5 else "." if share > 0 else " " for share in covered)
    text.append(marks, style=STYLES.get(told[0], "red"))
    room = 10 - max(0, len(name) - 29)  # a long name moves its bar, not the figures
    return text.append(f"|{in_ms(total_ns):>{room}}{percent:>7.1f}\n")


def _name(told: Told) -> str:
    return str(told[0]) if told[1] is None else f"{told[0]}: {told[1]}"


def _covered(account: ClosedAccount, books: Books) -> dict[Told, list[float]]:
    """Returns, by what is told in a line, its share of each column of time."""
    wall_ns = max(1, derive.e2e_ns(account))
    edges = [account.start_ns + wall_ns * column // TIMELINE_COLUMNS for column in range(TIMELINE_COLUMNS)]
    columns = msgspec.structs.replace(account, intervals=tuple(cut(account.intervals, *edges)))
    found: dict[Told, list[float]] = defaultdict(lambda: [0.0] * TIMELINE_COLUMNS)
    for piece in next(owned(books, [columns])):
        column = bisect_right(edges, piece[0].begin_ns) - 1
        found[told_as(piece)][column] += piece[2] * TIMELINE_COLUMNS / wall_ns
    return found


def _waits(totals_ns: Mapping[Told, int]) -> Text:
    """A sentence for each kind of wait, the longest first."""
    waits = [(ns, told) for told, ns in totals_ns.items() if told[0] in (*WAITS, *DEPRIVED) and ns > 0]
    text = Text("\n" if waits else "")
    for duration_ns, (stage, cause) in sorted(waits, key=lambda wait: -wait[0]):
        name = _name((stage, cause))
        why = f"{meaning(cause or stage).rstrip('.')}." + (_NO_CAUSE.get(stage, "") if cause is None else "")
        line = Text(wrapped(f"{name} {in_ms(duration_ns)} ms: {why}"))
        line.stylize(STYLES.get(stage, "red"), 0, len(name))
        text.append_text(line)
    return text


def _billed(account: ClosedAccount, books: Books) -> Iterator[str]:
    """Yields a sentence for whom it waited for, and one for who waited for it."""
    for said, charges in (
        ("It waited {} for other requests: {}.", bill(account, books)),
        ("Other requests waited {} for it: {}.", billed_to(account, books)),
    ):
        sums_ns, why = Counter[str](), dict[str, str]()
        for charge in charges:
            if charge.request_id:
                sums_ns[charge.request_id] += charge.ns
                why.setdefault(charge.request_id, charge.why)  # the longest
        longest = [f"{name} {in_ms(ns)} ms ({why[name]})" for name, ns in sums_ns.most_common(MAX_BILLED)]
        more = [f"{len(sums_ns) - MAX_BILLED} more"] if len(sums_ns) > MAX_BILLED else []
        if sums_ns:
            yield said.format(f"{in_ms(sums_ns.total())} ms", ", ".join(longest + more))


def _again(account: ClosedAccount, books: Books) -> Iterator[str]:
    """Yields a sentence for what of its prompt an earlier request had, and was computed all the same."""
    for again in computed_again(account, books):
        why = WHY_AGAIN[again.why].format(**msgspec.to_builtins(again))
        had = f"prompt tokens that {again.earlier or 'an earlier request'} had were computed again"
        yield f"{again.tokens} {had}, in {in_ms(again.took_ns)} ms. {why}"


def owners_sentence(of: str, books: Books, account: ClosedAccount, begin_ns: int, end_ns: int) -> str:
    """Returns whose this part of the request's time was, the longest first, as the doctor counts; small ones as one."""
    found = owners_between(books, account, begin_ns, end_ns)
    large = {owner: ns for owner, ns in found.items() if ns >= MIN_TOLD * (end_ns - begin_ns)}
    told = [f"{ns / 1e6:.3f} ms {owner}{' (forward pass)' * (owner in COMPUTED)}" for owner, ns in large.items()]
    rest_ns = sum(found.values()) - sum(large.values())
    told += [f"{rest_ns / 1e6:.3f} ms {many(len(found) - len(large), 'other')}"] if rest_ns >= 500 else []
    return f"{of}: {'; '.join(told)}."


def _tokens(account: ClosedAccount, steps: Sequence[StepRecord], books: Books) -> Text:
    ttft_ns, tpot_ns, stall = derive.ttft_ns(account), derive.tpot_ns(account), derive.max_stall(account)
    if ttft_ns is None:
        passed_on = "A gateway passes on pieces, and knows no token's time." if account.attempts else ""
        return Text(f"\n{passed_on or 'No token was written.'}\n")
    at_once = f" (all at once: the first was ready after {in_ms(derive.first_ready_ns(account) or ttft_ns)} ms)"
    told = f"TTFT {in_ms(ttft_ns)} ms{at_once if tpot_ns is None else f', TPOT {in_ms(tpot_ns)} ms'}"
    if stall is None:
        return Text("\n" + wrapped(told))
    gaps = derive.percentiles(derive.itl_ns(account), (50, 99))
    text = Text("\n" + wrapped(f"{told}, ITL p50 {in_ms(gaps['p50'])} p99 {in_ms(gaps['p99'])} ms"))
    text.append(f"Longest gap {in_ms(stall.duration_ns)} ms, before token {stall.token_index}, ")
    text.append(f"which step {stall.step_id} made.\n")
    return text.append_text(_steps_of_stall(account, stall, steps, books))


def _steps_of_stall(account: ClosedAccount, stall: derive.Stall, steps: Sequence[StepRecord], books: Books) -> Text:
    """The steps that ran during the longest gap, and who else was in them."""
    before_id = account.token_steps[stall.token_index - 1]
    during = [step for step in steps if before_id < step.step_id <= stall.step_id]
    if not during:
        return Text("The records of its steps are no longer kept.\n")
    longest = max(during, key=lambda step: step.end_ns - step.begin_ns)
    others = [row for row in longest.rows if row[0] != account.request_id]
    took = f"{in_ms(longest.end_ns - longest.begin_ns)} ms ({_device(longest, books)}{_how(longest)})"
    held = f"{longest.prefill_tokens} prefill and {many(longest.decode_tokens, 'decode token')}"
    ran = f"{many(len(during), 'step')} ran meanwhile"
    text = Text(wrapped(f"{ran}, the longest was step {longest.step_id}: {took}, {held}."))
    begin_ns, end_ns = account.token_ready_ns[stall.token_index - 1 : stall.token_index + 1]
    text.append(wrapped(owners_sentence("Of the gap", books, account, begin_ns, end_ns)))
    for request_id, start, num_tokens in sorted(others, key=lambda row: -row[2])[:MAX_NEIGHBOURS]:
        text.append(f"  with it: {request_id}, {num_tokens} at position {start}\n")
    if len(others) > MAX_NEIGHBOURS:
        text.append(f"  and {len(others) - MAX_NEIGHBOURS} more\n")
    return text


def _device(step: StepRecord, books: Books) -> str:
    """Returns the device's part of a step, without what kept the engine's thread from running, which follows it."""
    at = bisect_left(books.steps, step.begin_ns, key=lambda one: one.begin_ns)
    length_ns = step.end_ns - step.begin_ns  # of which the line is; its parts have the gap before it too
    parts = timeline(books).by_step[at] * (length_ns / max(1, length_ns + step.host_gap_ns))
    device_ns = round(parts[Part.DEVICE] + parts[Part.PROMPTS] + parts[Part.RANKS])
    kept = {owner: round(parts[part]) for part, owner in BY_DEPRIVED.items() if parts[part] >= 0.5}
    return ", ".join([f"device {in_ms(device_ns)}", *(f"{owner} {in_ms(ns)}" for owner, ns in kept.items())])


def _how(step: StepRecord) -> str:
    """Time between ranks; the step's execution on a device apart, and how long that had waited for it."""
    shared = f", {in_ms(step.collective_ns)} between ranks" if step.collective_ns else ""
    padded = f" with {step.padded_rows} rows padded" if step.padded_rows else ""
    waited = f", {in_ms(step.gap_ns)} waited before" if step.gap_ns else ""
    return shared if step.execution == "host" else f"{shared}, {step.execution}{padded}{waited}"


def _copies(account: ClosedAccount, steps: Sequence[StepRecord]) -> str:
    """What its steps copied between the device and host memory, for itself or for those beside it."""
    own = [step for step in steps if step.moves_ns and any(row[0] == account.request_id for row in step.rows)]
    told = (
        (sum(step.restored_blocks for step in own), "from", sum(step.restore_ns for step in own)),
        (sum(step.offloaded_blocks for step in own), "to", sum(step.offload_ns for step in own)),
    )
    parts = [f"{many(blocks, 'block')} {way} host memory in {in_ms(ns)} ms" for blocks, way, ns in told if blocks]
    return wrapped(f"Its steps copied {' and '.join(parts)}.") if parts else ""


def many(number: int, thing: str) -> str:
    """Returns a number with what it counts."""
    return f"{number} {thing}{'s' * (number != 1)}"


MIN_OTHERS = 8  # of one bucket: a median of fewer is anybody's
MOST = 3
MAX_BLAMED = 3
WORTH_TELLING_NS = 1_000_000


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """stage: or what kept the engine's thread from running, as `engine_stopped`. blamed: who had what it waited for
    there, and for how long (`bill`); the longest of them."""

    stage: str
    cause: Cause | None
    own_ns: int
    usual_ns: float
    blamed: tuple[Charge, ...]
    sentence: str


class MedianComparison(msgspec.Struct, frozen=True, kw_only=True):
    """thin: why nothing can be said; then there are no differences."""

    request_id: str
    bucket: str
    num_others: int
    own_ns: int
    usual_ns: float | None
    differences: tuple[Difference, ...]
    thin: str | None = None


def compare(account: ClosedAccount, books: Books) -> MedianComparison:
    """books: of its server. Its accounts may hold this one and those of other buckets; they are left out."""
    bucket = derive.prompt_bucket(account.prompt_tokens)
    others = [a for a in books.accounts if a.request_id != account.request_id and is_whole(a)]
    others = [a for a in others if derive.prompt_bucket(a.prompt_tokens) == bucket]
    enough = len(others) >= MIN_OTHERS
    thin = None if enough else f"only {many(len(others), 'other')} of {bucket} prompt tokens; it takes {MIN_OTHERS}"
    return MedianComparison(
        request_id=account.request_id,
        bucket=bucket,
        num_others=len(others),
        own_ns=derive.e2e_ns(account),
        usual_ns=median(derive.e2e_ns(other) for other in others) if enough else None,
        differences=_differences(account, others, books) if enough else (),
        thin=thin,
    )


def _differences(account: ClosedAccount, others: Sequence[ClosedAccount], books: Books) -> tuple[Difference, ...]:
    own, *theirs = stages_and_stops(books, [account, *others])
    usual = {key: median(totals.get(key, 0) for totals in theirs) or 0 for key in own}
    largest = sorted(own, key=lambda key: usual[key] - own[key])[:MOST]
    told = [key for key in largest if own[key] - usual[key] >= WORTH_TELLING_NS]
    return tuple(_difference(account, others, books, key, own[key], usual[key]) for key in told)


def _difference(
    account: ClosedAccount, others: Sequence[ClosedAccount], books: Books, key: Told, own_ns: int, usual_ns: float
) -> Difference:
    named = [charge for charge in bill(account, books, key) if charge.request_id and charge.ns >= WORTH_TELLING_NS]
    blamed = tuple(named[:MAX_BLAMED])
    stage, cause = key
    extra = f"{_shown(own_ns - usual_ns)} longer in {stage}"
    extra += f" ({cause})" if cause is not None else ""
    why = _why(account, others, key, blamed)
    sentence = f"{extra} than usual ({_shown(own_ns)} against {_shown(usual_ns)})"
    sentence += f": {why}." if why else "."
    return Difference(stage=stage, cause=cause, own_ns=own_ns, usual_ns=usual_ns, blamed=blamed, sentence=sentence)


def _why(account: ClosedAccount, others: Sequence[ClosedAccount], key: Told, blamed: Sequence[Charge]) -> str:
    stage, cause = key
    if stage in DEPRIVED:
        return meaning(stage)
    if stage is Stage.DECODE:
        return _and(_longer_answer(account, others), _shared_with(blamed))
    if stage is Stage.PREFILL:
        return _and(_less_cached(account, others), _shared_with(blamed))
    if stage in (Stage.TOKENIZE_QUEUE, *HELD) and cause is not None:
        return _and(CAUSE_MEANING[cause], _who_had_it(cause, blamed))
    return _shared_with(blamed) if stage is Stage.RECOMPUTE else ""


def _and(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _longer_answer(account: ClosedAccount, others: Sequence[ClosedAccount]) -> str:
    usual = median(other.output_tokens for other in others) or 0
    usual_tpot = median(tpot for other in others if (tpot := derive.tpot_ns(other)) is not None)
    more = account.output_tokens - usual
    own_tpot = derive.tpot_ns(account)
    if usual_tpot is None or own_tpot is None:
        return ""
    parts = [f"{more:.0f} more tokens of output account for {_shown(more * usual_tpot)}"] if more > 0 else []
    if own_tpot > usual_tpot:
        parts.append(f"each token took {_shown(own_tpot)} against {_shown(usual_tpot)}")
    return ", ".join(parts)


def _less_cached(account: ClosedAccount, others: Sequence[ClosedAccount]) -> str:
    computed = account.prompt_tokens - account.cached_tokens
    usual = median(other.prompt_tokens - other.cached_tokens for other in others) or 0
    if computed <= usual:
        return ""
    return f"{computed} prompt tokens to compute against {usual:.0f}, {account.cached_tokens} came from the cache"


def _who_had_it(cause: Cause, blamed: Sequence[Charge]) -> str:
    went = "the steps' tokens went to" if cause in BY_TOKENS else "what it waited for was held by"
    return f"{went} {_listed(blamed)}" if blamed else ""


def _shared_with(blamed: Sequence[Charge]) -> str:
    return f"its steps also computed prompts of {_listed(blamed)}" if blamed else ""


def _listed(blamed: Sequence[Charge]) -> str:
    *words, last = [f"{charge.request_id} (for {_shown(charge.ns)})" for charge in blamed]
    return f"{', '.join(words)} and {last}" if words else last


def comparison_text(comparison: MedianComparison) -> Text:
    """For people, in 80 columns."""
    if comparison.thin is not None:
        return Text(wrapped(f"Not compared: {comparison.thin}."))
    assert comparison.usual_ns is not None
    heading = f"Against the median of {comparison.num_others} others with {comparison.bucket} prompt tokens: "
    heading += f"{_shown(comparison.own_ns)} against {_shown(comparison.usual_ns)}."
    text = Text(wrapped(heading), style="bold")
    for difference in comparison.differences:
        text.append(wrapped("- " + difference.sentence), style="not bold")
    if not comparison.differences:
        text.append("Nothing took a millisecond longer than usual.\n", style="not bold")
    return text


def _shown(duration_ns: float) -> str:
    return f"{ms(duration_ns):,.1f} ms" if abs(duration_ns) < 1e10 else f"{duration_ns / 1e9:,.1f} s"
