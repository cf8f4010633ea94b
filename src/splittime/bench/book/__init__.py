"""The load generator's own book of a run: records, and the figures computed from them."""
