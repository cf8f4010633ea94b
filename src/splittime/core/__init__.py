"""The vocabulary every other package speaks: requests, plans, sampling parameters, errors, clocks. No torch, no I/O."""
