"""Configs of a running gateway in versions: swapped whole, or tried on a share of tenants first."""
