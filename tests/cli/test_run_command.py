"""`splittime run`: what is a model and what a prompt, standard input, and a chat at a real terminal."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchmarks.fake_runner import FakeRunner
from splittime.assemble import model_source
from splittime.cli import main
from splittime.cli import run as run_module
from splittime.cli.run import RunWords, words_of
from splittime.core.errors import ConfigError
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import EngineParts
from splittime.engine.engine import Engine
from splittime.llm import LLM
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(600)  # processes of its own, on a busy machine

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
COMMAND = [sys.executable, "-m", "splittime.cli.main"]
FEW = ("-n", "4", "-t", "0")
LIMIT_S = 100


@pytest.mark.parametrize(
    ("words", "prompt", "told"),
    [
        ([], None, RunWords(None, None)),
        (["def f(x):"], None, RunWords(None, "def f(x):")),
        (["Why?"], None, RunWords(None, "Why?")),
        (["-"], None, RunWords(None, "-")),
        ([""], None, RunWords(None, "")),
        (["code"], None, RunWords("code", None)),
        (["Qwen/Qwen3-0.6B"], None, RunWords("Qwen/Qwen3-0.6B", None)),
        (["./missing"], None, RunWords("./missing", None)),
        (["/models/llama"], None, RunWords("/models/llama", None)),
        (["~/llama"], None, RunWords("~/llama", None)),
        (["llama-Q4_K.gguf"], None, RunWords("llama-Q4_K.gguf", None)),
        (["code", "hello"], None, RunWords("code", "hello")),
        (["hello", "world"], None, RunWords("hello", "world")),
        (["code"], "hello", RunWords("code", "hello")),
        ([], "code", RunWords(None, "code")),
    ],
)
def test_the_model_is_told_from_the_prompt(words, prompt, told):
    assert words_of(words, prompt) == told


def test_a_folder_that_is_there_is_a_model(tmp_path):
    Path("my model").mkdir()
    assert words_of(["my model"]) == RunWords("my model", None)


@pytest.mark.parametrize(
    ("words", "prompt", "hint"),
    [
        (["hello"], None, "splittime run -p hello"),
        (["def", "f(x):", "return"], None, "splittime run 'def f(x): return'"),
        (["code", "hello"], "world", "quote the prompt"),
    ],
)
def test_what_is_not_clear_is_refused_with_what_to_type(words, prompt, hint):
    with pytest.raises(ConfigError) as caught:
        words_of(words, prompt)
    assert hint in caught.value.info.hint


@pytest.mark.parametrize(
    "command", [("run", "x y", "z"), ("serve", "x y"), ("generate", "x y", "-p", "z"), ("quality", "x y", "code")]
)
def test_a_text_where_a_model_is_expected_says_so(command):
    result = CliRunner().invoke(main.app, command)
    assert result.exit_code == 2
    assert "no folder 'x y'" in result.stderr
    assert "this reads like a prompt, where a model is expected" in result.stderr
    assert "splittime run 'x y'" in result.stderr


def test_a_long_text_where_a_model_is_expected_is_not_repeated():
    with pytest.raises(ConfigError) as caught:
        model_source.locate("many words\n" * 1000)
    assert len(caught.value.info.message) < 400
    assert caught.value.info.hint.endswith("to answer it: splittime run PROMPT")


def answer(*words):
    """What the command says to these words, as JSON; in this process, which has imported torch once."""
    done = CliRunner().invoke(main.app, [*words, *FEW, "--json"])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_a_prompt_from_the_command_line_is_that_of_standard_input():
    """In float32: of bfloat16 two starts may measure, and take, routes that add up in another order."""
    asked = answer("run", "def f(x):", "--dtype", "float32")
    assert asked["text"]
    command = [*COMMAND, "generate", "code", "-", *FEW, "--dtype", "float32"]
    piped = subprocess.run(command, input="def f(x):", capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == asked["text"] + "\n"
    assert "D decode" in piped.stderr


@pytest.mark.parametrize(("words", "is_told"), [((), True), (("code",), False)])
def test_the_toy_is_called_one_where_nobody_asked_for_it(monkeypatch, words, is_told):
    """Its first answer does not show that its text means nothing. Who named it knows."""
    monkeypatch.setattr(model_source, "default", lambda: "code")
    monkeypatch.setattr(run_module, "_loaded", lambda *_: SimpleNamespace(default_sampling=SamplingParams()))
    monkeypatch.setattr(run_module, "stream", lambda *_, **__: None)
    done = CliRunner().invoke(main.app, ["run", *words, "def f(x):"])
    assert done.exit_code == 0, done.stderr
    assert ("means nothing" in done.stderr) == is_told
    assert done.stdout == ""


@pytest.fixture
def chat_model(tmp_path):
    """The packaged model in a folder, with another chat template."""
    folder = tmp_path / "chat-model"
    shutil.copytree(model_source.locate(None), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return folder


def test_a_prompt_is_a_message_where_the_model_chats_and_a_text_with_raw(chat_model):
    plain, raw = (answer("run", str(chat_model), "import", *more) for more in ([], ["--raw"]))
    assert plain["text"] == answer("run", "-p", "u:import\na:")["text"]
    assert raw["text"] == answer("run", "-p", "import")["text"]
    assert plain["account"]["prompt_tokens"] > raw["account"]["prompt_tokens"]


class Terminal:
    """A person's terminal with the command in it."""

    def __init__(self, *words):
        self._master, slave = pty.openpty()
        environ = {**os.environ, "TERM": "dumb", "COLUMNS": "200"}
        ends = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen([*COMMAND, *words], **ends, env=environ, start_new_session=True)
        os.close(slave)

    def type(self, keys):
        os.write(self._master, keys.encode())

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def until(self, pattern, each_second=lambda: None):
        """Returns what was shown up to the pattern; calls `each_second` while nothing is shown."""
        shown, end_s = b"", time.monotonic() + LIMIT_S
        while not re.search(pattern, shown.decode(errors="replace")):
            assert time.monotonic() < end_s, shown
            if select.select([self._master], [], [], 1)[0]:
                try:
                    shown += os.read(self._master, 4096)
                except OSError:  # the other end is closed
                    raise AssertionError(shown) from None
            else:
                each_second()
        return shown.decode(errors="replace")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal():
    opened = []

    def start(*words):
        opened.append(Terminal(*words))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_a_chat_at_the_terminal(chat_model, terminal):
    person = terminal("run", str(chat_model), *FEW)
    assert "chat-model, a chat. /clear" in person.until(">>> ")
    for _ in range(2):
        person.type("import os\n")
        assert "D decode" in person.until(r"v deliver[^>]*>>> ")
    person.type("/what\n")
    assert "/what is no command. /clear" in person.until(r"/exit[^>]*>>> ")
    person.type("\x04")
    assert person.process.wait(LIMIT_S) == 0


def test_an_interrupt_ends_an_answer_and_not_the_chat(chat_model, terminal):
    person = terminal("run", str(chat_model), "-t", "0", "-n", "1900")
    person.until(">>> ")
    for _ in range(10):  # on a busy machine an answer may be over before the signal comes
        person.type("import os\n")
        person.until(r"import os\s+\S+")
        person.interrupt()
        shown = person.until(">>> ")
        if "v deliver" not in shown:
            break
    assert "v deliver" not in shown
    person.interrupt()  # a moment too late for the answer; again if it comes before Python waits for a key
    assert "Ctrl-D ends the chat" in person.until(r"ends the chat[^>]*>>> ", each_second=person.interrupt)
    person.type("/exit\n")
    assert person.process.wait(LIMIT_S) == 0


def fake_llm(model_folder, max_model_len, template=TEMPLATE):
    engine = Engine(Scheduler(SchedulerConfig(max_model_len=max_model_len, num_blocks=64)))
    parts = EngineParts(engine, FakeRunner(vocab_size=256))
    return LLM.from_parts(parts, Tokenizer.load(model_folder, template))


def typed(line):
    """Ctrl-D, or a line."""
    if line == "\x04":
        raise EOFError
    return line


def conversation(llm, monkeypatch, lines, max_tokens=8):
    """Returns the prompts that a chat of these lines asks the model."""
    asked, waiting, real = [], iter(lines), llm.stream
    monkeypatch.setattr("builtins.input", lambda _: typed(next(waiting)))
    monkeypatch.setattr(llm, "stream", lambda prompt, sampling: asked.append(prompt) or real(prompt, sampling))
    run_module.chat(llm, SamplingParams(max_tokens=max_tokens), raw=False)
    return [prompt if isinstance(prompt, str) else llm.tokenizer.decode(prompt) for prompt in asked]


def test_each_turn_has_those_before_it(model_folder, monkeypatch, capsys):
    llm = fake_llm(model_folder, 512)
    first, second, third = conversation(llm, monkeypatch, ["one", "two", "/clear", "three", "/exit"])
    assert first == "u:one\na:"
    assert second.startswith("u:one\na:")
    assert second.endswith("\nu:two\na:")
    assert third == "u:three\na:"


def test_without_a_template_each_line_is_continued_and_the_end_of_the_input_ends_it(model_folder, monkeypatch, capsys):
    llm = fake_llm(model_folder, 512, template=None)
    assert conversation(llm, monkeypatch, ["one", "two", "\x04", "three"]) == ["one", "two"]
    said = capsys.readouterr().err
    assert "each line is continued by itself: it has no chat template" in said
    assert said.count("v deliver") == 2


def test_the_oldest_turns_are_forgotten_when_the_context_is_full(model_folder, monkeypatch, capsys):
    llm = fake_llm(model_folder, 64)
    prompts = conversation(llm, monkeypatch, ["first one", "second one", "third one", "/exit"])
    assert "first one" not in prompts[-1]
    assert prompts[-1].endswith("u:third one\na:")
    assert "the oldest turns are forgotten" in capsys.readouterr().err


def test_a_turn_is_forgotten_with_its_answer(model_folder, monkeypatch, capsys):
    llm = fake_llm(model_folder, 128)
    lines = [letter * 20 for letter in "abcdefgh"]  # longer than the answers, so that a question alone would be enough
    prompts = conversation(llm, monkeypatch, [*lines, "/exit"], max_tokens=2)
    assert all(prompt.startswith("u:") for prompt in prompts)
    assert not prompts[-1].startswith("u:a")
    assert "u:g" in prompts[-1]


def test_a_message_that_cannot_be_answered_leaves_the_chat_as_it_was(model_folder, monkeypatch, capsys):
    llm = fake_llm(model_folder, 64)
    _, last = conversation(llm, monkeypatch, ["x" * 100, "two", "/exit"])
    assert last == "u:two\na:"
    assert "error:" in capsys.readouterr().err
