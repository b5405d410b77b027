"""What a processor without AVX512-VNNI, AVX-VNNI and AMX says when it is asked for int8."""

import pytest

import fastenc
from fastenc.cli.info import layers_in_8_bits
from fastenc.models import Encoder
from fastenc.ops import int8_products
from tests.helpers.checkpoints import save
from tests.helpers.commands import failure
from tests.helpers.families import model

RULE = "int8 needs a processor with AVX512-VNNI, AVX-VNNI or AMX, and this one has none of them"


@pytest.fixture(autouse=True)
def without_the_instructions(monkeypatch):
    monkeypatch.setattr(int8_products, "has_int8_products", lambda: False)


def test_every_way_to_ask_is_refused(tmp_path, capsys):
    theirs = model("bert")
    folder = save(theirs, tmp_path / "bert")
    encoder = Encoder.from_pretrained(folder)
    for asked in (
        lambda: fastenc.freeze(encoder, dtype="int8"),
        lambda: fastenc.freeze(fastenc.patch(theirs), dtype="int8"),
        lambda: Encoder.from_pretrained(folder, dtype="int8"),
    ):
        with pytest.raises(ValueError, match=f"{RULE}: leave out dtype"):
            asked()
    assert encoder.frozen._layers is None
    (tmp_path / "texts.txt").write_text("A dull film.")
    out = tmp_path / "vectors.npy"
    printed = failure(capsys, "embed", folder, tmp_path / "texts.txt", "-o", out, "--dtype", "int8")
    assert RULE in printed and not out.exists()
    assert layers_in_8_bits(encoder) == {"0 to 1": f"not: {RULE}"}
