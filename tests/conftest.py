"""One thread a test process, so that results do not depend on how many run at once. `pytest -m gpu` runs the contracts on a GPU."""

import oracle
import pytest
import torch

CONTRACTS = ("test_op_truth", "test_op_contract", "test_op_torch", "test_op_extreme", "test_op_shape", "test_decode")
torch.set_num_threads(1)


def pytest_configure(config):
    if config.option.markexpr == "gpu":
        oracle.DEVICE = torch.device("cuda")


def pytest_collection_modifyitems(config, items):
    """On a GPU every contract of the operators is a GPU test; without one those are skipped."""
    for item in items:
        if oracle.DEVICE.type == "cuda" and item.path.stem in CONTRACTS:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
