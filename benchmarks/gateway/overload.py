"""Ten times more than the upstream can do, from three tenants of weights 1, 2 and 4: who gets what, and who waits.

    python -m benchmarks.gateway.overload [--seconds 60] [--times 10] [--json]
    python -m benchmarks.gateway.overload --small        a trial: 3 s, no figures to be quoted

The upstream is the mock server (`splittime bench mock-server`) in a process of its own, whose rate is known: `SLOTS`
requests at once, a token of each every `--itl` ms. The gateway is `splittime gateway` in another, with a queue of as
many tokens as the upstream makes in `--wait` seconds. The load is an open loop in a third (`overload_client`); the
tenants send equally many requests, of different lengths. Told are, after a warm-up of twice `--wait`:

* share: of the tokens (prompt and answer) of answers that ended in the time, beside the weights
* waited_ms: of admitted requests, the gateway's `admit` (Server-Timing); e2e_ms: from sending to the last byte
* refusal_ms: from sending to the whole refusal, by the client's clock; after_a_wait: the part of the refusals that had
  been in the queue first
* refusals_per_s: under this load; and `flood`, where a closed loop of `FLOOD` requests at once asks for all it can get
* loop: how late the gateway's own event loop was meanwhile, and whose the time was (`watched_gateway`): a refusal that
  waits for a processor that another process has is no fault of the gateway's
* rates: how many refusals a second one process makes with nothing else to do (`refusal_rates`)

Goals: each share within 5 % of its weight's, every p99 of waited_ms below `--wait`, refusal p99 below 5 ms. All
processes share the machine's cores.
"""

import argparse
import json
import subprocess
import sys
from hashlib import sha256
from typing import Any

from benchmarks.gateway.overhead import cpu_s, started
from benchmarks.gateway.refusal_rates import RATES, refusal_rates, show_loop, show_row
from benchmarks.gateway.watched_gateway import watched
from benchmarks.report import file_result

SLOTS, CHUNK = 16, 8
LENGTHS = {"one": (16, 48), "two": (48, 112), "four": (24, 72)}  # of answers
WEIGHTS = {"one": 1.0, "two": 2.0, "four": 4.0}
PROMPT = "one two three four five six seven eight"
PROMPT_TOKENS = 8  # as the mock server counts them
BODY = {"model": "mock", "prompt": PROMPT, "stream_options": {"include_usage": True}}
TENANTS: list[dict[str, Any]] = [
    {
        "name": name,
        "key": f"key-of-{name}",
        "least": least,
        "most": most,
        "prompt_tokens": PROMPT_TOKENS,
        "body": BODY,
    }
    for name, (least, most) in LENGTHS.items()
]
FLOOD = 400
GOALS = {"share": 0.05, "refusal_p99_ms": 5.0}


def config_of(upstream: str, wait_s: float, rate: int) -> str:
    text = f"port = 0\n[queue]\nmax_requests = 100000\nmax_tokens = {int(rate * wait_s)}\n"
    text += f'[[upstream]]\nname = "mock"\nurl = "{upstream}"\nmodels = ["mock"]\nmax_in_flight = {SLOTS}\n'
    text += f'[[tenant]]\nname = "operator"\noperator = true\nsha256 = "{sha256(b"operator").hexdigest()}"\n'
    for tenant in TENANTS:
        name, digest = tenant["name"], sha256(tenant["key"].encode()).hexdigest()
        text += f'[[tenant]]\nname = "{name}"\nsha256 = "{digest}"\nweight = {WEIGHTS[name]}\n'
    return text


def load(url: str, kinds: list[dict[str, Any]], *arguments: object) -> dict[str, Any]:
    """Returns what the load's process tells."""
    command = [sys.executable, "-m", "benchmarks.overload_client", url.rpartition(":")[2]]
    command += ["--kinds", json.dumps(kinds), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def requests_per_s(rate: int) -> float:
    """What an upstream of so many tokens a second can do of the tenants' mixture, if each tenant has its share."""
    mean = {name: sum(span) / 2 for name, span in LENGTHS.items()}
    return rate * sum(WEIGHTS[name] / mean[name] for name in mean) / sum(WEIGHTS.values())


def measure(config: str, seconds: float, per_s: float, wait_s: float) -> dict[str, Any]:
    """Each of the two in a process of its own, so that what it says of its loop is of one load."""
    warm_up_s = 2 * wait_s
    with watched(config) as gateway:
        before_s = cpu_s(gateway.pid)
        timed = ("--seconds", seconds + warm_up_s, "--warm-up", warm_up_s)
        overload = load(gateway.url, TENANTS, "--per-s", per_s, *timed)
        overload["gateway_cores"] = (cpu_s(gateway.pid) - before_s) / (seconds + warm_up_s)
    overload["loop"] = gateway.loop
    print("the flood", file=sys.stderr)
    with watched(config) as gateway:
        flood_s = max(1.0, min(5.0, seconds / 4))
        flood = load(gateway.url, TENANTS, "--in-flight", FLOOD, "--seconds", flood_s, "--warm-up", 0.5)
    flood["loop"] = gateway.loop
    return {"overload": overload, "shares": shares(overload["tokens"]), "flood": flood}


def shares(tokens: dict[str, int]) -> dict[str, dict[str, float]]:
    total, weights = sum(tokens.values()) or 1, sum(WEIGHTS.values())
    found = {}
    for name, weight in WEIGHTS.items():
        share, fair = tokens.get(name, 0) / total, weight / weights
        found[name] = {"share": share, "of_weights": fair, "off": share / fair - 1}
    return found


def show(figures: dict[str, Any], rate: int) -> None:
    overload, flood = figures["overload"], figures["flood"]
    made = f"{overload['output_tokens_per_s']:.0f} of {rate} tokens/s generated"
    lines = [f"{overload['sent_per_s']:.0f} requests/s sent, {made}"]
    for name, share in figures["shares"].items():
        told = overload["kinds"][name]
        waited, e2e = told["waited_ms"], told["e2e_ms"]
        lines.append(
            f"  {name:>5}: {share['share']:.3f} of the tokens, {share['of_weights']:.3f} of the weights"
            f" ({share['off']:+.1%}); waited {waited.get('p50', 0):.0f} ms p50, {waited.get('p99', 0):.0f} p99;"
            f" E2E {e2e.get('p50', 0):.0f}, {e2e.get('p99', 0):.0f}"
        )
    refusal = overload["refusal_ms"]
    lines.append(
        f"refusals: {overload['refusals_per_s']:.0f}/s in {refusal.get('p50', 0):.2f} ms p50,"
        f" {refusal.get('p99', 0):.2f} ms p99; {overload['refusal_after_a_wait']:.1%} of them after a wait;"
        f" the gateway used {overload['gateway_cores']:.2f} cores; {show_loop(overload)}"
    )
    told = f"flood: {flood['refusals_per_s']:.0f} refusals/s beside {flood['output_tokens_per_s']:.0f} tokens/s"
    lines += [
        f"{told}; {show_loop(flood)}",
        "refusals alone, by one process:",
        *map(show_row, figures["rates"]["rows"]),
    ]
    lines.append(
        f"  most within {GOALS['refusal_p99_ms']:g} ms p99: {figures['rates']['most_per_s_within_goal']:.0f}/s"
    )
    print("\n".join(lines), file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--wait", type=float, default=1.0, help="the SLO of admitted requests' waiting, in s")
    parser.add_argument("--itl", type=int, default=5, help="ms between tokens of the upstream: 5 is 3,200 tokens/s")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    seconds, wait_s, itl_ms = (2.0, 0.5, 20) if args.small else (args.seconds, args.wait, args.itl)
    rate = SLOTS * 1000 // itl_ms  # tokens a second
    mock = ("bench", "mock-server", "--port", "0", "--ttft", f"{itl_ms}ms", "--itl", f"{itl_ms}ms")
    with started("url", *mock, "--tokens-per-chunk", str(CHUNK)) as (upstream, _):
        figures = measure(config_of(upstream, wait_s, rate), seconds, args.times * requests_per_s(rate), wait_s)
    print("refusals alone", file=sys.stderr)
    rates, rate_s = (RATES[:1], 1.0) if args.small else (RATES, max(2.0, seconds / 6))
    figures["rates"] = refusal_rates(load, rate_s, GOALS["refusal_p99_ms"], rates)
    settings = {**vars(args), "seconds": seconds, "wait": wait_s, "slots": SLOTS, "itl": itl_ms, "goals": GOALS}
    file_result("gateway_overload", figures, settings, args.json)
    show(figures, rate)
    ends = figures["overload"]
    return int(ends["unanswered"] > 0 or any(status[:3] not in ("200", "429") for status in ends["statuses"]))


if __name__ == "__main__":
    sys.exit(main())
