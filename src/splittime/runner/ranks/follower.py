"""Another rank: `python -m splittime.runner.ranks.follower CHANNEL PARENT`, started by `members` alone.

It loads its part of the model and runs every plan that the first rank hands on, as the first rank does: it draws tokens
too, from the same logits, and nobody asks for them. What a step leaves behind (what of the cache was scrubbed, say) is
so the same everywhere. Tokens of the next step come with its plan, so that two draws could not part ways.

It leaves when its channel ends, and is killed by the system when its parent dies.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

import msgspec

from splittime.core.errors import SplittimeError
from splittime.core.this_process import end_with
from splittime.runner.ranks import Arrived, Begin, Channel, Failed, encode


def leave_with(end: socket.socket) -> None:
    """In a thread: wait for the other end to be closed, whatever the main thread is doing, and go."""

    def watch() -> None:
        poll = select.poll()
        poll.register(end, 0)  # its closing is told of unasked
        poll.poll()
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(descriptor: int, parent: int) -> int:
    end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the first rank hears them, and ends us
    logging.getLogger("splittime").setLevel(logging.ERROR)  # of the rest the first rank tells
    end = socket.socket(fileno=descriptor)
    leave_with(end)
    from splittime.runner.ranks.group import RankLost
    from splittime.runner.ranks.members import LOST_STATUS

    channel = Channel(end)
    try:
        follow(channel)
    except RankLost:
        return LOST_STATUS
    except SplittimeError as error:
        channel.send(encode(Failed(str(error), error=error.info)))
        return 1
    except Exception as error:  # the one edge where a rank's failure becomes a message
        channel.send(encode(Failed(f"{type(error).__name__}: {error}", traceback.format_exc())))
        return 1
    return 0


def follow(channel: Channel) -> None:
    """Load, then run plans until there are no more."""
    from splittime.core.step import StepPlan
    from splittime.runner.compose import load_part
    from splittime.runner.ranks.group import RankGroup, device_of

    begin = msgspec.msgpack.decode(channel.receive() or b"", type=Begin)
    config = begin.config
    group = RankGroup(
        begin.index,
        config.tensor_parallel_size,
        Path(begin.folder),
        config.collective_timeout_s,
        lambda: channel.send(encode(Arrived())),
        device_of(config, begin.index),
    )
    runner = load_part(config, lambda name, begin_ns, end_ns: None, None, group)
    group.each(runner.resolved.weights_bytes)
    decoder = msgspec.msgpack.Decoder(StepPlan)
    while (content := channel.receive()) is not None:
        runner.run(decoder.decode(content))


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), int(sys.argv[2])))
