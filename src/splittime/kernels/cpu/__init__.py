"""The operations on a CPU with nothing but torch: few calls a layer, packed weights, keys gathered by whole tiles."""
