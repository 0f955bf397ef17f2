"""The command line: `megatron-cp train | check | plan | bench | doctor`, one module a command, `main` finds them."""
