"""Show runs on a web page: a local server, and reports as single files."""
