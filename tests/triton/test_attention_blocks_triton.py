import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastenc
from fastenc.models import Encoder, EncoderConfig
from fastenc.ops.attention_blocks import attention_blocks
from fastenc.packing import pack
from tests.helpers.families import model

LENGTHS = (3, 200, 0, 129, 128, 64, 200)


def offsets(lengths, device):
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def blocks_of(lengths):
    """The blocks of the longest sequences first; those of equally long sequences in the sequences' order."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [[i, block] for i in order for block in range(-(-lengths[i] // 64))]


@pytest.fixture
def chosen(triton_target, monkeypatch):
    """The choice of kernels as on a GPU, also where there is none."""
    monkeypatch.setattr("fastenc.ops.attention_blocks.choose", lambda op, impl, x: "triton")
    return triton_target


def found_in(table, lengths):
    """The entries of a table for which a sequence has a block."""
    assert table.dtype == torch.int32
    entries = table.tolist()
    real = [entry for entry in entries if entry[1] * 64 < max(lengths, default=0)]
    assert real == entries[: len(real)]
    assert all(0 <= sequence < len(lengths) for sequence, _ in entries)
    return real


@pytest.mark.parametrize(
    "lengths", [LENGTHS, (129,) * 9 + (1,), (1,) * 300 + (700,), (300, 0, 0), (0, 129)]
)
def test_blocks_of_a_batch(chosen, lengths):
    cu_seqlens = offsets(lengths, chosen.device)
    x = torch.empty(sum(lengths), 1, device=chosen.device)
    blocks = attention_blocks(x, cu_seqlens, max(lengths))
    assert found_in(blocks.all_blocks, lengths) == blocks_of(lengths)
    long = [entry for entry in blocks_of(lengths) if lengths[entry[0]] > 128]
    assert found_in(blocks.long_blocks, lengths) == long


def test_a_table_has_room_for_the_most_blocks_that_there_can_be(chosen):
    """Each sequence has one token more than whole blocks, so that every entry is used."""
    lengths = (193, 129, 1)
    blocks = attention_blocks(torch.empty(323, 1), offsets(lengths, chosen.device), 193)
    assert blocks.all_blocks.tolist() == blocks_of(lengths)
    assert blocks.long_blocks.tolist() == blocks_of((193, 129, 0))


def test_the_fake_knows_the_tables_shapes(chosen):
    cu_seqlens = offsets(LENGTHS, chosen.device)
    tables = torch.ops.fastenc.attention_blocks(cu_seqlens, 20, 15)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.fastenc.attention_blocks, (cu_seqlens, 20, 15), test_utils=checks
    )
    assert [table.shape for table in tables] == [(20, 2), (15, 2)]


@pytest.mark.parametrize("lengths", [(128, 5), (200, 200), ()])
def test_no_blocks_where_they_gain_nothing(chosen, lengths):
    cu_seqlens, longest = offsets(lengths, chosen.device), max(lengths, default=0)
    assert attention_blocks(torch.empty(sum(lengths), 1), cu_seqlens, longest) is None


def test_no_blocks_where_no_kernel_needs_them():
    assert attention_blocks(torch.empty(205, 1), offsets((200, 5), "cpu"), 200) is None


class Given(TorchDispatchMode):
    """Records the sizes of the tables that attention gets."""

    def __init__(self):
        super().__init__()
        self.sizes, self.made = [], 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function._schema.name
        self.made += name == "fastenc::attention_blocks"
        if name == "fastenc::attention_fwd":
            self.sizes.append([len(table) for table in arguments[11:13]])
        return function(*arguments, **(keywords or {}))


def an_encoder(device):
    m = Encoder(EncoderConfig(97, 32, 2, 2, 48, 256)).to(device).eval()
    return lambda ids, mask: m(pack(ids, mask)).last_hidden_state


def a_patched_model(device):
    m = fastenc.patch(model("bert", "Model", max_position_embeddings=256)).to(device).eval()
    return lambda ids, mask: m(input_ids=ids, attention_mask=mask).last_hidden_state[mask]


@pytest.mark.parametrize("subject", [an_encoder, a_patched_model])
def test_a_batch_that_was_packed_on_a_device_gets_its_blocks_once(chosen, subject, monkeypatch):
    forward = subject(chosen.device)
    mask = torch.zeros(3, 200, dtype=torch.bool, device=chosen.device)
    for row, length in zip(mask, (7, 200, 66), strict=True):
        row[:length] = True
    ids = torch.randint(5, 90, mask.shape, device=mask.device)
    with Given() as given:
        with_blocks = forward(ids, mask)
    assert given.made == 1 and len(given.sizes) >= 2
    assert all(size == [(273 + 3 * 63) // 64, (273 + 2 * 63) // 64] for size in given.sizes)
    monkeypatch.setattr("fastenc.ops.attention_blocks.choose", lambda op, impl, x: "cpp")
    torch.testing.assert_close(with_blocks, forward(ids, mask))
