"""What the package calls of the ``tokenizers`` library."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class EncodingLike(Protocol):
    """What the package reads of a ``tokenizers.Encoding``."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def type_ids(self) -> list[int]: ...

    @property
    def word_ids(self) -> list[int | None]: ...

    @property
    def sequence_ids(self) -> list[int | None]: ...

    @property
    def offsets(self) -> list[tuple[int, int]]: ...

    @property
    def special_tokens_mask(self) -> list[int]: ...

    @property
    def overflowing(self) -> "list[EncodingLike]": ...

    def truncate(self, max_length: int, stride: int = 0, direction: str = "right") -> None: ...


class AddedToken(Protocol):
    """A token beside the vocabulary of the tokenizer's model."""

    @property
    def special(self) -> bool: ...


class TokenizerLike(Protocol):
    """What the package calls of a ``tokenizers.Tokenizer``."""

    @property
    def model(self) -> object: ...

    @staticmethod
    def from_str(json: str) -> "TokenizerLike": ...

    def to_str(self, pretty: bool = False) -> str: ...

    def save(self, path: str, pretty: bool = True) -> None: ...

    def encode(
        self,
        sequence: str | Sequence[str],
        pair: str | None = None,
        is_pretokenized: bool = False,
        add_special_tokens: bool = True,
    ) -> EncodingLike: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def encode_batch(
        self,
        input: Sequence[str] | Sequence[Sequence[str]] | Sequence[tuple[str, str]],
        is_pretokenized: bool = False,
        add_special_tokens: bool = True,
    ) -> list[EncodingLike]: ...

    def encode_batch_fast(
        self,
        input: Sequence[str] | Sequence[Sequence[str]] | Sequence[tuple[str, str]],
        is_pretokenized: bool = False,
        add_special_tokens: bool = True,
    ) -> list[EncodingLike]: ...

    def post_process(self, encoding: EncodingLike) -> EncodingLike: ...

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, id: int) -> str | None: ...

    def get_vocab_size(self, with_added_tokens: bool = True) -> int: ...

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def num_special_tokens_to_add(self, is_pair: bool) -> int: ...

    def no_padding(self) -> None: ...

    def no_truncation(self) -> None: ...

    def enable_truncation(
        self, max_length: int, *, stride: int = 0, strategy: str = "longest_first"
    ) -> None: ...
