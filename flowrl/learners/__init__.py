"""Learners: update policies in this thread, in a background thread, on actors, or on workers."""
