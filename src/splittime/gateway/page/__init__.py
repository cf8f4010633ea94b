"""The gateway's page at `/`: `files` (what the browser loads), `data` (what it is told) and `paths` (which answer).

It has the form and most scripts of the server's page, whose files it gives out beside its own.
"""
