"""Who runs next, on which blocks, and why the others wait. Pure: no clock, no torch, no logging."""
