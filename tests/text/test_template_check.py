"""Small templates, each with one fault that real ones have: what the check proves of them, and what it names."""

import pytest

from splittime.core.errors import ConfigError
from splittime.text.template_check import CASES, CAUSES, TurnCheck, check_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
OPEN = "{% if add_generation_prompt %}<|a|>{% endif %}"
ARGUMENTS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


def history(before: str = "", assistant: str = "", opening: str = OPEN, first: str = TOOLS) -> str:
    """A template that writes each message as it is. before: a message; assistant: what it wrote."""
    told = f"{before}<|{{{{ m.role[0] }}}}|>{assistant}{{{{ m.content }}}}{ARGUMENTS}\n"
    return f"{first}{{% for m in messages %}}{told}{{% endfor %}}{opening}"


SOUND = history(assistant=THOUGHT)
LAST_USER = (
    "{% set ns = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.at = loop.index0 %}"
)
LAST_USER += "{% endif %}{% endfor %}"
IN_LAST_TURN = "{% if m.role == 'assistant' and loop.index0 > ns.at %}"
DROPS = history(assistant=f"{IN_LAST_TURN}{THOUGHT}{{% endif %}}", first=LAST_USER + TOOLS)
EMPTY = history(assistant=f"{IN_LAST_TURN}<think>\n\n</think>\n{{% endif %}}", first=LAST_USER + TOOLS)
MOVES = history(before="{% if loop.index0 == ns.at %}" + TOOLS + "{% endif %}", first=LAST_USER)
DATED = history(first="{{ strftime_now('%d %b %Y') }}")
CLOCKED = history(first="{{ strftime_now('%H:%M:%S') }}")
FLAGGED = history(first="{% if enable_thinking %}think first{% endif %}" + TOOLS)
EFFORT = history(first="effort {{ reasoning_effort }}")
SYSTEM_FIRST = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}" + history(
    before="{% if m.role != 'system' %}"
).replace("\n{% endfor %}" + OPEN, "\n{% endif %}{% endfor %}" + OPEN)
OPENED = history(
    opening="{% if add_generation_prompt %}<|a|><think>\n{% endif %}", assistant="{# reasoning </think> #}"
)


def marks(source: str, **more: object) -> dict[str, str]:
    """By case, the verdicts of its turns by their first letters."""
    found: dict[str, str] = {}
    for one in check_template(source, TOKENS, **more):
        found[one.case] = found.get(one.case, "") + one.verdict[:2]
    return found


def broken(source: str) -> TurnCheck:
    return next(one for one in check_template(source, TOKENS) if one.verdict == "history")


def test_a_sound_template_holds_in_every_turn() -> None:
    found = marks(SOUND)
    assert set(found) == {case.name for case in CASES if case.flags == ("on",) and not case.days}
    assert set("".join(found.values())) == set("ho")
    assert found["calls, thoughts sent back"] == "ho" * 5


@pytest.mark.parametrize(
    ("source", "case", "cause", "breaks"),
    [
        (DROPS, "calls, thoughts sent back", "thoughts", True),
        (EMPTY, "calls", "empty block", True),
        (MOVES, "calls", "moves", True),
        (DATED, "the next day", "date", False),
        (CLOCKED, "chat", "clock", True),
        (FLAGGED, "thinking switched", "flag", False),
        (EFFORT, "effort switched", "flag", False),
        (SYSTEM_FIRST, "a system's message later", "system", False),
    ],
)
def test_a_fault_is_found_and_named(source: str, case: str, cause: str, breaks: bool) -> None:
    one = broken(source)
    assert (one.case, one.cause, one.breaks) == (case, cause, breaks)
    assert one.cause in CAUSES


def test_thoughts_stay_until_a_user_speaks_again() -> None:
    """As Qwen3 has it: the steps of an agent hold, and the turn behind them begins at the first thought."""
    assert marks(DROPS)["calls, thoughts sent back"] == "hohohihohi"
    one = broken(DROPS)
    assert one.turn == 4
    assert one.before.startswith("<|a|><think>\nthought2x0")
    assert one.now.startswith("<|a|>[look_up")


def test_the_first_difference_is_counted_in_tokens() -> None:
    """Of characters that are tokens, the place is where the texts part."""
    (one,) = (each for each in check_template(DATED, TOKENS, list) if each.verdict == "history")
    assert (one.at, one.before[:11], one.now[:11]) == (0, "29 Nov 2026", "30 Nov 2026")
    flagged = next(each for each in check_template(FLAGGED, TOKENS, list) if each.verdict == "history")
    assert flagged.at == 0
    assert flagged.tokens_again(8192) == 8192
    thoughts = next(each for each in check_template(DROPS, TOKENS, list) if each.verdict == "history")
    whole, again = thoughts.tokens, thoughts.tokens - thoughts.at
    assert 0 < again < whole
    assert thoughts.tokens_again(whole) == again
    assert thoughts.tokens_again(10 * whole) == 10 * again


def test_what_opens_an_answer_costs_the_answer_alone() -> None:
    found = check_template(OPENED, TOKENS)
    assert {one.verdict for one in found} == {"answer"}
    assert {one.cause for one in found if one.case == "chat"} == {"opening"}
    assert not any(one.breaks or one.tokens_again(8192) for one in found)


def test_a_template_that_refuses_says_so_and_is_not_broken() -> None:
    picky = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}" + history(first="")
    (one,) = (each for each in check_template(picky, TOKENS) if each.case == "calls")
    assert (one.verdict, one.turn, one.breaks) == ("refused", 1, False)
    assert "no tools here" in one.now


def test_an_hour_differs_within_a_day_and_not_between_days() -> None:
    found = marks(CLOCKED)
    assert found["chat"] == "hihi"
    assert found["the next day"] == "hoho"


@pytest.mark.parametrize(
    ("written", "cause"),
    [
        ("{{ m.content | upper }}", "otherwise"),
        ("{{ m.content | replace(' ', '_') }}", "otherwise"),
        ("{{ m.content if m.role != 'tool' else m.content[:50] }}", "opening"),
        ("{{ m.content if m.role != 'assistant' }}", "otherwise"),
    ],
)
@pytest.mark.parametrize("opens", [False, True])
def test_a_message_that_is_written_otherwise_breaks_nothing(written: str, cause: str, opens: bool) -> None:
    """All that was written comes back; what the model gave is computed again where it is not written as it gave it."""
    source = (OPENED if opens else SOUND).replace("{{ m.content }}", written)
    found = [one for one in check_template(source, TOKENS) if not one.case.startswith("calls,")]
    assert not any(one.breaks or one.verdict == "history" for one in found)
    chat = {(one.verdict, one.cause) for one in found if one.case == "chat"}
    assert chat == ({("holds", "")} if cause == "opening" and not opens else {("answer", cause)})
    tools = {one.verdict for one in found if one.case == "calls" and one.turn < 4}
    assert tools == ({"answer"} if opens else {"holds"})


@pytest.mark.parametrize("source", ["", "the same, always", "{% for m in messages[2:] %}{{ m.content }}{% endfor %}"])
def test_a_template_that_writes_nothing_of_the_history_breaks_nothing(source: str) -> None:
    found = check_template(source, TOKENS)
    assert {one.verdict for one in found} <= {"holds", "answer"}
    assert all(one.tokens_again(8192) == 0 for one in found)


def test_calls_that_are_written_otherwise_are_computed_again() -> None:
    source = SOUND.replace("c.function.arguments | tojson", "c.function.arguments | tojson | replace(' ', '_')")
    (one, *_) = (each for each in check_template(source, TOKENS) if each.case == "calls")
    assert (one.verdict, one.cause) == ("answer", "otherwise")


def test_no_tokens_before_are_no_division_by_zero() -> None:
    """A tokenizer may drop white space, which is a text and no token."""
    assert TurnCheck(case="chat", turn=2, verdict="history").tokens_again(8192) == 8192


def test_no_template_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="does not parse"):
        check_template("{% for %}", TOKENS)


def test_thoughts_that_never_come_back_cost_the_answer() -> None:
    """The prompt before comes back whole, but what was computed behind it began with thoughts."""
    found = [one for one in check_template(history(before="{# no reasoning #}"), TOKENS) if "thoughts" in one.case]
    assert {(one.verdict, one.cause) for one in found} == {("answer", "thoughts")}
