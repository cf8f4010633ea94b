"""What the `splittime` script calls: the command, with Ctrl-C silent also while its modules are being imported. The
engine's process of a server is started before that; until the server listens for SIGTERM, the signal ends both at
once."""

import signal
import sys

INTERRUPTED = 130
SERVES, ASKS = "serve", {"-h", "--help", "--help-all"}


def main() -> None:
    try:
        if sys.argv[1:2] == [SERVES] and not ASKS.intersection(sys.argv):
            from splittime.drive import head_start

            signal.signal(signal.SIGTERM, head_start.terminate)
            head_start.begin()
        from splittime.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
