import pytest

from fastenc.data import (
    doc_sentence_blocks,
    full_sentence_blocks,
    measure_fertility,
    read_texts,
    train_tokenizer,
)
from fastenc.data.sentences import split_sentences
from fastenc.demo.checkpoint import minilm_folder
from fastenc.text import load_tokenizer, special_tokens
from tests.helpers.texts import TEXT


def check_blocks(blocks, documents, tokenizer, block_size):
    """Compare with the format's definition, block by block."""
    special = special_tokens(tokenizer)
    # Sentences in order, with None at the end of a document.
    queue = []
    for document in documents:
        sentences = split_sentences(document)
        queue += [tokenizer.encode(s, add_special_tokens=False).ids for s in sentences]
        queue += [None] if sentences else []
    queue.pop()
    for block in blocks:
        assert block[0] == special.cls and block[-1] == special.sep
        assert len(block) <= block_size
        body = list(block[1:-1])
        if len(queue[0]) > len(body) == block_size - 2:  # a part of a sentence longer than a block
            assert queue[0][: len(body)] == body
            queue[0] = queue[0][len(body) :]
            continue
        while body:
            if queue[0] is None:
                assert body[0] == special.sep, "no separator between documents"
                del body[0], queue[0]
            assert body[: len(queue[0])] == queue[0], "not a whole sentence, or not the next one"
            del body[: len(queue.pop(0))]
        across = [special.sep] if queue and queue[0] is None else []
        del queue[: len(across)]
        if queue:
            size = len(block) + len(across) + len(queue[0])
            assert size > block_size, "the next sentence had room"
    assert not queue, "text is missing"


def test_sentences():
    assert split_sentences(TEXT) == [
        "= A heading =",
        " The first sentence.",
        " A second one!",
        " Was there a third?",
        " Yes: 3.5 of them.",
        " A line that ends without a mark",
        " and goes on...",
        " Dr.",
        " Who said so.",
    ]
    assert split_sentences("第一句。第二句！ 完") == ["第一句。", "第二句！", " 完"]
    assert split_sentences(" \n ") == []


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_tokens_of_sentences_are_those_of_the_running_text(algorithm):
    tokenizer = train_tokenizer([TEXT] * 5, model_type=algorithm, vocab_size=330)
    running = tokenizer.encode(
        " ".join(TEXT.replace("!  ", "! ").split()), add_special_tokens=False
    )
    sentences = tokenizer.encode_batch(split_sentences(TEXT), add_special_tokens=False)
    assert [token for sentence in sentences for token in sentence.tokens] == running.tokens


@pytest.mark.parametrize("block_size", [8, 20, 64, 500])
def test_blocks_follow_the_format(block_size):
    tokenizer = train_tokenizer([TEXT], vocab_size=200)
    documents = [TEXT, "", "Short.", " \n", TEXT * 3, "One. Two. Three."]
    blocks = full_sentence_blocks(documents, tokenizer, block_size)
    check_blocks(blocks, documents, tokenizer, block_size)
    if block_size == 500:
        assert len(blocks) == 1


@pytest.mark.parametrize("block_size", [8, 20, 64, 500])
def test_blocks_of_one_document_each(block_size):
    """DOC-SENTENCES is FULL-SENTENCES applied to each document."""
    tokenizer = train_tokenizer([TEXT], vocab_size=200)
    documents = [TEXT, "", "Short.", " \n", TEXT * 3, "One. Two. Three."]
    blocks = doc_sentence_blocks(documents, tokenizer, block_size)
    own = [full_sentence_blocks([d], tokenizer, block_size) for d in documents if d.strip()]
    assert blocks == [block for several in own for block in several]


def test_the_tokenizers_own_padding_and_truncation_do_not_count():
    documents = [TEXT, "Short. " * 9]
    tokenizer = train_tokenizer([TEXT] * 5, vocab_size=330)
    free = tokenizer.from_str(tokenizer.to_str())
    tokenizer.enable_padding(length=40)
    tokenizer.enable_truncation(4)
    check_blocks(full_sentence_blocks(documents, tokenizer, 24), documents, free, 24)
    assert tokenizer.truncation and tokenizer.padding
    measured = measure_fertility(tokenizer, documents)
    lines = [line for text in documents for line in text.split("\n")]
    expected = [free.encode(line, add_special_tokens=False).ids for line in lines]
    assert measured.tokens == sum(map(len, expected))


def test_bad_input_is_named():
    tokenizer = load_tokenizer(minilm_folder())
    with pytest.raises(ValueError, match="block_size must be at least 8 tokens, got 4"):
        full_sentence_blocks(["a"], tokenizer, block_size=4)
    with pytest.raises(ValueError, match="there is no text to pack"):
        full_sentence_blocks(["", "  "], tokenizer)
    with pytest.raises(ValueError, match="there is no text to pack"):
        doc_sentence_blocks(["", "  "], tokenizer)


def test_real_articles_fill_their_blocks(data_dir):
    tokenizer = load_tokenizer(minilm_folder())
    for name in ("wikipedia_en/test.txt.gz", "wikitext-2/valid.txt.gz"):
        documents = read_texts(data_dir / name)[:60]
        blocks = full_sentence_blocks(documents, tokenizer)
        check_blocks(blocks, documents, tokenizer, 512)
        assert sum(map(len, blocks[:-1])) / (512 * len(blocks[:-1])) > 0.9
