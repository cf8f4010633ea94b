"""The command line: one file a command, each a thin shell over a Python call. Here the two columns meet."""
