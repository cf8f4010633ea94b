"""The headings of `-h`: every setting has one, and each flag is told once, under it."""

import pytest
from typer.testing import CliRunner

from splittime.assemble.settings import MODEL, SETTINGS
from splittime.cli.main import app
from splittime.cli.panels import OTHER, PANELS, panel_of

NAMES = [name for names in PANELS.values() for name in names]


def test_every_setting_has_one_heading():
    assert sorted(NAMES) == sorted(setting.name for setting in SETTINGS if setting is not MODEL)
    assert all(panel_of(setting) != OTHER for setting in SETTINGS if setting is not MODEL)


@pytest.mark.parametrize("command", ["serve", "run"])
def test_help_lists_each_flag_once_under_its_heading(command):
    shown = CliRunner().invoke(app, [command, "-h"]).stdout
    at = [shown.index(f"\n{panel}:\n") for panel in PANELS if f"\n{panel}:\n" in shown]
    assert at == sorted(at)
    assert len(at) >= 5
    flags = [line.split()[0] for line in shown.splitlines() if line.startswith("  --")]
    assert len(flags) == len(set(flags)) > 20
    assert shown.index("\nModel:\n") < shown.index("--max-model-len N") < shown.index("\nMemory:\n")


def test_a_default_size_is_told_as_a_person_writes_it():
    shown = CliRunner().invoke(app, ["serve", "-h"]).stdout
    assert "Default: 4MiB." in shown
    assert "4194304" not in shown
