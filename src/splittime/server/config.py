"""What the server may be told, and what it learns of the model. Both are values; nothing here is read twice."""

import ipaddress
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from splittime.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the HTTP server. `validate()` refuses what cannot be meant."""

    host: str = "127.0.0.1"  # address to bind; any other than loopback needs a key
    port: int = 8000  # TCP port; 0 lets the system choose
    api_key: tuple[str, ...] = ()  # asked for as `Authorization: Bearer KEY`; the first is the operator's (`tenants`)
    api_keys_file: str | None = None  # more keys, with names, limits and salts (`tenants`)
    metrics_api_key: str | None = None  # opens /metrics and nothing else; asked for there even without other keys
    root_path: str = ""  # what a proxy has before our paths, whether it takes it away or not
    ssl_certfile: str | None = None  # PEM file of the certificate (and its chain): HTTPS instead of HTTP
    ssl_keyfile: str | None = None  # PEM file of its key; default: it is in `ssl_certfile`
    allowed_hosts: tuple[str, ...] = ()  # names it may be called by beside its own (`origin` says which those are)
    cors_origins: tuple[str, ...] = ()  # origins whose pages may use it from a browser
    served_model_name: tuple[str, ...] = ()  # names in the API; default: the model's own
    max_body_bytes: int = 4 * 2**20  # a longer request body is refused with 413
    max_queued_requests: int = 256  # generations that may wait for their first step; one more is refused with 429
    max_queued_prompt_tokens: int = 262_144  # prompt tokens that may wait; more is refused with 429
    max_n: int = 16  # largest `n`
    max_choices: int = 128  # largest prompts x n of one HTTP request
    inline_tokenize_chars: int = 1024  # longer prompts are tokenised in another process (so many take about 1 ms)
    tokenize_cpu_s: float = 10.0  # processor time that one request's texts may take; beyond it 400
    tokenize_memory_bytes: int = 2**30  # and memory
    chat_template: str | None = None  # file with a template in place of the model's
    slow_reader_buffer_bytes: int = 256 * 1024  # undelivered output of one stream; beyond it the client is dropped
    slow_reader_s: float = 20.0  # seconds that a stream may make no progress; beyond it the client is dropped
    send_buffer_bytes: int = 256 * 1024  # the system's buffer of each connection (SO_SNDBUF); 0 leaves it alone
    body_timeout_s: float = 60.0  # seconds for a client to send its body; beyond it the request ends with 408
    strict: bool = False  # refuse fields without effect and values that would be bent to fit
    grace_s: float = 30.0  # seconds that open requests get to finish after SIGTERM

    def validate(self) -> None:
        """Raise `ConfigError` for an unprotected public address or a bound that lets nothing through."""
        self._check_keys()
        if not is_loopback(self.host) and not self.asks_for_key:
            raise ConfigError(
                f"host {self.host} can be reached from other machines and no api_key is set",
                param="host",
                value=self.host,
                hint="set an API key, or bind to 127.0.0.1",
            )
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            hint = "such as /llm: with a slash before, and none behind"
            raise ConfigError("root_path is no path", param="root_path", value=self.root_path, hint=hint)
        _check_certificate(self.ssl_certfile, self.ssl_keyfile)
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0", param=name, value=getattr(self, name))

    @property
    def asks_for_key(self) -> bool:
        return bool(self.api_key) or self.api_keys_file is not None

    def _check_keys(self) -> None:
        for name in ("api_key", "served_model_name", "allowed_hosts", "cors_origins"):
            if isinstance(getattr(self, name), str):  # its characters would be taken for keys
                raise ConfigError(f"{name} must be a list of texts", param=name)
        for key in self.api_key:
            check_key(key, "api_key")
        if self.metrics_api_key is not None:
            check_key(self.metrics_api_key, "metrics_api_key")


def check_key(key: str, param: str) -> None:
    """Raise `ConfigError`, without the key, for one that no client could send, or that anybody could guess."""
    if not _KEY.fullmatch(key):
        hint = "use letters, digits and punctuation; several keys: --api-key once for each, or --api-keys-file"
        raise ConfigError(f"{param} is empty, or has a space or a character beyond ASCII", param=param, hint=hint)


_KEY = re.compile(r"[!-~]+")
_ROOT_PATH = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")
_POSITIVE = (
    "max_body_bytes",
    "max_queued_requests",
    "max_queued_prompt_tokens",
    "max_n",
    "max_choices",
    "tokenize_cpu_s",
    "tokenize_memory_bytes",
    "slow_reader_buffer_bytes",
    "slow_reader_s",
    "body_timeout_s",
)


def _check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Raise `ConfigError` now, rather than after the model is loaded."""
    if certfile is None and keyfile is not None:
        hint = "name the certificate: --ssl-certfile FILE"
        raise ConfigError("ssl_keyfile is given without ssl_certfile", param="ssl_keyfile", value=keyfile, hint=hint)
    if certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=lambda: b"")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = certfile if keyfile is None else f"{certfile} with {keyfile}"
        hint = "two PEM files, or one that holds both; the key must not ask for a password"
        message = f"cannot serve HTTPS with {files}: {error}"
        raise ConfigError(message, param="ssl_certfile", value=certfile, hint=hint) from error


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model being served, as the API shows it and as requests are checked against it.

    names: the first is what responses say; the others are accepted too.
    eos_token_ids: end a generation unless it asks otherwise.
    default_sampling: of what a request does not say, by the names of `SamplingParams`; what is not in it is neutral.
        Its max_tokens is what a chat gets at most that names no number itself.
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    created_unix_s: int = 0
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.names[0]
