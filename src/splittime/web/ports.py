"""Ports: whether one is free, and one at which several processes of a user listen.

With `SO_REUSEPORT` Linux gives each new connection to one of those that listen, by the addresses of both its ends, not
by what they have to do. So when one dies the others are the way in. All must ask for it and be of one user: nobody
else's program gets in between. What the dead one had open is cut, and what the system had let in for it.
"""

import errno
import socket
import ssl

from splittime.core.errors import ConfigError
from splittime.core.files import read_small


def bound(host: str, port: int, *, shares: bool = False) -> socket.socket:
    """Returns a socket with this address. shares: with others of this user who share it. Raises OSError where it is
    taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


def check_port_is_free(host: str, port: int) -> None:
    """Raises `ConfigError` now, rather than after the model is loaded."""
    try:
        bound(host, port).close()
    except OSError as error:
        hint = f"stop what listens there (ss -ltnp 'sport = :{port}'), or choose another: --port {port + 1}"
        raise _refusal(error, host, port, "port", hint) from None


def check_port_is_shared(host: str, port: int) -> None:
    """Raises `ConfigError` where somebody listens with whom this process cannot share."""
    try:
        bound(host, port, shares=True).close()
    except OSError as error:
        hint = f"{_other_shared_port(port)}: only gateways of one user share it"
        raise _refusal(error, host, port, "shared_port", hint) from None


def hold_shared_port(host: str, port: int) -> socket.socket:
    """Returns a socket that has the port for as long as it is open, and does not listen: processes of this user who
    share it may. Raises `ConfigError` where anybody has it, also one who would share it."""
    try:
        held = bound(host, port)
    except OSError as error:
        raise _refusal(error, host, port, "gateway.shared_port", _other_shared_port(port)) from None
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # else another could hold it too while nobody listens
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return held


def _other_shared_port(port: int) -> str:
    return f"choose another shared_port, or stop what listens there (ss -ltnp 'sport = :{port}')"


def _refusal(error: OSError, host: str, port: int, param: str, hint: str) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use", param=param, value=port, hint=hint)
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}", param="host")


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Raise `ConfigError` now, rather than after the model is loaded."""
    if certfile is None and keyfile is not None:
        hint = "name the certificate: --ssl-certfile FILE"
        raise ConfigError("ssl_keyfile is given without ssl_certfile", param="ssl_keyfile", value=keyfile, hint=hint)
    if certfile is None:
        return
    try:
        for file in filter(None, (certfile, keyfile)):
            read_small(file)  # which no pipe makes wait
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=lambda: b"")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = certfile if keyfile is None else f"{certfile} with {keyfile}"
        hint = "two PEM files, or one that holds both; the key must not ask for a password"
        message = f"cannot serve HTTPS with {files}: {error}"
        raise ConfigError(message, param="ssl_certfile", value=certfile, hint=hint) from error
