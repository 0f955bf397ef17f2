"""Checks and measurements for a machine with a GPU, in steps of less than ten minutes. See tools/README.md."""
