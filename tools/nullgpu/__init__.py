"""An emulated CUDA device: torch's CUDA path on a machine without a GPU. See README.md."""
