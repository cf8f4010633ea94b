"""What closed books mean: explanations that anyone can repeat from the same file. No live objects."""
