"""Whether HTTPS can be served with the files that a config names."""

import ssl

from splittime.core.errors import ConfigError
from splittime.core.small_file import read_small


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
