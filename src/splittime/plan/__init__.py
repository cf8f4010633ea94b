"""How much one server can carry, and how many of them a load needs."""
