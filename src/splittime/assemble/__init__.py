"""Where the logic and tensor columns meet: settings, model source, building an engine, the worker entry point."""
