"""Copies to a device; no GPU is needed to see where they start."""

from unittest.mock import Mock

import torch

from fastenc._base.transfer import send, send_arguments, staged
from fastenc.packing import pack_sequences

CUDA = torch.device("cuda", 0)


def host_tensor():
    """A tensor on the host that records the calls made to it."""
    return Mock(spec=torch.Tensor, device=torch.device("cpu"))


def test_what_goes_to_a_gpu_starts_in_pinned_memory():
    tensor = host_tensor()
    assert send(tensor, "cuda:0") is tensor.pin_memory.return_value.to.return_value
    tensor.pin_memory.return_value.to.assert_called_once_with("cuda:0", non_blocking=True)
    tensor.to.assert_not_called()


def test_a_copy_to_wait_for_starts_where_the_tensor_is():
    tensor = host_tensor()
    assert send(tensor, CUDA, non_blocking=False) is tensor.to.return_value
    tensor.pin_memory.assert_not_called()


def test_nothing_else_is_pinned():
    on_device = Mock(spec=torch.Tensor, device=CUDA)
    assert staged(on_device, CUDA) is on_device
    tensor = torch.arange(3)
    assert staged(tensor, "cpu") is tensor and send(tensor, "cpu") is tensor


def test_a_models_arguments_are_sent():
    labels = torch.tensor([1, 0])
    sent = send_arguments(
        {"batch": pack_sequences([[1, 2], [3]]), "labels": labels, "max_labels": 2},
        torch.device("meta"),
    )
    assert sent["max_labels"] == 2
    assert sent["labels"].is_meta and sent["batch"].input_ids.is_meta
    assert sent["batch"].max_seqlen == 2
