"""`read_model`: reads a preset's name, a Hugging Face `config.json`, or Megatron's flags. No torch in here."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_cp.apps.estimate.built_models import can_build, read_built
from megatron_cp.apps.estimate.hub_configs import LEFT_OUT, MODEL_TYPES, TIED
from megatron_cp.apps.estimate.megatron_flags import read_flags
from megatron_cp.apps.estimate.model_fields import Fields
from megatron_cp.apps.estimate.model_presets import PRESETS
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.apps.estimate.towers import read_tower, text_values
from megatron_cp.errors import ArgumentError
from megatron_cp.planner import did_you_mean

_COMMENTS = re.compile(r"^\s*#.*$|\\$", re.MULTILINE)  # and the backslash at the end of a shell's line
_MAX_BYTES = 10_000_000  # largest config.json: a checkpoint that is given instead is not read


def read_model(text: str) -> ModelSpec:
    """Returns a whole model from its name, file or flags.

    Args:
        text: the name of a preset, such as "llama3-8b"; the path of a Hugging Face `config.json`, or of its folder; or
            Megatron's flags in one string, or in a file, which begins with "--".

    Raises:
        ArgumentError: an unknown name, a file that cannot be read, an unknown type of model, or impossible sizes.

    Example:
        >>> round(read_model("llama3-8b").parameters / 1e9, 2)
        8.03
        >>> flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 128 --disable-bias-linear"
        >>> read_model(flags).parameters
        106816
    """
    if not isinstance(text, str) or not text.strip():
        raise ArgumentError("model", text, _allowed())
    text = text.strip()
    if text.startswith("--"):
        return read_flags(text)
    if text in PRESETS:
        return PRESETS[text]
    if re.fullmatch(r"[\w-]+/[\w.-]+", text) and not text.endswith(".json") and not _exists(text):
        near = did_you_mean(text.rpartition("/")[2], PRESETS, alike=0.6)
        remedy = f"plan downloads nothing: pass the model's config.json, or a preset. {near}".rstrip()
        raise ArgumentError("model", text, _allowed(), remedy)
    if not (text.endswith(".json") or os.sep in text or _exists(text)):
        raise ArgumentError("model", text, _allowed(), did_you_mean(text, PRESETS))
    return _read_config(text)


def _allowed() -> str:
    return f"{' or '.join(PRESETS)}, the path of a config.json, or Megatron's flags in one string or a file"


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long for a path, or with a zero byte
        return False


def _read_config(text: str) -> ModelSpec:
    path, content = _content(text)
    flags = _COMMENTS.sub(" ", content).strip()
    if flags.startswith("--"):
        return read_flags(flags)
    given = _values(text, content)
    try:
        values = text_values(given)
        model_type = values.get("model_type")
        name = path.absolute().parent.name or str(model_type)
        if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
            model = _built(text, values, model_type, name)
            return replace(model, tower=read_tower(given, model.hidden_size))
        config = Fields(values)
        sizes = config.size("hidden_size"), config.size("vocab_size")
        tied = config.flag("tie_word_embeddings", model_type in TIED)
        left_out = [
            f"{words} ({config.get(name)})" for name, words in LEFT_OUT.get(model_type, {}).items() if config.get(name)
        ]
        left_out += ["the vision tower"] * bool(given.get("vision_config"))
        source = ", without ".join([f"{text}, model type {model_type}", *left_out])
        blocks = MODEL_TYPES[model_type](config)
        return ModelSpec(name, *sizes, tied, blocks, source, read_tower(given, sizes[0]))
    except ArgumentError as error:
        raise ArgumentError(f"{text}: {error.argument}", error.given, error.allowed, error.remedy) from None


def _built(text: str, values: dict[str, Any], model_type: object, name: str) -> ModelSpec:
    """Returns a model of a type whose fields are not known here, by building it where transformers is installed."""
    near = did_you_mean(model_type, MODEL_TYPES, alike=0.85)
    remedy = near or "You can describe the model by Megatron's flags instead."
    try:
        if isinstance(model_type, str) and not near and can_build():
            source = f"{text}, built by transformers without memory"
            predicted = values.get("num_nextn_predict_layers")
            source += f", without layers of multi-token prediction ({predicted})" if predicted else ""
            return read_built(values, name, source)
    except ArgumentError as error:
        if error.given != model_type:
            raise
    allowed = f"the model types {', '.join(MODEL_TYPES)}, or another that the installed transformers builds"
    raise ArgumentError("model_type", model_type, allowed, remedy)


def _content(text: str) -> tuple[Path, str]:
    try:
        path = Path(text)
        path = path / "config.json" if path.is_dir() else path
        if path.stat().st_size > _MAX_BYTES:
            raise ArgumentError("model", text, f"a config.json of at most {_MAX_BYTES} bytes")
        return path, path.read_text(encoding="utf-8")
    except OSError as error:
        remedy = did_you_mean(text, PRESETS)
        raise ArgumentError("model", text, f"a file that can be read ({error.strerror})", remedy) from None
    except ValueError as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError("model", text, f"a file of JSON ({str(error)[:100]})") from None


def _values(text: str, content: str) -> dict[str, Any]:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        remedy = "" if content.lstrip().startswith("{") else "A file of Megatron's flags begins with --."
        raise ArgumentError("model", text, f"a file of JSON ({str(error)[:100]})", remedy) from None
    if not isinstance(values, dict):
        raise ArgumentError("model", text, "a file with one JSON object")
    return values
