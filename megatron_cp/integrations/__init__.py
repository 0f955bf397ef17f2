"""Adapters for training frameworks that use transformers' models: `verl`, `axolotl` and `llamafactory`.

The rest of the package imports none of them, and each needs its framework only where it is used.
"""
