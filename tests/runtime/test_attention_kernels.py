"""Which of torch's attention kernels run on a GPU: not those that are planned for one shape."""

from __future__ import annotations

import pytest
import torch

from multirate.runtime.attention_kernels import kernels_of_any_shape


@pytest.mark.parametrize("wanted", [True, False])
def test_planned_kernels_are_off_for_the_duration(
    wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(wanted)
        with pytest.raises(ZeroDivisionError), kernels_of_any_shape(), kernels_of_any_shape():
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            1 / 0  # noqa: B018
        assert torch.backends.cuda.cudnn_sdp_enabled() is wanted
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_planned_kernels_stay_off_until_the_last_thread_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The setting is the whole process's: one thread's end must not switch them on for another."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        first, second = kernels_of_any_shape(), kernels_of_any_shape()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        second.__exit__(None, None, None)
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
