"""What runs an engine: its loop and its process, and the client that the server talks to."""
