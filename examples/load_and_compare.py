"""Sends one load twice, with fewer slots the second time, and says whether that made the server slower.

python examples/load_and_compare.py [URL]            an idle splittime server
"""

import asyncio
import json
import sys
from urllib.request import Request, urlopen

from splittime.bench.book.records import Run
from splittime.bench.draw import draw
from splittime.bench.run import run_schedule
from splittime.bench.spec import LoadSpec
from splittime.diagnose.compare import compare
from splittime.wire.target import Target

LOAD = LoadSpec(rate=20.0, num_requests=60, input_tokens="64", output_tokens="32", seed=7)


def run(url: str, max_num_seqs: int) -> Run:
    body = json.dumps({"max_num_seqs": max_num_seqs}).encode()
    urlopen(Request(f"{url}/knobs", body, {"Content-Type": "application/json"}, method="PATCH")).close()
    schedule = draw(LOAD, vocab_size=4096, max_model_len=2048, salt=f"{max_num_seqs} slots")
    return asyncio.run(run_schedule(schedule, [Target(url=url)]))


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    found = compare([run(url, max_num_seqs=64)], [run(url, max_num_seqs=1)])
    for row in found.metrics:
        print(f"{row.name:16} {row.verdict}")


if __name__ == "__main__":
    main()
