"""What an operator starts from: alert rules, dashboards, manifests. `generate.py` writes what is made from the code."""
