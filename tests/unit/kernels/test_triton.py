"""The Triton kernels in Triton's interpreter, on the CPU."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed; it comes with torch for CUDA")

from triton_checks import *  # noqa: E402, F403
from triton_interpreter import interpret  # noqa: E402

# Rows that see nothing take the logarithm of 0 and divide by it; what they give is tested.
pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")]


@pytest.fixture(autouse=True, scope="module")
def _interpreted():
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        yield


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cpu")
