"""Adapters for training frameworks: `megatron_cp.integrations.verl`, `.torchtitan` and `.automodel`.

Each imports its framework only where it is used.
"""
