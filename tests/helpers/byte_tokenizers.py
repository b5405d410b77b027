"""Tokenizers of bytes with the special tokens of families whose names are not BERT's or RoBERTa's."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# family: (special tokens, what stands around a text)
KINDS = {
    "qwen3": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None),
    "gemma3": (["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<s>", "</s>"], "<bos> $A <eos>"),
    "eurobert": (
        ["<|begin_of_text|>", "<|end_of_text|>", "<|mask|>", "<|pad|>"],
        "<|begin_of_text|> $A <|end_of_text|>",
    ),
    "esm": (["<cls>", "<pad>", "<eos>", "<unk>", "<mask>"], "<cls> $A <eos>"),
}


def byte_tokenizer(family, texts, vocab_size=350):
    names, template = KINDS[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=names, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if template is not None:
        ids = [(name, tokenizer.token_to_id(name)) for name in names]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=ids
        )
    return tokenizer
