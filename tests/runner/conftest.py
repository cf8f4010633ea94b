"""One thread: these tensors are tiny, and threads that wait for each other make a busy machine's timings erratic."""

import pytest
import tiny_checkpoint
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint.write(made)
    return made
