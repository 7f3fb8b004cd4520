"""Recorded experience: Parquet files, Minari data sets, off-policy evaluation."""
