"""Marks for tests that compare with a library in a newer version than the oldest supported one."""

from importlib import metadata

import pytest

sentence_transformers_6 = pytest.mark.skipif(
    int(metadata.version("sentence-transformers").partition(".")[0]) < 6,
    reason="sentence-transformers 6.0 changed what is compared, and ours follows it",
)
