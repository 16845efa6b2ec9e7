"""What needs a GPU. This version measures on the CPU; the accelerator device brings its tests here."""

import pytest
import torch

from autobatch import DeviceError, tune

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator on this machine")


def test_an_accelerator_is_never_silently_left_aside():
    with pytest.raises(DeviceError, match="use --device cpu"):
        tune("gpt-nano", 8, device="auto")
