"""Plans all layers of a model, with their time and the memory, for `megatron-cp plan --whole`. No torch in here.

`model_files` reads a model from a preset (`model_presets`), a Hugging Face configuration (`hub_configs`, and `towers`
for vision-language models) or Megatron's flags (`megatron_flags`) into a `ModelSpec` (`models`) of layers
(`model_layers`). `model_plan` has its layers' plans, and `job_memory` the bytes of a rank; `command` compares sizes and
layouts.
"""

from megatron_cp.apps.estimate.command import LEFT, WHOLE, add_arguments, run_whole
from megatron_cp.apps.estimate.model_files import read_model
from megatron_cp.apps.estimate.model_presets import MODELS, layer_shapes
from megatron_cp.apps.estimate.towers import TOWERS

__all__ = ["LEFT", "MODELS", "TOWERS", "WHOLE", "add_arguments", "layer_shapes", "read_model", "run_whole"]
