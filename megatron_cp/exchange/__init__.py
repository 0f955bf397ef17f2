"""The local halves of a head exchange: from sharded tokens to sharded heads, and back.

Owns `Sections` (the feature axis as named blocks of heads, and the heads that each rank computes) and the pack and
unpack around one collective. Knows layouts; knows neither communication (`executor/`) nor the purpose of the heads.
"""
