"""`splittime check-template`: a table that fits, an exit code for a CI, and milliseconds where somebody knows them."""

import json
import signal
from pathlib import Path

import msgspec
import pytest
from known_replicas import REPLICA
from typer.testing import CliRunner, Result

from splittime.cli.check_template import prompt_ns
from splittime.cli.main import app
from splittime.simulate.replica import save_replica
from text.test_template_check import DROPS, SOUND


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, ["check-template", *map(str, words)], env={"COLUMNS": "80", "NO_COLOR": "1"})


@pytest.fixture
def dropping(tmp_path: Path) -> Path:
    path = tmp_path / "drops.jinja"
    path.write_text(DROPS)
    return path


def test_a_sound_template_passes(tmp_path: Path) -> None:
    (tmp_path / "sound.jinja").write_text(SOUND)
    result = invoke(tmp_path / "sound.jinja")
    assert result.exit_code == 0, result.output
    assert "H" not in result.stdout.partition("conversation")[2]
    assert result.stdout.endswith("\nfails nothing\n")


def test_a_broken_one_says_where_and_why_and_fails(dropping: Path) -> None:
    result = invoke(dropping)
    assert result.exit_code == 1
    row = next(line for line in result.stdout.splitlines() if line.startswith("calls, thoughts sent back"))
    assert "= = H = H" in row
    cells = [int(cell.replace(",", "")) for cell in row.split("H")[-1].split()]
    assert cells == [pytest.approx(cells[0] * times, rel=0.01) for times in (1, 4, 16)]
    assert "before '<|a|><think>" in result.stdout
    assert "cause  thoughts of earlier turns are dropped" in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_what_failed_is_shown_and_not_what_a_client_chose(tmp_path: Path) -> None:
    """Where a client's later system message loses the history as going on does, going on is shown."""
    (tmp_path / "latest.jinja").write_text("{% for m in messages[-2:] %}{{ m.content }}{% endfor %}")
    result = invoke(tmp_path / "latest.jinja")
    assert result.exit_code == 1
    told, shown = result.stdout.split("\n\n", 2)[1:]
    assert "a system's message later  H H" in told
    assert ", turn " in shown
    assert "a system's message later, turn" not in shown
    assert shown.endswith("\nfails: chat; calls; two calls at once\n"), shown


def test_where_all_is_refused_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "no.jinja").write_text("{{ raise_exception('never') }}")
    result = invoke(tmp_path / "no.jinja")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (3, "cannot tell: each conversation is refused")
    assert json.loads(invoke(tmp_path / "no.jinja", "--json").stdout)["exit_code"] == 3


@pytest.mark.parametrize("words", [(), ("--json",)])
@pytest.mark.parametrize(
    ("source", "code", "told"),
    [
        ("", 0, ""),
        ("{% break %}", 2, "outside loop"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", 2, "does not end within"),
    ],
)
def test_what_is_no_template_fails_in_words(
    source: str, code: int, told: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splittime.cli.check_template.MOST_S", 0.5)
    (tmp_path / "it.jinja").write_text(source)
    result = invoke(tmp_path / "it.jinja", *words)
    assert result.exit_code == code, result.output
    assert told in " ".join(result.stderr.split())


def test_an_interrupt_is_no_slow_template(dropping: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("splittime.text.template_check.check_template", interrupted)
    assert invoke(dropping).exit_code == 130
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)  # it is not left to end somebody else


def test_json_has_each_turn_and_milliseconds(dropping: Path, tmp_path: Path) -> None:
    save_replica(REPLICA, tmp_path / "costs.json")
    result = invoke(dropping, "--json", "--costs", tmp_path / "costs.json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["exit_code"], told["template"]) == (1, 1, "drops.jinja")
    broken = [one for one in told["turns"] if one["breaks"]]
    assert {one["case"] for one in broken} == {"calls, thoughts sent back"}
    tokens = broken[0]["tokens_again"]["32768"]
    assert broken[0]["ms_again"]["32768"] == pytest.approx(prompt_ns(REPLICA.costs, tokens, 32768) / 1e6)
    assert broken[0]["ms_again"]["32768"] > 0
    assert f"{broken[0]['ms_again']['32768']:,.0f} ms" in invoke(dropping, "--costs", tmp_path / "costs.json").stdout


def test_what_tokens_behind_others_take() -> None:
    """By the line of `simulate.cost`: so much a token, and so much a pair of positions."""
    device = (9e9, 9e9, 9e9, 10.0, 9e9, 1.0)
    cost = msgspec.structs.replace(REPLICA.costs, device=device, compute=())
    assert prompt_ns(cost, 2, 5) == 2 * 10 + (4 + 5)  # a token sees itself and all before it
    slower = msgspec.structs.replace(cost, compute=(0.0, 0.0, 0.0, 100.0, 0.0, 0.0))
    assert prompt_ns(slower, 2, 5) == 200


def test_a_model_brings_its_template_and_its_tokens() -> None:
    result = invoke("code")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("code, its own tokens.")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("no-such-model",), "neither a Hugging Face id"),
        (("code", "--costs", "/no/such/file"), "there is no file"),
    ],
)
def test_what_cannot_be(words: tuple[str, ...], told: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())
