"""What runs a plan: algorithms, their settings, evaluation, checkpoints, loggers."""
