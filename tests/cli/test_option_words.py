"""Errors of the Python API name its arguments; errors of the commands name their options instead."""

import pytest

from fastenc.cli.commands import command_named
from fastenc.cli.options import in_options_words, options_of


@pytest.mark.parametrize(
    "text, expected",
    [
        ("batch_size must be 1", "--batch-size must be 1"),
        ("epochs must be at least 1", "--epochs must be at least 1"),
        ("continue with resume=True.", "continue with --resume."),
        ('give quoting="csv" to', "give --quoting csv to"),
        ("give label= another column", "give --label another column"),
        ("give tag_column another number", "give --tag-column another number"),
        ("was begun with seed=0, got 1", "was begun with seed=0, got 1"),
        ("the label of a row, resume it", "the label of a row, resume it"),
        ("return_dict=True and x=", "return_dict=True and x="),
        ("config.json: batch_size must be 1", "config.json: batch_size must be 1"),
        ("below 9, config.json's batch_size, got 1", "below 9, config.json's batch_size, got 1"),
    ],
)
def test_arguments_become_options(text, expected):
    assert in_options_words(text, options_of(command_named("finetune"))) == expected
