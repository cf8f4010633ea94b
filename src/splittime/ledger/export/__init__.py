"""What leaves the ledger: JSON, Prometheus, Perfetto, Server-Timing. They read or subscribe; only edges import them."""

from splittime.ledger.export.account_json import account_from_json, account_json, stages_json

__all__ = ["account_from_json", "account_json", "stages_json"]
