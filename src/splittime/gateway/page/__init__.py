"""The gateway's page at `/`: `data` (what it is told) and `paths` (which answer, with the files that it loads).

It has the form and most scripts of the server's page, whose files it gives out beside its own.
"""
