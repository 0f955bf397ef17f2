"""The command line: `megatron-cp check | plan | doctor`, one module a command; `main` starts those of `apps` too."""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
