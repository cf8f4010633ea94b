"""Clusters of `splittime up` under load: what happens when it grows, when something dies, and what the way in costs."""
