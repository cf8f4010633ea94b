"""The headings of `-h`: every setting has one, and each flag is told once, under it."""

import re

import pytest
from typer.testing import CliRunner

from splittime.assemble.settings import MODEL, SETTINGS
from splittime.cli.main import app
from splittime.cli.panels import COMMON, OTHER, PANELS, panel_of

NAMES = [name for names in PANELS.values() for name in names]


def test_every_setting_has_one_heading():
    assert sorted(NAMES) == sorted(setting.name for setting in SETTINGS if setting is not MODEL)
    assert all(panel_of(setting) != OTHER for setting in SETTINGS if setting is not MODEL)
    assert set(NAMES) > COMMON


@pytest.mark.parametrize("command", ["serve", "run"])
def test_help_lists_each_flag_once_under_its_heading(command):
    shown = CliRunner().invoke(app, [command, "--help-all"]).stdout
    at = [shown.index(f"\n{panel}:\n") for panel in PANELS if f"\n{panel}:\n" in shown]
    assert at == sorted(at)
    assert len(at) >= 5
    flags = [line.split()[0] for line in shown.splitlines() if line.startswith("  --")]
    assert len(flags) == len(set(flags)) > 20
    assert shown.index("\nModel:\n") < shown.index("--max-model-len N") < shown.index("\nMemory:\n")


def test_help_all_may_stand_behind_a_groups_own_flags():
    shown = CliRunner().invoke(app, ["gateway", "--config", "x.toml", "--help-all"])
    assert shown.exit_code == 0
    assert shown.stdout == CliRunner().invoke(app, ["gateway", "--help-all"]).stdout


@pytest.mark.parametrize("command", ["serve", "run", "config show", "tune", "simulate", "bench run", "plan"])
def test_flags_that_are_rarely_needed_wait_for_help_all(command):
    shown, whole = (CliRunner().invoke(app, [*command.split(), asked]).stdout for asked in ("-h", "--help-all"))
    few, all_of_them = (set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)) for text in (shown, whole))
    number = int(re.search(r"--help-all +Show (\d+) flags more", shown)[1])
    assert len(all_of_them) - len(few - {"--help-all"}) == number > 5
    assert few - {"--help-all"} < all_of_them
    assert "--help-all" not in whole


def test_a_default_size_is_told_as_a_person_writes_it():
    shown = CliRunner().invoke(app, ["serve", "--help-all"]).stdout
    assert "Default: 4MiB." in shown
    assert "4194304" not in shown
