"""A client of its own, without any library: streams an answer and reads its `timing` from the last event.

python examples/read_timing.py [HOST:PORT]
"""

import http.client
import json
import sys
import time


def main() -> None:
    connection = http.client.HTTPConnection(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8000")
    body = json.dumps({"prompt": "class Stack:", "max_tokens": 32, "stream": True})
    sent_ns = time.monotonic_ns()
    headers = {"Content-Type": "application/json", "X-Include-Timing": "1"}
    connection.request("POST", "/v1/completions", body, headers)
    timing = {}
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue  # an empty line between events, or the final [DONE]
        event = json.loads(line[6:])
        print("".join(choice["text"] for choice in event["choices"]), end="", flush=True)
        timing = event.get("timing", timing)
    felt_ns = time.monotonic_ns() - sent_ns
    by_server_ns = sum(stage["end_ns"] - stage["begin_ns"] for stage in timing["stages"])
    print(f"\n\nthis client waited {felt_ns / 1e6:.3f} ms; the server accounts for {by_server_ns / 1e6:.3f} ms of it")
    for stage in timing["stages"]:
        print(f"  {stage['stage']:10} {stage['cause'] or '':16} {(stage['end_ns'] - stage['begin_ns']) / 1e6:8.3f} ms")


if __name__ == "__main__":
    main()
