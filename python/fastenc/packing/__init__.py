"""Packed batches: the sequences of a batch concatenated, without padding."""

from fastenc.packing.arguments import ModelArguments
from fastenc.packing.batch import (
    PackedBatch,
    check_batch_size,
    first_tokens,
    last_tokens,
    length_sorted_batches,
    pack,
    pack_sequences,
    pack_targets,
)
from fastenc.packing.documents import Documents, pack_documents, single_chunks, token_groups
from fastenc.packing.offsets import check_cu_seqlens, check_global_tokens

__all__ = [
    "Documents",
    "ModelArguments",
    "PackedBatch",
    "check_batch_size",
    "check_cu_seqlens",
    "check_global_tokens",
    "first_tokens",
    "last_tokens",
    "length_sorted_batches",
    "pack",
    "pack_documents",
    "pack_sequences",
    "pack_targets",
    "single_chunks",
    "token_groups",
]
