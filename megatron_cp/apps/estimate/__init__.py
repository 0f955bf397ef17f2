"""Predicts a whole model's training step, for `megatron-cp plan --whole`. No torch in here.

`model_files` reads a model from a preset (`model_presets`), a Hugging Face configuration (`hub_configs`) or Megatron's
flags (`megatron_flags`) into a `ModelSpec` (`models`) of layers (`model_layers`). `step` predicts its time and memory,
with the layouts and schemes that `together` plans; `command` compares candidates, and `page/` shows one as a web page.
"""

from megatron_cp.apps.estimate.command import WHOLE, add_arguments, run_whole
from megatron_cp.apps.estimate.layer_shapes import MODELS, layer_shapes
from megatron_cp.apps.estimate.model_files import read_model

__all__ = ["MODELS", "WHOLE", "add_arguments", "layer_shapes", "read_model", "run_whole"]
