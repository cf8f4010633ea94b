"""The engine: the loop that turns plans into tokens, the process around it, and the client that talks to it."""
