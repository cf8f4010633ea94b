"""Metrics in Prometheus' text form, read.

    parse(text)             every sample by its name with labels, as the server wrote it, labels in alphabetical order
    parse(text, names)      a few names only, at little cost: for scraping while a load runs
    labels(samples, name)   what a server tells in labels, such as its settings
    values(samples, name)   the samples of one name: of all its label values, or of those asked for

(prometheus_client's own parser gives counters other names than the server does, and takes five times as long.)
"""

import contextlib
import math
import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")  # name {labels} value time stamp
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = dict[str, float]


def parse(text: str, names: tuple[str, ...] | None = None) -> Samples:
    """Every sample, or those of some names, by name with labels. Lines that are no samples are passed over."""
    found: Samples = {}
    for line in text.split("\n"):
        if names is not None and not line.startswith(names):
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None or (names is not None and match[1] not in names):
            continue
        with contextlib.suppress(ValueError):
            value = float(match[3])
            if math.isfinite(value):  # NaN, as a summary has it that saw nothing yet, tells nothing; JSON has no word
                found[_key(match[1], match[2])] = value
    return found


def _key(name: str, labels: str | None) -> str:
    """`name{a="1",b="2"}`, or the bare name."""
    pairs = sorted(_LABEL.findall(labels)) if labels else []
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in pairs) + "}" if pairs else name


def labels(samples: Samples, name: str) -> dict[str, str]:
    """The labels of the first sample of this name; {} if there is none."""
    key = next((key for key in samples if key.startswith(name + "{")), "")
    return dict(_LABEL.findall(key))


def values(samples: Samples, name: str, labels: Mapping[str, str] | None = None) -> list[float]:
    """Returns what samples of this name say, of all label values or of those with these."""
    pairs = [f'{label}="{value}"' for label, value in (labels or {}).items()]

    def is_wanted(key: str) -> bool:
        rest = key.removeprefix(name)
        is_of_name = key == name or (len(rest) < len(key) and rest.startswith("{"))
        return is_of_name and all("{" + pair in rest or "," + pair in rest for pair in pairs)

    return [value for key, value in samples.items() if is_wanted(key)]
