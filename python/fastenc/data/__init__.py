"""From files to packed batches: readers, tokenizers, full-sentence blocks, collators, batch order."""

from fastenc.data.batching import BatchSampler
from fastenc.data.blocks import doc_sentence_blocks, full_sentence_blocks
from fastenc.data.classification import (
    ClassificationExample,
    collate_classification,
    encode_labelled,
    encode_texts,
)
from fastenc.data.columns import Sentence, TaggedData, read_tagged, read_words, sentence
from fastenc.data.entities import EntityData, read_entities, read_unlabelled
from fastenc.data.long_texts import LongTexts
from fastenc.data.readers import LabelledData, read_inputs, read_labelled, read_texts
from fastenc.data.segments import SegmentPair, segment_pairs
from fastenc.data.span_examples import SpanExample, collate_spans, encode_spans
from fastenc.data.tagging import TaggingExample, collate_tagging, encode_tagged
from fastenc.data.tokenizers import (
    SpecialTokens,
    load_tokenizer,
    save_tokenizer,
    special_tokens,
    train_tokenizer,
)

__all__ = [
    "BatchSampler",
    "ClassificationExample",
    "EntityData",
    "LabelledData",
    "LongTexts",
    "SegmentPair",
    "Sentence",
    "SpanExample",
    "SpecialTokens",
    "TaggedData",
    "TaggingExample",
    "collate_classification",
    "collate_spans",
    "collate_tagging",
    "doc_sentence_blocks",
    "encode_labelled",
    "encode_spans",
    "encode_tagged",
    "encode_texts",
    "full_sentence_blocks",
    "load_tokenizer",
    "read_entities",
    "read_inputs",
    "read_labelled",
    "read_tagged",
    "read_texts",
    "read_unlabelled",
    "read_words",
    "save_tokenizer",
    "segment_pairs",
    "sentence",
    "special_tokens",
    "train_tokenizer",
]
