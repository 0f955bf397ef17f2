"""Tokens-sharded to heads-sharded and back: the local halves of a head exchange.

Owns `Sections` (the feature axis as named blocks of heads, and which heads each rank computes) and the pack and unpack
around one collective. Knows layouts; knows neither ranks that talk (`executor/`) nor what the heads are for.
"""

from megatron_cp.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
