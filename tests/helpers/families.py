"""Small random models of every supported Hugging Face family, for the tests."""

import torch

SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=40,
)
FAMILIES = ("bert", "roberta", "xlm-roberta", "distilbert", "electra")
CLASSES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "distilbert": "DistilBert",
    "electra": "Electra",
    "camembert": "Camembert",
    "data2vec-text": "Data2VecText",
}
# RoBERTa under another name: position and padding as RoBERTa has them.
ROBERTA_LIKE = ("roberta", "xlm-roberta", "camembert", "data2vec-text")


def config(family: str, **changes):
    import transformers

    if family == "distilbert":
        sizes = dict(vocab_size=97, dim=32, n_layers=2, n_heads=2, hidden_dim=48)
        sizes["max_position_embeddings"] = 40
    else:
        sizes = dict(SIZES)
        if family in ROBERTA_LIKE:
            sizes |= dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, type_vocab_size=1)
        if family == "electra":
            sizes["embedding_size"] = 16
    return getattr(transformers, f"{CLASSES[family]}Config")(**(sizes | changes))


def model(family: str, task: str = "Model", **changes):
    """A random model; weights wide enough that a mistake shows, every bias away from 0."""
    import transformers

    torch.manual_seed(0)
    result = getattr(transformers, CLASSES[family] + task)(config(family, **changes))
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return result.eval()


def padded_batch(family: str, lengths=(5, 17, 1, 30), seed: int = 0) -> dict[str, torch.Tensor]:
    """A right-padded batch of random tokens; token types where the family has them."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = len(lengths), max(lengths)
    mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, 97, (rows, length), generator=generator)
    pad = 1 if family in ROBERTA_LIKE else 0
    batch = {"input_ids": torch.where(mask.bool(), ids, pad), "attention_mask": mask}
    if family in ("bert", "electra"):
        types = torch.randint(0, 2, (rows, length), generator=generator)
        batch["token_type_ids"] = types * mask
    return batch
