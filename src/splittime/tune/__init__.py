"""What to set for an SLO: searched in the simulator, proved on the real engine, kept in a notebook."""
