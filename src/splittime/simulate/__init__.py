"""Runs the scheduler and its loop under a virtual clock: without a model, for recorded requests, with a change."""
