"""Megatron's flags, from a table of its parser: it takes a job's flags without importing torch or Megatron.

`python -m tools.megatron_features` writes the table, `flags.json`, from the parser of the installed Megatron.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from importlib.resources import files
from typing import Any

_TYPES = {"int": int, "float": float, "str": str}


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(files("megatron_cp.megatron").joinpath("flags.json").read_text())
    return table


def version() -> str:
    """Returns the version of Megatron-Core whose flags these are."""
    return str(_table()["megatron-core"])


def add_megatrons_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all flags of Megatron's training; those of `read_by_megatron` take any text as their value."""
    for names, settings in _table()["flags"]:
        words = dict(settings)
        if "type" in words:
            words["type"] = _TYPES[words["type"]]
        words.pop("reader", None)
        if words.get("action") == "boolean_optional":
            names, words["action"] = names[:1], argparse.BooleanOptionalAction
        parser.add_argument(*names, **words)


def read_by_megatron() -> set[str]:
    """Returns the flags whose values have a reader of Megatron's own, such as patterns of layers."""
    return {names[0] for names, settings in _table()["flags"] if "reader" in settings}


class Flags:
    """Presents parsed flags under the names that they have in Megatron's configuration.

    Names that are set on it, such as a scheme in its own spelling, hide those of the flags.
    """

    # Fields of the configuration that no flag sets; our configuration sets the first.
    variable_seq_lengths = True
    log_max_attention_logit = False

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        args = self._args
        if name == "cuda_graph_impl":
            older = {"local": args.enable_cuda_graph, "transformer_engine": args.external_cuda_graph}
            return next((impl for impl, is_given in older.items() if is_given), args.cuda_graph_impl)
        if name == "cuda_graph_modules":
            return args.cuda_graph_scope_deprecated or args.cuda_graph_modules
        if name == "apply_rope_fusion":
            has_phases = args.position_embedding_type == "rope" or args.use_rotary_position_embeddings
            return args.apply_rope_fusion and has_phases
        if name == "recompute_granularity" and args.recompute_activations:
            return "selective"
        if name == "virtual_pipeline_model_parallel_size":
            return args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank
        if name == "experimental_attention_variant" and "D" in (args.hybrid_layer_pattern or ""):
            return "dsa"
        if name == "num_query_groups":
            return args.num_query_groups if args.group_query_attention else args.num_attention_heads
        if name == "kv_channels" and args.kv_channels is None:
            return args.hidden_size // args.num_attention_heads
        value = getattr(args, {"num_moe_experts": "num_experts"}.get(name, name))
        return value[0] if isinstance(value, list) and len(value) == 1 else value
