"""Adapters for training frameworks that use transformers' models: `megatron_cp.integrations.verl`.

Each imports its framework only where it is used.
"""
