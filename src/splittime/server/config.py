"""The settings of the HTTP server."""

import re
from typing import Annotated

from splittime.api.limits import BodyLimits
from splittime.core.errors import ConfigError
from splittime.core.settings import Doc, check
from splittime.text.reasoning import check_reasoning_parser
from splittime.text.tool_families import family_named
from splittime.web.http import is_loopback
from splittime.web.ports import check_certificate
from splittime.web.tenants import check_key


class ServerConfig(BodyLimits, frozen=True, kw_only=True):
    """Settings of the HTTP server, and what only its own code sets. `validate()` refuses what makes no sense.

    allowed_hosts: `web.edge` says which names are allowed besides.
    inline_tokenize_chars: a longer prompt is tokenised in another process (so many characters take about 1 ms).
    send_buffer_bytes: the system's buffer of each connection (SO_SNDBUF); 0 leaves it alone.
    """

    host: Annotated[str, Doc("Address to bind; any but loopback needs api_key.")] = "127.0.0.1"
    port: Annotated[int, Doc("TCP port; 0 lets the system choose.", 0, 65535)] = 8000
    api_key: Annotated[
        tuple[str, ...],
        Doc(
            "Asked for as `Authorization: Bearer KEY`. The first is the operator's, each other one a tenant's.",
            is_secret=True,
        ),
    ] = ()
    api_keys_file: Annotated[str | None, Doc("TOML file of keys with names, limits and salts.")] = None
    metrics_api_key: Annotated[str | None, Doc("A key for /metrics alone.", is_secret=True)] = None
    root_path: Annotated[str, Doc("What a proxy has before these paths, as /llm.")] = ""
    ssl_certfile: Annotated[str | None, Doc("PEM file of a certificate, to serve HTTPS.")] = None
    ssl_keyfile: Annotated[str | None, Doc("PEM file of its key; default: in ssl_certfile.")] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Doc(
            "Names by which requests may call the server (Host header), beside those it listens on: api.example, "
            "*.example, or * for any. Default: none on loopback, any on other addresses (which ask for a key)."
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Doc("Pages of these origins may use the API from a browser: https://app.example, or * for all."),
    ] = ()
    served_model_name: Annotated[
        tuple[str, ...],
        Doc("Names in the API: answers carry the first, requests may use any. Default: the model's own."),
    ] = ()
    lora_modules: Annotated[
        tuple[str, ...], Doc("Adapters to serve from the start, each NAME=FOLDER; needs enable_lora.")
    ] = ()
    lora_root: Annotated[
        str | None, Doc("Folder below which /v1/load_lora_adapter reads adapters; without it that is refused.")
    ] = None
    chat_template: Annotated[str | None, Doc("File with a Jinja chat template, in place of the model's.")] = None
    tokenize_cpu_s: Annotated[
        float, Doc("Processor time that the texts of one request may take to render and tokenise (400).", 0.001)
    ] = 10.0
    tokenize_memory_bytes: Annotated[int, Doc("Memory that they may take.", 2**20)] = 2**30
    max_body_bytes: Annotated[int, Doc("A longer request body is refused (413).", 1)] = 4 * 2**20
    max_queued_requests: Annotated[int, Doc("Requests that may wait; one more is refused (429).", 1)] = 256
    max_queued_prompt_tokens: Annotated[int, Doc("Prompt tokens that may wait; more is 429.", 1)] = 262_144
    slow_reader_buffer_bytes: Annotated[int, Doc("Unread output at which a client is dropped.", 1)] = 256 * 1024
    slow_reader_s: Annotated[float, Doc("Seconds without progress at which a client is dropped.", 0.001)] = 20.0
    body_timeout_s: Annotated[float, Doc("Seconds for a client to send its body (408).", 0.001)] = 60.0
    max_stored_responses: Annotated[
        int, Doc("Responses kept in memory for previous_response_id; 0 keeps none, and the oldest go first.", 0)
    ] = 1024
    max_stored_response_bytes: Annotated[int, Doc("Bytes that they may take, each with its whole conversation.", 1)] = (
        64 * 2**20
    )
    stored_response_s: Annotated[float, Doc("Seconds that each is kept.", 0.001)] = 3600.0
    prefill_ahead_s: Annotated[
        float, Doc("Seconds that a prompt of /v1/prefill waits to be computed, and is then remembered.", 0.001)
    ] = 60.0
    grace_s: Annotated[float, Doc("Seconds that open requests get after SIGTERM.", 0)] = 30.0
    inline_tokenize_chars: int = 1024
    send_buffer_bytes: int = 256 * 1024

    def validate(self) -> None:
        """Raises `ConfigError` for an unprotected public address or a bound that lets nothing through."""
        check(self)
        self._check_keys()
        if not is_loopback(self.host) and not self.asks_for_key:
            raise ConfigError(
                f"host {self.host} can be reached from other machines and no api_key is set",
                param="host",
                value=self.host,
                hint="set an API key, or bind to 127.0.0.1",
            )
        lora_modules(self.lora_modules)
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            hint = "such as /llm: with a slash before, and none behind"
            raise ConfigError("root_path is no path", param="root_path", value=self.root_path, hint=hint)
        if self.tool_call_parser is not None:
            family_named(self.tool_call_parser)
        if self.reasoning_parser is not None:
            check_reasoning_parser(self.reasoning_parser)
        check_certificate(self.ssl_certfile, self.ssl_keyfile)

    @property
    def asks_for_key(self) -> bool:
        return bool(self.api_key) or self.api_keys_file is not None

    def _check_keys(self) -> None:
        for name in ("api_key", "served_model_name", "lora_modules", "allowed_hosts", "cors_origins"):
            if isinstance(getattr(self, name), str):  # its characters would be taken for keys
                raise ConfigError(f"{name} must be a list of texts", param=name)
        for key in self.api_key:
            check_key(key, "api_key")
        if self.metrics_api_key is not None:
            check_key(self.metrics_api_key, "metrics_api_key")


def lora_modules(entries: tuple[str, ...]) -> dict[str, str]:
    """Returns the folders of these adapters by name. Raises `ConfigError` for an entry that is none."""
    found: dict[str, str] = {}
    for entry in entries:
        name, _, folder = entry.partition("=")
        if not folder or not ADAPTER_NAME.fullmatch(name) or name in found:
            said = f"lora_modules: {entry[:200]!r} is not NAME=FOLDER with a name of its own"
            raise ConfigError(said, param="lora_modules", value=entry[:200], limit=ADAPTER_NAME.pattern)
        found[name] = folder
    return found


ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
_ROOT_PATH = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")
