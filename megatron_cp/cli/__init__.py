"""The command line: `megatron-cp check | plan | doctor`, one file a command, `main` finds them."""
