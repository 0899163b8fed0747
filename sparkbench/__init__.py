"""sparkbench: runs, checks, times and compares speculative-decoding methods on transformers models."""

__version__ = "0.1.0"
