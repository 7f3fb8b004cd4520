"""Run plans: algorithms, their settings, evaluation, checkpoints and loggers."""
