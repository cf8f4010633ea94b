"""The same scheduler and loop under a virtual clock: without a model, for recorded requests, and with a change."""
