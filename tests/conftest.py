import pytest
import torch

import generation
import linear
import train

torch.set_num_threads(1)  # matrices this small only wait for a second thread (three times as long on a busy machine)


@pytest.fixture(autouse=True)
def small_models_are_packed_too(monkeypatch):
    """The models of tests are small, and should take the ways of large ones."""
    monkeypatch.setattr(linear, "WORTH_PACKING", 0)
    monkeypatch.setattr(generation, "WORTH_PACKING", 0)
    monkeypatch.setattr(generation, "LITTLE_WORK", 0)


@pytest.fixture(autouse=True)
def the_machine_is_not_measured(monkeypatch):
    """That would take longer than a test's whole run."""
    monkeypatch.setattr(train, "matmul_peak", lambda machine, rounds: (1.0, 0))
