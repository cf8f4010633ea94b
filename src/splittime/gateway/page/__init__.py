"""The gateway's page at `/`: `paths` answers with what it is told, and with the files that it loads.

It has the form and most scripts of the server's page, whose files it gives out beside its own.
"""
