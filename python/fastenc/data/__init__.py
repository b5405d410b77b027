"""From files to packed batches: readers, tokenizer training, blocks of full sentences, collators, batch order."""

from fastenc.data.batching import BatchSampler, Group
from fastenc.data.blocks import doc_sentence_blocks, full_sentence_blocks
from fastenc.data.classification import (
    ClassificationExample,
    collate_classification,
    encode_labelled,
    encode_texts,
)
from fastenc.data.columns import Sentence, TaggedData, read_tagged, read_words, sentence
from fastenc.data.entities import EntityData, read_entities, read_unlabelled
from fastenc.data.fertility import Fertility, count_words, measure_fertility
from fastenc.data.languages import (
    language_files,
    read_languages,
    sample_lines,
    smoothed_shares,
)
from fastenc.data.readers import (
    LabelledData,
    iterate_texts,
    read_inputs,
    read_labelled,
    read_texts,
)
from fastenc.data.segments import SegmentPair, segment_pairs
from fastenc.data.span_examples import SpanExample, collate_spans, encode_spans
from fastenc.data.store import StoredExamples, TokenStore, is_store
from fastenc.data.store_writer import write_store
from fastenc.data.tagging import TaggingExample, collate_tagging, encode_tagged
from fastenc.data.text_to_text import TextToTextData, TextToTextExample, read_text_to_text
from fastenc.data.tokenizer_training import train_tokenizer

__all__ = [
    "BatchSampler",
    "ClassificationExample",
    "EntityData",
    "Fertility",
    "Group",
    "LabelledData",
    "SegmentPair",
    "Sentence",
    "SpanExample",
    "StoredExamples",
    "TaggedData",
    "TaggingExample",
    "TextToTextData",
    "TextToTextExample",
    "TokenStore",
    "collate_classification",
    "collate_spans",
    "collate_tagging",
    "count_words",
    "doc_sentence_blocks",
    "encode_labelled",
    "encode_spans",
    "encode_tagged",
    "encode_texts",
    "full_sentence_blocks",
    "is_store",
    "iterate_texts",
    "language_files",
    "measure_fertility",
    "read_entities",
    "read_inputs",
    "read_labelled",
    "read_languages",
    "read_tagged",
    "read_text_to_text",
    "read_texts",
    "read_unlabelled",
    "read_words",
    "sample_lines",
    "segment_pairs",
    "sentence",
    "smoothed_shares",
    "train_tokenizer",
    "write_store",
]
