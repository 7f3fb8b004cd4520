"""Training runs, from Python and from the command line: stop rules, progress, run directories."""
