"""ASGI pieces that a server and a gateway share: HTTP parsing, connections, exchanges."""
