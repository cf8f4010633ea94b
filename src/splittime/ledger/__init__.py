"""The ledger: every request's account and every step's record. Facts only; models of them live in `diagnose`."""
