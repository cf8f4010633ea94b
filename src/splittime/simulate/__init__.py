"""Runners without a model, for the same scheduler and the same loop under any clock."""
