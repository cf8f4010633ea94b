"""What several of these tests look at is made once."""

import contextlib
import io
import json

import pytest


@pytest.fixture(scope="session")
def reversals_found():
    """What the smallest form of the script tells."""
    pytest.importorskip("triton")
    from benchmarks.gpu import reversals

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        reversals.main(["--tiny", "--json"])
    return json.loads(printed.getvalue())
