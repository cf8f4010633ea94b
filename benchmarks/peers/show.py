"""Results of `run.py` as tables and as a picture: python -m benchmarks.peers.show --model llama-1b [--markdown]

The picture, docs/cpu_peers_MODEL.png: tokens/s against the batch in each precision class filed, with the quartiles of
each contender and the roofline of the same minutes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from benchmarks.peers.contenders import CLASSES, OURS
from benchmarks.report import RESULTS

DOCS = Path(__file__).parents[2] / "docs"
COLOURS = {"splittime": "#b33c2e", "llama.cpp": "#2b5c94", "openvino": "#2f7f79", "vllm": "#8c4a6b"}
STYLES = ("-", "--", ":")


def wide() -> Console:
    """To standard output, at least 110 columns where that is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=max(110, console.width))


def table(figures: dict[str, Any]) -> Group:
    """Tokens/s (quartiles) by cell and contender; ours over the best peer; shares of the roofline."""
    names = [name for name, about in figures["contenders"].items() if "absent" not in about]
    shown = Table(title=f"{figures['model']}, {figures['precision']}: % of roofline, tokens/s: median (quartiles)")
    for column in ("cell", *names, "roofline", "ours / best peer"):
        shown.add_column(column, justify="left" if column == "cell" else "right")
    for name, cell in figures["cells"].items():
        top = cell["roofline_tokens_per_s"]
        rates = [_rate(cell, one) for one in names]
        shown.add_row(name, *rates, f"{top:,.0f}" if top else "-", _ratio(cell))
    notes = [
        f"absent: {name}: {about['absent'][-500:]}"
        for name, about in figures["contenders"].items()
        if "absent" in about
    ]
    notes += [f"failed: {where}: {error}" for where, error in figures["errors"].items()]
    return Group(shown, *(Text(note) for note in notes))


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
    """The same for a document."""
    names = [name for name, about in figures["contenders"].items() if "absent" not in about]
    rows = [[figures["precision"], *names, "roofline", "ours over the best peer"], ["---"] * (len(names) + 3)]
    for name, cell in figures["cells"].items():
        top, ratio = cell["roofline_tokens_per_s"], cell.get("ours_over_best_peer")
        last = f"{ratio['median']:.2f} ({ratio['p25']:.2f}-{ratio['p75']:.2f})" if ratio else "-"
        rates = [_rate_in_words(cell, one) for one in names]
        rows.append([name.replace(":", " "), *rates, f"{top:.0f}" if top else "-", last])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


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
    paths = [RESULTS / f"peers_{arguments.model}_{precision}.json" for precision in CLASSES]
    results = [json.loads(path.read_text()) for path in paths if path.exists()]
    if not results:
        raise SystemExit(f"nothing filed for {arguments.model}: python -m benchmarks.peers.run first")
    if arguments.markdown:
        print("\n\n".join(markdown(result["figures"]) for result in results))
        return
    for result in results:
        wide().print(table(result["figures"]))
    picture(arguments.model, results, DOCS / f"cpu_peers_{arguments.model}.png")
    print(f"written: docs/cpu_peers_{arguments.model}.png")


if __name__ == "__main__":
    main()
