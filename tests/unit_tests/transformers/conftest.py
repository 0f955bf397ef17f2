"""Models that the tests of this folder share."""

import copy

import pytest
import torch

from tests.transformers_cases import build


@pytest.fixture(scope="module")
def llama():
    """A model that no test changes."""
    return build("Llama", num_hidden_layers=1, dtype=torch.float32)


@pytest.fixture
def enabled(llama):
    """A copy of it that is enabled on one rank, and what enabling returned."""
    from megatron_cp.transformers import enable_context_parallel  # tests are skipped where there are no transformers

    model = copy.deepcopy(llama)
    return model, enable_context_parallel(model, None)
