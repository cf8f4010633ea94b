"""An incident in one file: what a server's books, its state and its metrics say of it, without prompts and secrets.

`gather` decides what of a record may be given away (`names`: of names, `attempts`: of a gateway's decisions,
`exposition`: of metrics), asks a server or reads a ledger file, `bundle` says what happened when and
writes the file within a bound and reads it again.
"""
