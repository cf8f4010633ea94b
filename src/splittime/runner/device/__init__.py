"""The runner of a card: steps are put on its stream one behind the other, and none waits for the host."""
