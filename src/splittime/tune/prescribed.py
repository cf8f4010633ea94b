"""What the doctor would set: values that its findings of a run name, tried beside those around the present ones."""

from typing import Any

from splittime.bench.book.records import Run
from splittime.core.errors import ConfigError
from splittime.diagnose.books import books_from_run
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.sized import settings_of
from splittime.tune.knobs import KNOBS


def prescribed(run: Run) -> dict[str, Any]:
    """Returns a value by knob, that of the finding which explains most where several name one."""
    books = books_from_run(run)
    found: dict[str, Any] = {}
    for finding in diagnose(books).findings:
        try:
            settings = settings_of(finding, books) if finding.cure.flags else {}
        except ConfigError:  # a flag that no replay can turn
            continue
        for name, value in settings.items():
            if name in KNOBS:
                found.setdefault(name, value)
    return found
