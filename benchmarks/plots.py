"""Pictures from filed results: `python -m benchmarks.plots` writes docs/where_time_goes.png from azure_replay.json."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.report import RESULTS

PICTURE = Path(__file__).parents[1] / "docs" / "where_time_goes.png"

# Waiting is warm, computing is blue and green, what the server does itself is grey.
COLOURS = {
    "queue(batch_slots)": "#b33c2e",
    "queue(token_budget)": "#e0703f",
    "queue(kv_blocks)": "#f0a35c",
    "queue(policy)": "#f3c98b",
    "queue(step_in_flight)": "#f7e3b5",
    "queue": "#faf1d8",
    "preempted(kv_blocks)": "#8c4a6b",
    "recompute": "#c48aa6",
    "prefill": "#2f7f79",
    "prefill_stall(token_budget)": "#8fc1a9",
    "decode": "#2b5c94",
    "decode_stall(token_budget)": "#9dbbe0",
}
OTHER = "#9a9a9a"


def where_time_goes(result: dict[str, Any], path: Path) -> None:
    """One stacked bar for each prompt-length bucket: mean seconds a request, by stage and cause."""
    buckets = result["figures"]["where_time_went"]
    names = [name for name in buckets if name != "all"] + ["all"]
    figure, axes = plt.subplots(figsize=(9.5, 0.46 * len(names) + 1.9))
    left = [0.0] * len(names)
    for stage in [*COLOURS, "everything else"]:
        widths = [_seconds(buckets[name]["mean_ms_by_stage"], stage) for name in names]
        if max(widths) > 0.002 * max(map(sum, zip(left, widths, strict=True))):
            axes.barh(range(len(names)), widths, left=left, height=0.72, color=COLOURS.get(stage, OTHER), label=stage)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(names)), [f"{name} tokens" if name != "all" else "all" for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("mean seconds a request, from first byte in to last byte out")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_title(result), loc="left", fontsize=11)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def _seconds(mean_ms: dict[str, float], stage: str) -> float:
    if stage == "everything else":
        return sum(ms for name, ms in mean_ms.items() if name not in COLOURS) / 1e3
    return mean_ms.get(stage, 0.0) / 1e3


def _title(result: dict[str, Any]) -> str:
    figures = result["figures"]
    return (
        f"{figures['requests']} requests of a real trace, offered in {figures['arrivals_s']:.0f} s, "
        f"served in {figures['wall_s']:.0f} s: where the time went, by prompt length"
    )


if __name__ == "__main__":
    where_time_goes(json.loads((RESULTS / "azure_replay.json").read_text()), PICTURE)
    print(f"written to {PICTURE}")
