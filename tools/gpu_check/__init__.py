"""What a machine with a GPU should check and measure, in steps of less than ten minutes. See tools/README.md."""
