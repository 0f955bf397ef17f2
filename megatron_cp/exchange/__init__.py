"""The local halves of a head exchange: from sharded tokens to sharded heads, and back.

Owns `Sections` (the feature axis as named blocks of heads, and the heads that each rank computes) and the pack and
unpack around one collective. Knows layouts; knows neither communication (`executor/`) nor the purpose of the heads.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
