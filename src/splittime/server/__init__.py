"""The HTTP server: from a socket to `Request`s and back, with every request's account kept from first to last byte."""
