"""The command line: a module for each of `megatron-cp check | plan | doctor`; `main` also starts those of `apps`."""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
