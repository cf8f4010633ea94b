"""The operations, written to be read: loops and textbook formulas. What the fast backends are tested against."""
