"""OpenTelemetry: closed accounts as spans (`spans`), told to a collector off the path (`exporter`)."""
