"""Books as a ledger file, as a server leaves one behind."""

from pathlib import Path

from splittime.diagnose.books import Books
from splittime.ledger.store import Ledger


def ledger_file(books: Books, path: Path) -> Path:
    ledger = Ledger(path)
    ledger.describe_by(lambda: books.facts)
    for account in books.accounts:
        ledger.add_account(account)
    for step in books.steps:
        ledger.add_step(step)
    ledger.close()
    return path
