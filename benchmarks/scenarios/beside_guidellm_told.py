"""What `guidellm` and `splittime bench` told of their rounds in one form, and every figure of both by one function.

Every request, whoever told of it (either tool, or the server's account), becomes one `Timed`. So what differs between
two figures of one name is the tellers' clocks, never the words. `read_guidellm` and `read_splittime` read a round's
files, `figures_of` makes its figures, `medians` and `differences` compare the rounds.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from splittime.bench.book.figures import summary
from splittime.bench.book.records import Ending, Outcome, Run, load_run
from splittime.bench.servers import sent_as
from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_from_json
from splittime.ledger.derive import percentile

AGREED_MS, AGREED_SHARE = 1.0, 0.01


class Timed(NamedTuple):
    """An answered request in ms on its teller's clock. due: when it was meant to be sent; the server cannot know."""

    due: float | None
    sent: float
    first: float
    last: float
    end: float
    tokens: int


FIGURES: dict[str, Callable[[Timed], float]] = {
    "ttft": lambda t: t.first - t.sent,
    "itl": lambda t: (t.last - t.first) / (t.tokens - 1),
    "tpot_of_guidellm": lambda t: (t.last - t.sent) / t.tokens,
    "tpot_of_splittime": lambda t: (t.end - t.first) / (t.tokens - 1),
    "e2e": lambda t: t.end - t.sent,
}


class Told(NamedTuple):
    """One tool's round: its requests and the server's accounts of the same, in the same order; what it published."""

    client: list[Timed]
    server: list[Timed]
    prompt_tokens: float
    tokenize_ms: float
    published: dict[str, float]
    tool_cpu_s: float = 0.0
    server_cpu_s: float = 0.0


def read_guidellm(path: Path) -> Told:
    benchmark = json.loads(path.read_bytes())["benchmarks"][0]
    accounts = _by_group(json.loads(path.with_suffix(".accounts.json").read_bytes()))
    if benchmark["requests"]["errored"]:
        sys.exit(f"guidellm's requests failed: {benchmark['requests']['errored'][0]['error']}")
    requests = [one for one in benchmark["requests"]["successful"] if one["response_id"] in accounts]
    requests.sort(key=lambda one: one["info"]["timings"]["request_start"])
    metrics = benchmark["metrics"]
    published = {f"{name}_mean": metrics[theirs]["successful"]["mean"] for name, theirs in _THEIRS.items()}
    published["e2e_mean"] *= 1e3
    told = _told([_of_guidellm(one) for one in requests], [accounts[one["response_id"]] for one in requests], published)
    return _with_cpu(told, path)


def _with_cpu(told: "Told", path: Path) -> "Told":
    """A round from before CPU seconds were taken has none."""
    taken = path.with_suffix(".cpu.json")
    return told._replace(**json.loads(taken.read_bytes())) if taken.exists() else told


_THEIRS = {
    "ttft": "time_to_first_token_ms",
    "itl": "inter_token_latency_ms",
    "tpot": "time_per_output_token_ms",
    "e2e": "request_latency",
    "tokens_per_s": "output_tokens_per_second",
    "requests_per_s": "requests_per_second",
}


def _by_group(listed: dict[str, Any]) -> dict[str, ClosedAccount]:
    return {entry["group_id"]: account_from_json(entry) for entry in listed["accounts"]}


def _of_guidellm(request: dict[str, Any]) -> Timed:
    timings = request["info"]["timings"]
    names = ("targeted_start", "request_start", "first_token_iteration", "last_token_iteration", "request_end")
    return Timed(*(1e3 * timings[name] for name in names), request["output_tokens"])  # type: ignore[call-arg]


def read_splittime(path: Path) -> Told:
    run = load_run(path)
    accounts = {sent_as(account): account for account in run.arms[0].accounts}
    outcomes = [o for o in run.measured() if o.ending is Ending.COMPLETE and o.request_id in accounts]
    told = _told([_of_outcome(o) for o in outcomes], [accounts[o.request_id] for o in outcomes], _published(run))
    return _with_cpu(told, path)


def _published(run: Run) -> dict[str, float]:
    found = summary(run)
    names = ("service_ttft", "ttft", "tpot", "service_e2e", "e2e")
    means = {f"{name}_mean": found.figures[name].mean.value / 1e6 for name in names}
    rates = {"tokens_per_s": found.output_token_rate.value, "requests_per_s": found.request_rate.value}
    return {**means, **rates, "is_void": found.is_void}


def _of_outcome(outcome: Outcome) -> Timed:
    times = (outcome.intended_ns, outcome.sent_ns, outcome.chunk_ns[0], outcome.chunk_ns[-1], outcome.end_ns)
    return Timed(*(ns / 1e6 for ns in times if ns is not None), outcome.output_tokens)  # type: ignore[call-arg]


def _of_account(account: ClosedAccount) -> Timed:
    times = (account.start_ns, account.token_written_ns[0], account.token_written_ns[-1], account.end_ns)
    return Timed(None, *(ns / 1e6 for ns in times), account.output_tokens)  # type: ignore[call-arg]


def _told(client: list[Timed], accounts: list[ClosedAccount], published: dict[str, float]) -> Told:
    tokenize = [i.end_ns - i.begin_ns for a in accounts for i in a.intervals if i.stage == "tokenize"]
    prompt_tokens = mean(account.prompt_tokens or 0 for account in accounts)
    return Told(client, [_of_account(a) for a in accounts], prompt_tokens, sum(tokenize) / 1e6 / len(client), published)


def figures_of(told: Told) -> dict[str, Any]:
    """Of one round: the tool's and the server's figures by the same functions, and their difference by request."""
    figures: dict[str, Any] = {
        "requests": len(told.client),
        "prompt_tokens_mean": told.prompt_tokens,
        "tokenize_mean_ms": told.tokenize_ms,
        "tool_cpu_ms": 1e3 * told.tool_cpu_s / len(told.client),
        "server_cpu_ms": 1e3 * told.server_cpu_s / len(told.client),
        "sent_late_ms": _spread([t.sent - t.due for t in told.client if t.due is not None]),
        "published": told.published,
        "client": {"tokens_per_s": _tokens_per_s(told.client)},
        "server": {"tokens_per_s": _tokens_per_s(told.server)},
        "outside": {},
    }
    for name, of in FIGURES.items():
        client, server = [of(t) for t in told.client], [of(t) for t in told.server]
        figures["client"][name], figures["server"][name] = _spread(client), _spread(server)
        figures["outside"][name] = _spread([c - s for c, s in zip(client, server, strict=True)])
    return figures


def _tokens_per_s(requests: list[Timed]) -> float:
    span_ms = max(t.end for t in requests) - min(t.sent for t in requests)
    return 1e3 * sum(t.tokens for t in requests) / span_ms


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": mean(values), **{f"p{p}": percentile(values, p) or 0.0 for p in (50, 99)}}


def medians(rounds: list[Any]) -> Any:
    """The same shape, each number as [lowest, median, highest] of the rounds."""
    if isinstance(rounds[0], dict):
        return {name: medians([one[name] for one in rounds]) for name in rounds[0]}
    return [min(rounds), median(rounds), max(rounds)]


def differences(guidellm: Any, splittime: Any) -> dict[str, dict[str, Any]]:
    """Of each figure's mean: guidellm's less splittime's, and how much of that the server says it was itself.

    of_tools is the rest: what the two tools add or leave out; the tools agree if that is at most `AGREED_MS` or
    `AGREED_SHARE`. range: the larger one of the rounds of either tool; beyond it a difference is no accident.
    """
    found = {}
    for figure in FIGURES:
        ours, theirs = (
            {book: told[book][figure]["mean"] for book in ("client", "server", "outside")}
            for told in (splittime, guidellm)
        )
        total, server, outside = (theirs[book][1] - ours[book][1] for book in ("client", "server", "outside"))
        found[figure] = {
            "difference_ms": total,
            "of_server_ms": server,
            "of_tools_ms": outside,
            "range_ms": max(one["client"][2] - one["client"][0] for one in (ours, theirs)),
            "relative": total / ours["client"][1],
            "tools_agree": abs(outside) <= max(AGREED_MS, AGREED_SHARE * theirs["client"][1]),
        }
        found[figure]["verdict"] = verdict(found[figure])
    return found


def verdict(of: dict[str, Any]) -> str:
    """Of a figure's difference: within the noise, or by how much not, and which of the two it is."""
    total_ms, noise_ms = of["difference_ms"], max(of["range_ms"], AGREED_MS)
    if abs(total_ms) <= noise_ms:
        return f"they agree within the noise ({noise_ms:.2f} ms)"
    whose = "guidellm's" if total_ms > 0 else "splittime's"
    by_server = abs(of["of_server_ms"]) >= abs(of["of_tools_ms"])
    who = "the server was slower by its own book" if by_server else "the tool is later than the server's book"
    return f"{whose} is higher by {abs(total_ms):.2f} ms, {abs(total_ms) - noise_ms:.2f} beyond the noise: {who}"
