"""CTranslate2's translator of a transformers encoder-decoder, in a process of its own.

In one process it shares torch's OpenMP. Then there are more threads than cores, so that no thread spins between two
parallel regions, and all providers are slower.
"""

import multiprocessing
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel


class CTranslate2:
    """``theirs`` converted, on a CPU. A token is named by its number.

    Args: quantization: "float32" or "int8", the form of the weights and of the products.
    """

    def __init__(self, theirs, quantization: str, threads: int):
        from ctranslate2.converters import TransformersConverter

        config = theirs.config
        # A last token for padding is left out of its vocabulary, if it has this name.
        self.names = [f"{token}" for token in range(config.vocab_size)]
        if config.pad_token_id == config.vocab_size - 1:
            self.names[-1] = "<pad>"
        spawning = multiprocessing.get_context("spawn")
        self.connection, other_end = spawning.Pipe()
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            self._save_tokenizer(config, folder)
            converted = str(Path(folder, "converted"))
            TransformersConverter(folder).convert(converted, quantization=quantization)
            arguments = (other_end, converted, quantization, threads)
            spawning.Process(target=_serve, args=arguments, daemon=True).start()
            self.connection.recv()  # it has read the folder

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
        options = {"beam_size": beams, "max_decoding_length": new_tokens, "return_end_token": True}
        self.connection.send(((self.named(sources),), options))
        return [[int(name) for name in names] for names in self.connection.recv()]

    def log_probabilities(self, sources: list[list[int]], targets: list[list[int]]) -> list[float]:
        """The log-probability of each token of the targets."""
        self.connection.send(((self.named(sources), self.named(targets)), {}))
        return [
            score
            for scores, target in zip(self.connection.recv(), targets, strict=True)
            for score in scores[: len(target)]
        ]


def _serve(connection: Connection, folder: str, quantization: str, threads: int) -> None:
    """Answer requests until the other end is closed: sources give targets, sources and targets give their scores."""
    from ctranslate2 import Translator

    translator = Translator(folder, intra_threads=threads, compute_type=quantization)
    connection.send("ready")
    while True:
        try:
            texts, options = connection.recv()
        except EOFError:
            return
        if len(texts) == 1:
            results = translator.translate_batch(*texts, **options)
            connection.send([result.hypotheses[0] for result in results])
        else:
            connection.send([each.log_probs for each in translator.score_batch(*texts)])
