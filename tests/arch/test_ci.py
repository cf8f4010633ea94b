"""`.ci/run` ends with 0 only if each of its lanes has ended, and well."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci" / "run"
MAKE = """#!/bin/sh
echo $1 >> lanes
for lane in $ENDINGS; do test ${lane%=*} = $1 && exit ${lane#*=}; done
exit 0
"""
LANES = ["lint", "check-timing", "setup-vllm", "check-vllm", "check-whole"]


@pytest.mark.parametrize(
    ("endings", "is_green", "lanes"),
    [
        ("", True, LANES),
        ("check-whole=2", True, [*LANES, "failed-again"]),
        ("check-whole=2 failed-again=2", False, [*LANES, "failed-again"]),
        ("check-whole=124", False, LANES),
        ("check-timing=137", False, LANES[:2]),
        ("check-vllm=2", False, LANES[:4]),
        ("check-vllm=124", False, LANES[:4]),
        ("setup-vllm=2", True, [*LANES[:3], "check-whole"]),
        ("lint=2", False, LANES[:1]),
    ],
)
def test_red_is_red(tmp_path, endings, is_green, lanes):
    for name, text in (("make", MAKE), (".venv/bin/python", "#!/bin/sh\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".ci").mkdir()
    shutil.copy(RUN, tmp_path / ".ci" / "run")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ENDINGS": endings}
    run = subprocess.run([tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60)
    assert (run.returncode == 0) is is_green, run.stderr
    assert (tmp_path / "lanes").read_text().split() == lanes
