"""Which model and which upstreams a request may have: rules of the config, and what another config would have said."""
