"""The client side of HTTP: connections, event streams, scraping, and the dialects of other servers."""
