"""What the `splittime` script calls: the command, with Ctrl-C silent also while its modules are being imported."""

import sys

INTERRUPTED = 130


def main() -> None:
    try:
        from splittime.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
