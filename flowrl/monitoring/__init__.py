"""Show what a running plan does: its activity, a diagnosis, and checks before it runs."""
