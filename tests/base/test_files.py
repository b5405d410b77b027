"""Atomic writes on a disk that has no room, by the libraries that write in Rust."""

import errno
import re

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fastenc._base.files import write_atomically, write_folder

resource = pytest.importorskip("resource")  # which Windows does not have

WRITERS = {
    "tokenizers": Tokenizer(WordLevel({f"word{i}": i for i in range(9000)})).save,
    "safetensors": lambda path: save_file({"weight": torch.zeros(50_000)}, path),
}


@pytest.fixture
def room():
    """Files of this process can have 100,000 bytes, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("library", WRITERS)
def test_a_file_without_room_is_an_os_error_with_its_path(library, room, tmp_path):
    path = tmp_path / "result"
    path.write_text("old")
    with pytest.raises(OSError, match=re.escape(str(path))) as caught:
        write_atomically(path, lambda temporary: WRITERS[library](str(temporary)))
    assert caught.value.errno == errno.EFBIG
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["result"]


@pytest.mark.parametrize("library", WRITERS)
def test_a_folder_without_room_is_an_os_error_with_its_path(library, room, tmp_path):
    folder = tmp_path / "store"
    with pytest.raises(OSError, match=re.escape(str(folder))) as caught:
        write_folder(folder, lambda hidden: WRITERS[library](str(hidden / "file")))
    assert caught.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("library", WRITERS)
def test_a_file_has_the_permissions_of_any_new_file(library, tmp_path):
    """Others can read a model, if they can read a new file in its folder."""
    (tmp_path / "new").write_text("")
    write_atomically(tmp_path / "result", lambda temporary: WRITERS[library](str(temporary)))
    assert (tmp_path / "result").stat().st_mode == (tmp_path / "new").stat().st_mode
