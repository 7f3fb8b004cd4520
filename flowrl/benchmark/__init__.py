"""Benchmark: train tuned examples with several seeds, and compare their scores with known ones."""
