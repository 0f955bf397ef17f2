"""The command line: `megatron-cp check | plan | doctor`, one module a command; `main` starts those of `apps` too."""
