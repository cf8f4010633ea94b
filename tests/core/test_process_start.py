"""A process knows when it was made."""

import subprocess
import sys
import time

SCRIPT = """
import time
time.sleep(0.3)
from splittime.core.this_process import process_start_ns
print(process_start_ns(), time.monotonic_ns())
"""


def test_it_is_before_the_first_line_ran():
    before_ns = time.monotonic_ns()
    told = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout.split()
    started_ns, now_ns = map(int, told)
    assert before_ns - 20_000_000 <= started_ns <= now_ns - 280_000_000
