"""Asks a server for its slowest request, and reads that request's account: which stage was the longest, and why.

python examples/why_slow.py [URL]
"""

import json
import sys
from urllib.request import urlopen


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with urlopen(f"{url}/ledger/requests?limit=1000") as answer:
        accounts = json.load(answer)["accounts"]
    if not accounts:
        sys.exit("The server has answered no request yet.")
    slowest = max(accounts, key=lambda account: account["end_ns"] - account["start_ns"])
    spent_ns: dict[str, int] = {}
    for part in slowest["stages"]:
        name = part["stage"] + (f": {part['cause']}" if part["cause"] else "")
        spent_ns[name] = spent_ns.get(name, 0) + part["end_ns"] - part["begin_ns"]
    total_ns = slowest["end_ns"] - slowest["start_ns"]
    assert sum(spent_ns.values()) == total_ns  # an account adds up exactly
    print(
        f"{slowest['request_id']}: {slowest['prompt_tokens']} prompt tokens, {slowest['output_tokens']} output tokens"
    )
    for name, ns in sorted(spent_ns.items(), key=lambda item: -item[1]):
        print(f"  {name:24} {ns / 1e6:9.3f} ms  {ns / total_ns:6.1%}")


if __name__ == "__main__":
    main()
