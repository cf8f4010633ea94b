"""As `fake_serve_worker`, with an engine that can sleep."""

import sys
from dataclasses import replace
from pathlib import Path

import fake_serve_worker

sys.path.insert(0, str(Path(__file__).parents[1] / "drive"))
from fake_sleeper import FakeSleeper

from splittime.drive.worker import work


def build(settings, timeline, tell):
    parts = fake_serve_worker.build(settings, timeline, tell)
    return replace(parts, sleeper=FakeSleeper(parts.runner))


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], build)
