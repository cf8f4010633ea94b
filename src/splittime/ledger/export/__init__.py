"""What leaves the ledger: JSON, Prometheus, Perfetto, Server-Timing. Leaves: they read or subscribe, nothing imports them
but the edges."""

from splittime.ledger.export.account_json import account_from_json, account_json, stages_json

__all__ = ["account_from_json", "account_json", "stages_json"]
