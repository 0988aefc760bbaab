"""Benchmarks that print ratios: our code against a stated reference in the same rounds."""

from neuclip_lib.bench.cases import TABLES, run_tables

__all__ = ["TABLES", "run_tables"]
