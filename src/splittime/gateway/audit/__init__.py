"""The audit log: who asked for what and how it ended, in lines that are chained by their hashes."""
