"""One thread: these tensors are tiny, and threads that wait for each other make a busy machine's timings erratic."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
