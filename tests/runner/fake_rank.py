"""A rank without a model, started as `members` starts ranks: it arrives, and when a plan comes does what the plan says.

lost       ends as one that has lost another
die        kills itself, somewhat later
fail       says last words that are not ours
refuse     says last words that are
hold       stays
"""

import os
import signal
import socket
import sys
import time

import msgspec

from splittime.core.errors import ConfigError
from splittime.runner.ranks import Arrived, Begin, Channel, Failed, encode

channel = Channel(socket.socket(fileno=int(sys.argv[1])))
begin = msgspec.msgpack.decode(channel.receive() or b"", type=Begin)
channel.send(encode(Arrived()))
orders = msgspec.json.decode(channel.receive() or b"{}", type=dict[str, str])
match orders.get(str(begin.index)):
    case "lost":
        os._exit(3)
    case "die":
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    case "fail":
        channel.send(encode(Failed("KeyError: 'a'", "Traceback ...")))
        os._exit(1)
    case "refuse":
        error = ConfigError("not so", param="dtype")
        channel.send(encode(Failed(str(error), error=error.info)))
        os._exit(1)
channel.receive()
