import pytest
import torch

import generation
import linear

torch.set_num_threads(1)  # matrices this small only wait for a second thread (three times as long on a busy machine)


@pytest.fixture(autouse=True)
def small_models_are_packed_too(monkeypatch):
    """The models of tests are small, and should take the ways of large ones."""
    monkeypatch.setattr(linear, "WORTH_PACKING", 0)
    monkeypatch.setattr(generation, "WORTH_PACKING", 0)
    monkeypatch.setattr(generation, "LITTLE_WORK", 0)
