"""As `fake_serve_worker`, with an engine that can sleep."""

import sys
from pathlib import Path

import fake_serve_worker

from splittime.engine.worker import work

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from fake_sleeper import FakeSleeper


def build(settings, timeline, tell):
    engine, resolved = fake_serve_worker.build(settings, timeline, tell)
    engine.bed.sleeper = FakeSleeper(engine._runner)
    return engine, resolved


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], build)
