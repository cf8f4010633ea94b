"""What leaves the ledger: Prometheus, Perfetto, Server-Timing. They read or subscribe; only edges import them."""
