"""What the `splittime` script calls: the command, with Ctrl-C silent also while its modules are being imported. The
engine's process of a server is started before that; SIGTERM ends both, also before the server listens for it."""

import signal
import sys

INTERRUPTED, TERMINATED = 130, 143
SERVES, ASKS = "serve", {"-h", "--help"}


def main() -> None:
    try:
        if sys.argv[1:2] == [SERVES] and not ASKS.intersection(sys.argv):
            from splittime.drive import head_start

            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TERMINATED))
            head_start.begin()
        from splittime.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
