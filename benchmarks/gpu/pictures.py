"""A picture of each reversal, from what run.sh found: `python -m benchmarks.gpu.pictures OUT FOLDER` writes PNG files.

Needs matplotlib (`pip install splittime[plots]`), so it is for afterwards, where the results are looked at. What ran in
its smallest form is refused: it shows nothing.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.collect import read
from benchmarks.gpu.goals import is_tiny
from benchmarks.scenarios.mechanisms import arms_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, RED, GREY, PALE = "#2b5c94", "#b33c2e", "#9a9a9a", "#9dbbe0"
Found = dict[str, Any]


def weights(found: Found, axes: "Axes") -> None:
    for (name, by_count), colour in zip(found["arms"].items(), (GREY, BLUE), strict=True):
        counts = sorted(int(count) for count in by_count if count.isdigit())
        rates = [by_count[str(count)]["tokens_per_s"]["median"] for count in counts]
        axes.plot(counts, rates, marker="o", color=colour, label=name)
    if found["crossover"] is not None:
        axes.axvline(found["crossover"], color=RED, linestyle=":", label="16 bits are as fast")
    axes.set(xscale="log", yscale="log", xlabel="streams that decode at once", ylabel="tokens/s")
    axes.legend(frameon=False)


def cache(found: Found, axes: "Axes") -> None:
    told = {name: f"{one['running_mean']['median']:.0f} run together" for name, one in found["arms"].items()}
    bars(axes, {name: one["tokens_per_s"]["median"] for name, one in found["arms"].items()}, "tokens/s", told)


def chunking(found: Found, axes: "Axes") -> None:
    for name, one in arms_of(found).items():
        stall, rate = one["max_stall_ms"]["median"], one["computed_tokens_per_s"]["median"]
        axes.plot(stall, rate, marker="o", color=RED if name == "off" else BLUE)
        axes.annotate(f" {name}", (stall, rate))
    axes.set(xscale="log", xlabel="longest stall of a chat, ms", ylabel="tokens computed a second")
    axes.margins(x=0.35)


def prefix_cache(by_share: Found, axes: "Axes") -> None:
    for place, (share, found) in enumerate(by_share.items()):
        for side, (name, colour) in enumerate((("off", GREY), ("on", BLUE))):
            value = found[name]["ttft_p50_ms"]["median"]
            axes.bar(place + 0.4 * side, value, 0.38, color=colour, label=name if place == 0 else None)
            axes.annotate(f"{value:.0f}", (place + 0.4 * side, value), ha="center", va="bottom", fontsize=8)
        axes.annotate(share, (place + 0.2, 0), xytext=(0, -14), textcoords="offset points", ha="center")
    axes.set(xticks=[], ylabel="TTFT p50, ms")
    axes.set_xlabel("share of each prompt that another had", labelpad=16)
    axes.legend(frameon=False)


def batching(found: Found, axes: "Axes") -> None:
    arms = arms_of(found)
    told = {name: f"{one['rows_a_step']['median']:.0f} rows a step" for name, one in arms.items()}
    bars(axes, {name: one["tokens_per_s"]["median"] for name, one in arms.items()}, "tokens/s", told)


def reservation(found: Found, axes: "Axes") -> None:
    arms = arms_of(found)
    told = {
        name: f"{one['running_mean']['median']:.0f} run together, {one['tokens_per_s']['median']:.0f} tokens/s"
        for name, one in arms.items()
    }
    shares = {name: 100 * one["held_share"]["median"] for name, one in arms.items()}
    bars(axes, shares, "% of the cache that holds tokens", told)


def bars(axes: "Axes", values: dict[str, float], label: str, told: dict[str, str]) -> None:
    names = list(values)
    axes.barh(names, [values[name] for name in names], color=[GREY, *[BLUE] * (len(names) - 1)], height=0.6)
    for place, name in enumerate(names):
        axes.annotate(f"  {values[name]:.3g}: {told[name]}", (values[name], place), va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.6)
    axes.set_xlabel(label)


PICTURES: dict[str, tuple[str, Callable[[Found, "Axes"], None]]] = {
    "weights": ("4 bits against bfloat16, as more streams decode", weights),
    "cache": ("A smaller KV cache, with and without memory to spare", cache),
    "chunking": ("Prompts whole or cut: a chat's longest stall against throughput", chunking),
    "prefix_cache": ("The prefix cache, by how much of a prompt is shared", prefix_cache),
    "batching": ("Static and continuous batching, mixed output lengths", batching),
    "reservation": ("The longest context reserved in one piece, and blocks as they are needed", reservation),
}


def draw(results: Found, folder: Path) -> list[Path]:
    """results: the reversals that were found, by name. Returns what was written."""
    import matplotlib.pyplot as plt  # takes a second to import

    plt.switch_backend("Agg")
    shared = {
        name.removeprefix("prefix_cache_"): one for name, one in results.items() if name.startswith("prefix_cache_")
    }
    results = results | ({"prefix_cache": shared} if shared else {})
    written = []
    for name, (title, picture) in PICTURES.items():
        if name in results:
            figure, axes = plt.subplots(figsize=(7.5, 3.4))
            picture(results[name], axes)
            axes.set_title(title, loc="left", fontsize=11)
            axes.spines[["top", "right"]].set_visible(False)
            written.append(folder / f"reversal_{name}.png")
            figure.savefig(written[-1], dpi=130, bbox_inches="tight")
            plt.close(figure)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="run.sh's folder, or one of its .jsonl files")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    found: Found = {}
    for part, line in read([options.results]).items():
        result = line.get("result") or {}
        if part.startswith("reversals") and is_tiny(result):
            print(f"{part} ran in its smallest form, which shows nothing", file=sys.stderr)
            return 2
        found |= result.get("reversals", {}) if part.startswith("reversals") else {}
    if not found:
        print(f"{options.results} holds no reversals; run.sh's second call finds them", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    for path in draw(found, options.folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
