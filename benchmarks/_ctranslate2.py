"""CTranslate2's translator of a transformers encoder-decoder. Its tokens are named by their numbers."""

import os
import tempfile
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

# Milliseconds for which its threads spin after a call. The default of 200 would slow the next provider.
os.environ.setdefault("KMP_BLOCKTIME", "10")


class CTranslate2:
    """``theirs`` converted, on a CPU.

    Args: quantization: "float32" or "int8", the form of the weights and of the products.
    """

    def __init__(self, theirs, quantization: str, threads: int):
        from ctranslate2 import Translator
        from ctranslate2.converters import TransformersConverter

        config = theirs.config
        # A last token for padding is left out of its vocabulary, if it has this name.
        self.names = [f"{token}" for token in range(config.vocab_size - 1)]
        self.names.append(
            "<pad>" if config.pad_token_id == len(self.names) else f"{len(self.names)}"
        )
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            self._save_tokenizer(config, folder)
            converted = str(Path(folder, "converted"))
            TransformersConverter(folder).convert(converted, quantization=quantization)
            self.translator = Translator(
                converted, inter_threads=1, intra_threads=threads, compute_type=quantization
            )

    def _save_tokenizer(self, config, folder: str) -> None:
        from transformers import PreTrainedTokenizerFast

        special = {"pad_token": self.names[config.pad_token_id], "unk_token": self.names[3]}
        special["eos_token"] = self.names[config.eos_token_id]
        numbers = {name: number for number, name in enumerate(self.names)}
        words = Tokenizer(WordLevel(numbers, unk_token=special["unk_token"]))
        PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)

    def named(self, rows: list[list[int]]) -> list[list[str]]:
        return [[self.names[token] for token in row] for row in rows]

    def generate(self, sources: list[list[int]], new_tokens: int, beams: int) -> list[list[int]]:
        """The targets, with the end token if it was reached."""
        results = self.translator.translate_batch(
            self.named(sources),
            beam_size=beams,
            max_decoding_length=new_tokens,
            return_end_token=True,
        )
        return [[int(name) for name in result.hypotheses[0]] for result in results]

    def log_probabilities(self, sources: list[list[int]], targets: list[list[int]]) -> list[float]:
        """Of each token of the targets."""
        scored = self.translator.score_batch(self.named(sources), self.named(targets))
        return [
            score
            for each, target in zip(scored, targets, strict=True)
            for score in each.log_probs[: len(target)]
        ]
