"""Offline work on models: quantise, measure quality, distil."""
