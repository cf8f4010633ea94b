"""Models: a table of architectures, one decoder that carries them all out, and how weights get into it."""
