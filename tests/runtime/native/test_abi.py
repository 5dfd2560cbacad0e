"""Which memory the kernel is given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from multirate.runtime.native import abi


def test_memory_that_the_kernel_cannot_read_is_refused() -> None:
    rows = torch.zeros(4, 6, dtype=torch.float32, device="cpu")
    wrong = [rows.T, rows[:, :3], rows.half(), rows.to("meta"), rows.to(torch.complex64)]
    for values in wrong:
        with pytest.raises(TypeError, match="the kernel reads"):
            abi.tensor(values)
    assert abi.address(abi.tensor(rows[:, :3], strided=True)) == rows.data_ptr()
    assert abi.tensor(None) == abi.NULL


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_tensors_without_memory_are_refused() -> None:
    """As torch has them while it traces a program; the kernel would read address 0."""
    with FakeTensorMode():
        traced = torch.zeros(3, dtype=torch.float32, device="cpu")
    with pytest.raises(TypeError, match="memory, which a FakeTensor does not have"):
        abi.tensor(traced)
    assert abi.tensor(torch.zeros(0, dtype=torch.float32, device="cpu")) == abi.NULL


def test_a_pointer_has_the_type_of_its_values() -> None:
    """So that cffi refuses it where the kernel reads others."""
    floats, doubles = (torch.zeros(3, dtype=one) for one in (torch.float32, torch.float64))
    assert abi.new("Scorer", weight=abi.tensor(floats)).weight == abi.tensor(floats)
    with pytest.raises(TypeError):
        abi.new("Scorer", weight=abi.tensor(doubles))
    with pytest.raises(TypeError):
        abi.new("LayerCache", k=abi.tensor(floats))
    assert abi.new("Linear", weight=abi.packed(doubles), scale=abi.packed(floats.half())).weight


def test_memory_for_the_kernel_does_not_follow_torch_s_defaults() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            made = abi.floats_for(2, 3)
    finally:
        torch.set_default_dtype(before)
    assert made.dtype == torch.float32 and made.device.type == "cpu" and made.shape == (2, 3)


@pytest.mark.parametrize(
    ("pointer", "values"),
    [
        (abi.ints, np.zeros(2, np.int64)),
        (abi.longs, np.zeros(2, np.int32)),
        (abi.floats, np.zeros(2)),
        (abi.doubles, np.zeros(2, np.float32)),
        (abi.flags, np.zeros(2, np.int32)),
    ],
)
def test_arrays_of_another_type_are_refused(pointer, values) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TypeError, match="the kernel reads"):
        pointer(values)
