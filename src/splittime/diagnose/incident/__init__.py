"""An incident in one file: what a server's books, its state and its metrics say of it, without prompts and secrets.

`shareable` decides what of a record may be given away (`names`: of names, `attempts`: of a gateway's decisions,
`exposition`: of metrics), `gather` asks a server or reads a ledger file, `timeline` says what happened when, `bundle`
writes the file within a bound and reads it again.
"""
