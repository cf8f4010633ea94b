"""Long work shows a sign of life also where there is no terminal to draw on."""

import io
import re
import time

from rich.progress import TextColumn

from splittime.cli import progress
from splittime.cli.options import CleanConsole


def test_a_log_gets_lines_until_a_task_is_done(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(progress, "talk", lambda: CleanConsole(file=log, soft_wrap=True))
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.001)
    with progress.bars(TextColumn("x"), words=progress.count_words) as bars:
        done = bars.add_task("short", total=1, completed=1)
        bars.update(done, completed=1)
        going = bars.add_task("texts", total=12_000)
        bars.update(going, completed=3_000)
        deadline = time.monotonic() + 60
        while "texts" not in log.getvalue() and time.monotonic() < deadline:
            time.sleep(0.001)
    told = log.getvalue()
    assert "texts 3,000 of 12,000, " in told
    assert "short" not in told
    time.sleep(0.02)
    assert log.getvalue() == told, "nothing is told after the end"


def test_a_start_tells_what_it_does_at_once_and_until_it_is_over(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(progress, "talk", lambda: CleanConsole(file=log, soft_wrap=True))
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.001)
    with progress.loading("starting", at_once=True) as say:
        assert log.getvalue().startswith("starting\n")
        say("loading")
        deadline = time.monotonic() + 60
        while "loading" not in log.getvalue() and time.monotonic() < deadline:
            time.sleep(0.001)
    assert re.search(r"loading, \d+ s\n", log.getvalue())


def test_a_terminal_gets_a_bar_of_the_start(monkeypatch):
    drawn = io.StringIO()
    monkeypatch.setattr(
        progress, "talk", lambda: CleanConsole(file=drawn, force_terminal=True, width=80, color_system=None)
    )
    lengths = []
    with progress.loading("starting") as say:
        for share in (0.25, 0.75):
            say(f"loading, at {share}", share)
            deadline = time.monotonic() + 60
            while f"loading, at {share}" not in drawn.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
            line = drawn.getvalue().rpartition(f"loading, at {share}")[2]
            lengths.append(line.partition("0:00")[0].count("\u2501"))
    assert lengths == [progress.BAR_COLUMNS // 4, progress.BAR_COLUMNS * 3 // 4]


def test_what_begins_again_after_a_full_bar_is_told(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(progress, "talk", lambda: CleanConsole(file=log, soft_wrap=True))
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.001)
    with progress.loading("tuning") as say:
        say("run 1", 1.0)
        say("run 2", 0.5)
        deadline = time.monotonic() + 60
        while "run 2, " not in log.getvalue() and time.monotonic() < deadline:
            time.sleep(0.001)
    assert "run 2, " in log.getvalue()


def test_a_log_of_a_command_stays_silent_while_loading_is_quick(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(progress, "talk", lambda: CleanConsole(file=log, soft_wrap=True))
    with progress.loading("loading the model") as say:
        say("loading the model: layer 1 of 2", 0.5)
    assert log.getvalue() == ""


def test_what_has_no_parts_is_named_once(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(progress, "talk", lambda: CleanConsole(file=log, soft_wrap=True))
    with progress.loading("loading the models", at_once=True):
        pass
    assert log.getvalue() == "loading the models\n"
