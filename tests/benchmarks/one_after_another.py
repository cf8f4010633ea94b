"""Runs benchmarks in this process, so that torch is imported once: `[[module, [arguments]], ...]` as JSON on standard
input; on standard output `{module: its exit status, or the traceback}`."""

import contextlib
import json
import runpy
import sys
import time
import traceback


def ending_of(module: str, arguments: list[str]) -> int | str:
    sys.argv = [module, *arguments]
    begin_s = time.monotonic()
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        return traceback.format_exc()
    finally:
        print(f"{module}: {time.monotonic() - begin_s:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = {module: ending_of(module, arguments) for module, arguments in json.load(sys.stdin)}
    json.dump(found, sys.stdout)
