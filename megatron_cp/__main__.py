"""`python -m megatron_cp`: the command line, where the console script is not on the path."""

from megatron_cp.cli.main import console

if __name__ == "__main__":
    console()
