"""Which metrics, labels and label values a PromQL expression names."""

import re
from typing import NamedTuple

from splittime.gateway.metrics import GATEWAY_METRICS
from splittime.ledger.export.metrics import METRICS, MetricSpec
from splittime.ledger.export.prometheus import ALIASES

SPECS = {spec.name: spec for spec in (*METRICS, *GATEWAY_METRICS, *(alias.spec for alias in ALIASES))}
OF_PROMETHEUS = {"up": {"job", "instance"}}
TARGET_LABELS = {"job", "instance"}
WORDS = {"by", "and", "or", "unless", "on", "without", "ignoring", "sum", "min", "max", "avg", "count"}
_NAME = re.compile(r"[A-Za-z_:][\w:]*")
_MATCHERS = re.compile(r"\{([^{}]*)\}")
_MATCHER = re.compile(r'\s*(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"\s*,?')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring) \(([^)]*)\)")


class Named(NamedTuple):
    """metrics: as they are exported, with `_bucket` and the like. labels: asked for, or grouped by."""

    metrics: set[str]
    labels: set[str]
    values: set[tuple[str, str]]


def named(expr: str) -> Named:
    pairs = [pair for found in _MATCHERS.findall(expr) for pair in _MATCHER.findall(found)]
    labels = {name for name, _ in pairs} | {
        name.strip() for found in _GROUPING.findall(expr) for name in found.split(",")
    }
    bare = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub("", _MATCHERS.sub("", expr)))
    metrics = {
        found[0]
        for found in _NAME.finditer(bare)
        if found[0] not in WORDS
        and not bare[found.end() :].lstrip().startswith("(")
        and not bare[: found.start()].endswith((".", *"0123456789"))
    }
    return Named(metrics, labels, {(name, each) for name, value in pairs for each in value.split("|")})


def exported(name: str) -> MetricSpec | None:
    """Returns the metric that exports such a series; None for one that nobody exports."""
    spec = SPECS.get(name)
    if spec is not None and spec.kind != "histogram":
        return spec
    for ending in ("_bucket", "_sum", "_count"):
        spec = SPECS.get(name.removesuffix(ending)) if name.endswith(ending) else None
        if spec is not None and spec.kind == "histogram":
            return spec
    return None


def labels_of(name: str) -> set[str]:
    spec = exported(name)
    assert spec is not None, f"nobody exports {name}"
    return {*spec.labels, *TARGET_LABELS, *(("le",) if name.endswith("_bucket") else ())}
