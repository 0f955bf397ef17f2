"""Refusals of the engine for verl, with a class in place of verl's, which runs in test_verl_engine."""

import pytest

pytest.importorskip("transformers")
import torch

from megatron_cp.integrations.verl import ContextParallelEngineMixin
from tests.refusals import rejects


class Base:
    """Answers as verl's engine does without sequence parallelism."""

    ulysses_sequence_parallel_size, use_ulysses_sp, ulysses_parallel_group = 2, True, None

    def __init__(self, inputs, results):
        self.answer = {"input_ids": torch.zeros(1, 3), **inputs}, results

    def prepare_model_inputs(self, micro_batch):
        assert (self.ulysses_sequence_parallel_size, self.use_ulysses_sp) == (1, False)
        return self.answer


class Engine(ContextParallelEngineMixin, Base):
    pass


PACKED = {"input_ids_rmpad_rolled": torch.zeros(3), "temperature_rmpad": torch.ones(3), "pad_size": 0}


@pytest.mark.parametrize(
    ("inputs", "results", "message"),
    [
        ({}, {"temperature": 1}, "use_remove_padding: got False; allowed: True"),
        ({}, PACKED | {"pad_size": 5}, "engine.pad_to_length: got True; allowed: False"),
        ({"shift_labels": torch.zeros(1, 3)}, PACKED, "model.use_fused_kernels: got True; allowed: False"),
    ],
)
def test_rejects_what_it_does_not_compute(inputs, results, message):
    engine = Engine(inputs, results)
    rejects(message, engine.prepare_model_inputs, {})
    assert (engine.ulysses_sequence_parallel_size, engine.use_ulysses_sp) == (2, True)
