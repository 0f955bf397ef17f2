"""`build_on_meta`: builds a transformers model from its configuration without memory, to read its layers' shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_cp.errors import ArgumentError
from megatron_cp.planner.batch import AttentionSpec
from megatron_cp.transformers.slots import attention_slot, is_attention


def build_on_meta(values: Mapping[str, Any]) -> tuple[nn.Module, list[tuple[nn.Module, AttentionSpec, nn.Module]]]:
    """Returns the model on the meta device, and each decoder layer with its attention's spec and module.

    No code but that of transformers runs: a configuration that names code of its own is read as one of its type.

    Args:
        values: the fields of a config.json.

    Raises:
        ArgumentError: a configuration of which transformers builds no language model.
    """
    given = {name: value for name, value in values.items() if name not in ("model_type", "auto_map")}
    try:
        config = AutoConfig.for_model(values["model_type"], **given)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        allowed = "a type of language model that transformers builds"
        raise ArgumentError("model_type", values.get("model_type"), allowed, str(error)[:200]) from error
    found = []
    for layer in getattr(model.base_model, "layers", ()):
        for module in layer.modules():
            if is_attention(module, config):
                found.append((layer, attention_slot(module, config), module))
                break
    return model, found
