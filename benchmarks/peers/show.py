"""Results of `run.py` and `http_load.py`: python -m benchmarks.peers.show --model llama-1b [--markdown]

Every kind of processor that was ever measured, each with its dates, the last measured last: tables, and a picture,
docs/cpu_peers_MODEL_PROCESSOR.png: tokens/s against the batch in each precision class filed, with the quartiles of each
contender and the roofline of the same minutes. Figures of one kind say nothing about another.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from benchmarks.peers.contenders import CLASSES, OURS
from benchmarks.report import RESULTS, processor

DOCS = Path(__file__).parents[2] / "docs"
COLOURS = {"splittime": "#b33c2e", "llama.cpp": "#2b5c94", "openvino": "#2f7f79", "vllm": "#8c4a6b"}
STYLES = ("-", "--", ":")
TROUBLES = {"absent": "absent", "left_out": "left out", "failed_runs": "failed runs"}
COMPARED = ("output_tokens_per_s", "ttft_p99_ms", "max_stall_ms")  # over HTTP, with the best peer in each


def wide() -> Console:
    """To standard output, at least 150 columns where that is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=max(150, console.width))


def filed(model: str, start: str = "peers") -> dict[str, list[dict[str, Any]]]:
    """Results by kind of processor, the last measured last; of each, one a class."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for precision in CLASSES:
        for path in sorted(RESULTS.glob(f"{start}_{model}_{precision}_*.json")):
            result = json.loads(path.read_text())
            kinds.setdefault(processor(result["conditions"]), []).append(result)
    return dict(sorted(kinds.items(), key=lambda item: max(dates(item[1]))))


def dates(results: list[dict[str, Any]]) -> list[str]:
    """The days on which cells were measured, in order."""
    found = [result["conditions"]["date"] for result in results]
    for result in results:
        found += [
            cell["measured"]["date"] for cell in result["figures"].get("cells", {}).values() if "measured" in cell
        ]
    return sorted(date[:10] for date in found)


def heading(results: list[dict[str, Any]]) -> str:
    """Says which kind of processor the results are of, and when they were measured."""
    conditions, when = results[-1]["conditions"], dates(results)
    span = when[0] if when[0] == when[-1] else f"{when[0]} to {when[-1]}"
    return f"{conditions['cpu']}, {conditions['cores']} cores ({', '.join(conditions['flags'])}), measured {span}"


def table(figures: dict[str, Any]) -> Group:
    """Tokens/s (quartiles) by cell and contender; ours over the best peer; shares of the roofline and its two parts."""
    names = [name for name, about in figures["contenders"].items() if "absent" not in about]
    shown = Table(title=f"{figures['model']}, {figures['precision']}: % of roofline, tokens/s: median (quartiles)")
    for column in ("cell", *names, "roofline", f"ours: % of {_bounds_told(figures)}", "ours / best peer"):
        shown.add_column(column, justify="left" if column == "cell" else "right")
    for name, cell in figures["cells"].items():
        top = cell["roofline_tokens_per_s"]
        rates = [_rate(cell, one) for one in names]
        shown.add_row(name, *rates, f"{top:,.0f}" if top else "-", _of_bounds(cell), _ratio(cell))
    said = [f"{kind}: {mean:.2f}" for kind, mean in geometric_means(figures["cells"]).items()]
    told = [f"ours / best peer, geometric means: {', '.join(said)}"] if said else []
    told += [f"failed: {where}: {error}" for where, error in figures["errors"].items()]
    return Group(shown, *(Text(note) for note in told + notes(figures["contenders"])))


def notes(contenders: dict[str, Any]) -> list[str]:
    """Who was left out, or ran otherwise than by default, and why."""
    found = []
    for name, about in contenders.items():
        if "runs" in about:
            because = "; ".join(f"{way}: {why}" for way, why in about["because"].items())
            found.append(f"{name} runs {about['runs']}, because {because[-500:]}")
        found += [f"{word}: {name}: {str(about[key])[-500:]}" for key, word in TROUBLES.items() if key in about]
    return found


def geometric_means(cells: dict[str, Any]) -> dict[str, float]:
    """Means of the ratios to the best peer: by kind of cell, and of all."""
    ratios: dict[str, list[float]] = {"decode": [], "prefill": [], "all": []}
    for name, cell in cells.items():
        if cell.get("ours_over_best_peer"):
            for kind in (name.split(":")[0], "all"):
                ratios[kind].append(cell["ours_over_best_peer"]["median"])
    return {kind: math.exp(sum(map(math.log, each)) / len(each)) for kind, each in ratios.items() if each}


def _bounds_told(figures: dict[str, Any]) -> str:
    has_held = any("held" in cell.get("share_of_bounds", {}) for cell in figures["cells"].values())
    return "bandwidth / arithmetic" + (" / held" if has_held else "")


def _of_bounds(cell: dict[str, Any]) -> str:
    shares = cell.get("share_of_bounds", {})
    told = ("bandwidth", "arithmetic", *(("held",) if "held" in shares else ()))
    of = (shares.get(bound, {}).get(OURS) for bound in told)
    return " / ".join("-" if share is None else f"{share:.0%}" for share in of)


def _rate(cell: dict[str, Any], name: str) -> str:
    found = cell["tokens_per_s"].get(name)
    if found is None:
        return "-"
    share = cell["share_of_roofline"].get(name)
    head = f"{share:.0%}  " if share is not None else ""
    return f"{head}{found['median']:,.1f}\n({found['p25']:,.1f}-{found['p75']:,.1f})"


def _ratio(cell: dict[str, Any]) -> str:
    ratio = cell.get("ours_over_best_peer")
    if ratio is None:
        return "-"
    return f"{ratio['median']:.2f} ({ratio['p25']:.2f}-{ratio['p75']:.2f})\n{cell['best_peer']}"


def markdown(figures: dict[str, Any]) -> str:
    """The figures of `table` for a document."""
    names = [name for name, about in figures["contenders"].items() if "absent" not in about]
    rows = [[figures["precision"], *names, "roofline", _bounds_told(figures), "ours over the best peer"]]
    rows.append(["---"] * len(rows[0]))
    for name, cell in figures["cells"].items():
        top, ratio = cell["roofline_tokens_per_s"], cell.get("ours_over_best_peer")
        last = f"{ratio['median']:.2f} ({ratio['p25']:.2f}-{ratio['p75']:.2f})" if ratio else "-"
        rates = [_rate_in_words(cell, one) for one in names]
        rows.append([name.replace(":", " "), *rates, f"{top:.0f}" if top else "-", _of_bounds(cell), last])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def http_table(figures: dict[str, Any]) -> Table:
    shown = Table(title=f"{figures['model']}, {figures['precision']}, over HTTP: medians of the runs")
    for column in ("clients", "server", "tokens/s", "TTFT p50 / p99, s", "TPOT p50 / p99, ms", "longest stall, ms"):
        shown.add_column(column, justify="left" if column == "server" else "right")
    for count, servers in figures["clients"].items():
        for name, found in servers.items():
            shown.add_row(count, name, *_http_row(found))
        ratios = figures.get("ours_over_best_peer", {}).get(count, {})
        shown.add_row("", "ours over the best peer", *_http_ratios(ratios), end_section=True)
    return shown


def _http_row(found: dict[str, Any]) -> tuple[str, ...]:
    middle, rate = {key: value["median"] for key, value in found.items()}, found["output_tokens_per_s"]
    return (
        f"{rate['median']:.1f} ({rate['p25']:.1f}-{rate['p75']:.1f})",
        f"{middle['ttft_p50_ms'] / 1e3:.2f} / {middle['ttft_p99_ms'] / 1e3:.2f}",
        f"{middle['tpot_p50_ms']:.0f} / {middle['tpot_p99_ms']:.0f}",
        f"{middle['max_stall_ms']:,.0f}",
    )


def _http_ratios(ratios: dict[str, Any]) -> tuple[str, ...]:
    rate, ttft, stall = (
        f"{one['median']:.2f} ({one['p25']:.2f}-{one['p75']:.2f})\n{one['best_peer']}" if one else "-"
        for one in map(ratios.get, COMPARED)
    )
    return rate, f"p99: {ttft}", "", stall


def _rate_in_words(cell: dict[str, Any], name: str) -> str:
    found, share = cell["tokens_per_s"].get(name), cell["share_of_roofline"].get(name)
    if found is None:
        return "-"
    tail = f", {share:.0%} of the roofline" if name == OURS and share is not None else ""
    return f"{found['median']:.1f} ({found['p25']:.1f}-{found['p75']:.1f}){tail}"


def picture(model: str, results: list[dict[str, Any]], path: Path) -> None:
    """One panel a class."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(4.6 * len(results), 4.0), squeeze=False)
    for axes, result in zip(panels[0], results, strict=True):
        _panel(axes, result["figures"])
    panels[0][0].set_ylabel("tokens/s, all streams together")
    conditions = results[0]["conditions"]
    title = (
        f"{model} shape, random weights, decode on {results[0]['settings']['threads']} threads of {conditions['cpu']}"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def _panel(axes: Any, figures: dict[str, Any]) -> None:
    cells = {int(name.split(":")[1]): cell for name, cell in figures["cells"].items() if name.startswith("decode:")}
    tops = {batch: cell["roofline_tokens_per_s"] for batch, cell in cells.items() if cell["roofline_tokens_per_s"]}
    axes.plot(list(tops), list(tops.values()), color="#9a9a9a", linewidth=1, linestyle="--", label="roofline")
    seen: dict[str, int] = {}
    for name, about in figures["contenders"].items():
        if "absent" in about:
            continue
        engine = name.split()[0]
        style = STYLES[seen.setdefault(engine, 0) % len(STYLES)]
        seen[engine] += 1
        _line(axes, {batch: cell["tokens_per_s"].get(name) for batch, cell in cells.items()}, name, style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(list(cells), [str(batch) for batch in cells])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("streams decoding")
    axes.set_title(figures["precision"], loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _line(axes: Any, rates: dict[int, dict[str, Any] | None], name: str, style: str) -> None:
    found = {batch: rate for batch, rate in rates.items() if rate is not None}
    middle = [rate["median"] for rate in found.values()]
    below = [rate["median"] - rate["p25"] for rate in found.values()]
    above = [rate["p75"] - rate["median"] for rate in found.values()]
    colour, width = COLOURS.get(name.split()[0]), 2.2 if name == OURS else 1.3
    options = {"color": colour, "linestyle": style, "linewidth": width, "marker": "o", "markersize": 3, "capsize": 2}
    axes.errorbar(list(found), middle, yerr=[below, above], label=name, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--markdown", action="store_true", help="tables for a document, and no picture")
    arguments = parser.parse_args()
    kinds, over_http = filed(arguments.model), filed(arguments.model, "peers_http")
    if not kinds:
        raise SystemExit(f"nothing filed for {arguments.model}: python -m benchmarks.peers.run first")
    for kind, results in kinds.items():
        if arguments.markdown:
            print("\n\n".join([heading(results), *(markdown(result["figures"]) for result in results)]), end="\n\n")
            continue
        console = wide()
        console.rule(heading(results))
        for result in results:
            console.print(table(result["figures"]))
        for result in over_http.get(kind, []):
            console.print(http_table(result["figures"]), *notes(result["figures"]["servers"]), sep="\n", markup=False)
        picture(arguments.model, results, DOCS / f"cpu_peers_{arguments.model}_{kind}.png")
        print(f"written: docs/cpu_peers_{arguments.model}_{kind}.png")


if __name__ == "__main__":
    main()
