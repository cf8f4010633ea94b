"""`splittime gateway`: reads the config, and serves in front of the upstreams that it names."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import typer

from splittime.cli import gateway_books
from splittime.cli.options import JsonFlag, fails_clearly, flag, switch, talk, write_data
from splittime.cli.panels import CommandGroup, add
from splittime.core.errors import ConfigError
from splittime.core.this_process import log_to_stderr, share_one_heap

if TYPE_CHECKING:
    from splittime.gateway.config import GatewayConfig
    from splittime.gateway.config_file import Secrets

EXAMPLES = """\b
Examples:
  splittime gateway --config gateway.toml
  splittime gateway --config gateway.toml --check    say what is wrong with it
  splittime gateway inventory --config gateway.toml  list each hop
  splittime gateway rehearse new.toml --config gateway.toml --ledger FILE
  splittime gateway apply new.toml --canary 10%      of a running one

\b
The smallest gateway.toml:
  [[upstream]]
  name = "a"
  url = "http://127.0.0.1:8000"
  models = ["my-model"]

\b
Ctrl-C and SIGTERM let open requests end, for grace_s at most; a second one
does not.
Exit codes:
  0    ended by Ctrl-C or SIGTERM, or the config is good
  1    failed
  2    a usage or config error
  130  ended by a second one of these
"""


app = typer.Typer(
    cls=CommandGroup,
    invoke_without_command=True,
    epilog=EXAMPLES,
    subcommand_metavar="[COMMAND]",
    add_completion=False,
    rich_markup_mode=None,
)
for _command, _examples, _summary in (
    (gateway_books.inventory, gateway_books.INVENTORY_EXAMPLES, "List each hop, and what is not set."),
    (gateway_books.lint, gateway_books.LINT_EXAMPLES, "What prompts carry for nothing."),
    (gateway_books.rehearse, gateway_books.REHEARSE_EXAMPLES, "Say what another config would have done."),
    (gateway_books.evaluate, gateway_books.EXAMPLES, "Cost and worth of routing by difficulty."),
    (gateway_books.apply, gateway_books.VERSIONS_EXAMPLES, "Give a running gateway another config."),
    (gateway_books.status, gateway_books.VERSIONS_EXAMPLES, "Which config a running gateway has, and its canary."),
    (gateway_books.rollback, gateway_books.VERSIONS_EXAMPLES, "End the canary, or go back to the config before."),
):
    add(app, _command, _examples, _summary)


@app.callback()
@fails_clearly
def gateway(
    context: typer.Context,
    config: Path | None = flag("FILE", "The gateway's config, in TOML. It must be given."),
    check: bool = switch("--check", "Read the config and the keys; start nothing."),
    json: JsonFlag = False,
) -> None:
    """Stand in front of OpenAI-compatible servers: routing, limits, retries, and one exact account a request."""
    from splittime.drive.host_time import importing

    with importing():
        from splittime.gateway.config_file import read_config, secrets_of

    if context.invoked_subcommand is not None:
        return
    if config is None:
        hint = "splittime gateway --help has one to begin with"
        raise ConfigError("--config FILE is missing", param="config", hint=hint)
    log_to_stderr()
    told = read_config(config)
    secrets = secrets_of(told)
    if check:
        _say(told, "the config is good", json)
        return
    _serve(config, told, secrets, json)


def _serve(path: Path, config: "GatewayConfig", secrets: "Secrets", as_json: bool) -> None:
    from splittime.drive.host_time import freeze_heap, importing

    share_one_heap()
    with importing():
        import uvloop

        from splittime.cli.gateway_books import compare_arms
        from splittime.gateway.app import run
        from splittime.ledger.store import Ledger
        from splittime.web.ports import check_port_is_free, check_port_is_shared

    check_port_is_free(config.host, config.port)
    if config.shared_port is not None:
        check_port_is_shared(config.host, config.shared_port)
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if config.ssl_certfile else "http"

    def on_listening(port: int) -> None:
        freeze_heap()  # else each full collection walks what was imported, and all streams wait for it
        shared = None if config.shared_port is None else f"{scheme}://{host}:{config.shared_port}"
        _say(config, f"{scheme}://{host}:{port}", as_json, shared)

    with closing(Ledger(config.ledger_file, max_file_accounts=config.max_file_accounts)) as ledger:
        serving = run(config, secrets, ledger, path=path, compare=compare_arms, on_listening=on_listening)
        uvloop.run(serving)


def _say(config: "GatewayConfig", what: str, as_json: bool, shared: str | None = None) -> None:
    """Says what is served, on standard error, or as JSON on standard output. shared: the URL that other gateways have
    too."""
    if as_json:
        upstreams = [{"name": one.name, "url": one.url, "models": one.models} for one in config.upstream]
        more = {} if shared is None else {"shared": shared}
        write_data(orjson.dumps({"gateway": what, **more, "upstreams": upstreams}))
        return
    console = talk()
    console.print(
        f"splittime gateway: {what}{'' if shared is None else f', shared {shared}'}", style="bold", markup=False
    )
    for one in config.upstream:
        console.print(f"  {one.name}  {one.url}  {', '.join(one.models)}", markup=False)
