"""Reads a ledger file and says what held the requests back. The server that wrote it may have ended long ago.

splittime serve --ledger-file today.sqlite
python examples/diagnose_file.py today.sqlite
"""

import sys
from pathlib import Path

from splittime.diagnose.books import books_from_file
from splittime.diagnose.doctor import diagnose


def main() -> None:
    diagnosis = diagnose(books_from_file(Path(sys.argv[1])))
    print(f"{diagnosis.num_requests} requests, {diagnosis.num_steps} steps")
    for spent in diagnosis.spent:
        print(f"  {spent.share:6.1%} {spent.meaning}")
    for finding in diagnosis.findings:
        print(f"\n{finding.name}: {finding.share_of_time:.0%} of the requests' time. {finding.claim}")
        print(f"  try: {finding.cure.command or finding.cure.sentence}")
    if not diagnosis.could_tell:
        print("\nToo little was seen to call the server healthy.")


if __name__ == "__main__":
    main()
