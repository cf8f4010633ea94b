"""vLLM's general plugin, which it calls in each of its processes, the first before it starts any other.

It names the folder in which the processes find each other, so that the plain flags (`--scheduler-cls`, `--middleware`)
work as `splittime attach` does. In a server without these flags nothing else happens.
"""

from splittime.attach.mail import name_folder


def load() -> None:
    name_folder()
