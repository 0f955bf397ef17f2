"""Differences between the releases of Megatron-Core that the adapter takes: 0.19.2, `main` and `dev`.

All other modules use what these three share. `dev` has the version of a release, so parts are looked for and versions
are not compared. A release that lacks one that the adapter needs is refused by its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import megatron.core
from megatron.core.ssm import gated_delta_net
from megatron.core.transformer import TransformerConfig

from megatron_cp.errors import ArgumentError
from megatron_cp.megatron.options import TAKEN, Plain
from megatron_cp.megatron.rules import unsupported_layers

# What our classes override or exchange, and no import would miss: an override of a method that is gone is never called.
_PARTS = {
    "models.gpt.gpt_layer_specs": ("get_gpt_mtp_block_spec",),
    "models.gpt.gpt_model": ("process_mtp_loss",),
    "models.hybrid.hybrid_model": ("process_mtp_loss",),
    "ssm.gated_delta_net": ("GatedDeltaNet._apply_gated_norm",),
    "ssm.gated_delta_net.common": ("HAVE_FLA",),
    "ssm.gated_delta_net.gdn": ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"),
    "ssm.mamba_mixer": ("MambaMixer", "ExtendedRMSNorm", "HAVE_MAMBA_SSM", "MAMBA_HAS_STATE_DTYPE", "HAVE_EINOPS"),
    "ssm.mamba_context_parallel": ("HAVE_EINOPS",),
    "transformer.multi_latent_attention": (
        "MLASelfAttention._qkv_down_projection", "MLASelfAttention._run_core_attention",
    ),
    "transformer.experimental_attention_variant.dsa": (
        "DSAttention._get_index_share_topk_holder", "DSAIndexer.forward_before_topk",
        "DSAIndexerLossLoggingHelper.save_loss_to_tracker", "DSAIndexerLossAutoScaler",
    ),
    "transformer.moe.router": (
        "TopKRouter.routing", "TopKRouter.attach_and_log_load_balancing_loss", "TopKRouter.apply_z_loss",
        "TopKRouter._apply_expert_bias",
    ),
    "transformer.multi_token_prediction": (
        "MultiTokenPredictionLayer._get_embeddings", "MTPLossAutoScaler", "roll_tensor", "process_mtp_loss",
        "MTPLossLoggingHelper.save_metrics_to_tracker", "_compute_mtp_acceptance_counts",
    ),
    "transformer.transformer_layer": ("TransformerLayer._forward_mlp",),
}  # fmt: skip


@contextlib.contextmanager
def refused_if_incomplete() -> Iterator[None]:
    """Refuses a Megatron-Core without a part that the adapter needs, of those that the block imports or of `_PARTS`.

    Raises:
        ArgumentError: one line with the release, its place and the first part that is missing.
    """
    try:
        for name, parts in _PARTS.items():
            module = import_module(f"megatron.core.{name}")
            for part in parts:
                if not _has(module, part):
                    raise _incomplete(f"megatron.core.{name}.{part}")
        yield
    except ImportError as error:
        module_name = error.name or ""
        if not module_name.startswith("megatron."):
            raise  # a package that Megatron needs
        missing = re.search(r"cannot import name '(\w+)'", str(error))
        raise _incomplete(f"{module_name}.{missing[1]}" if missing else module_name) from None


def _has(module: ModuleType, part: str) -> bool:
    found: Any = module
    for name in part.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def _incomplete(part: str) -> ArgumentError:
    release = f"{megatron.core.__version__} without {part}, of {next(iter(megatron.core.__path__))}"
    remedy = "Install one of these, or leave out --spec to keep Megatron's own layers."
    return ArgumentError("megatron-core", Plain(release), TAKEN, remedy)


# -- Options ---------------------------------------------------------------------------------------------------------

_FIELDS = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
# The default of --linear-cp-mode is Megatron's where it has the field (dev), else ours.
HAS_LINEAR_CP_MODE = "linear_cp_mode" in _FIELDS
LINEAR_CP_MODE: str = _FIELDS.get("linear_cp_mode", "auto")  # type: ignore[assignment]


# -- Layers ----------------------------------------------------------------------------------------------------------

HAS_GDN2 = hasattr(gated_delta_net, "GatedDeltaNet2")
# Latent attention drops the axis of a batch of one from rows of any packed batch; in dev, only in the format "thd".
LATENT_ROWS_KEEP_AXIS = "cp_partition_mode" in _FIELDS


@contextlib.contextmanager
def local_attention_is_ours(config: Any) -> Iterator[None]:
    """Keeps dev's checks from refusing schemes that its own attention on local layers does not have, and ours has."""
    given = config.cp_comm_type
    is_local = "fallback_to_eager_attn" in _FIELDS and config.transformer_impl == "local"
    if given is None or not is_local or config.fallback_to_eager_attn or config.experimental_attention_variant == "dsa":
        yield
        return
    config.cp_comm_type = ["all_gather"] * len(given) if isinstance(given, list) else "all_gather"
    try:
        yield
    finally:
        config.cp_comm_type = given


def layers_taken(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns those of a hybrid stack's layers that this Megatron has; dev has no latent attention there."""
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules

    known = {field.name for field in dataclasses.fields(HybridStackSubmodules)}
    return {name: value for name, value in fields.items() if name in known}


def refuse_other_layers(symbols: Iterable[str]) -> None:
    """Refuses layers of `--hybrid-layer-pattern` that only some of the releases have, such as dev's C, H and W."""
    for error in unsupported_layers(symbols):
        raise error
