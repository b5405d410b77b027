"""Learns the weights of the layers in a weighted sum, for a task of labelled words."""

import torch
import torch.nn.functional as F

from fastenc.analysis.probes import LabelledWords, chosen_words
from fastenc.models.embedding.space import check_space
from fastenc.models.encoder import Encoder
from fastenc.nn import ScalarMix


def learn_mix(
    encoder: Encoder,
    data: LabelledWords,
    *,
    max_words: int = 20_000,
    epochs: int = 20,
    batch_size: int = 256,
    seed: int = 0,
) -> ScalarMix:
    """Learn a :class:`fastenc.nn.ScalarMix` over the embeddings' output and all layers, with a linear classifier.

    The vectors of each layer are standardised first. Otherwise the weights would also depend on the size of a layer's
    vectors.

    Args:
        encoder: a :class:`fastenc.Encoder` with a tokenizer.
        max_words: largest number of labelled words.
        epochs: number of passes over the words.
        batch_size: number of words in a step of Adam.
        seed: seed of the order of the words.
    Raises: ValueError if there are fewer than two labels, or too little memory for all layers' vectors of the words.
    Source: Tenney et al. 2019, arXiv:1905.06316.
    """
    chosen = chosen_words(data, max_words)
    names = sorted(set(chosen.labels))
    if len(names) < 2:
        raise ValueError(
            f"a mix needs at least two different labels, got {names}: give more labelled words"
        )
    states = encoder.config.num_layers + 1
    words = sum(map(len, chosen.sentences))
    # Three copies: of all words, of the words with labels, and standardised.
    check_space((3 * words * states, encoder.config.hidden_size), torch.float32)
    vectors = encoder.embed_words(
        chosen.sentences, layers=range(states), combine="concat", show_progress=False
    ).vectors[chosen.rows]
    vectors = vectors.float().unflatten(1, (states, -1))
    vectors = (vectors - vectors.mean(0)) / vectors.std(0).clamp(min=1e-6)
    labels = torch.tensor([names.index(label) for label in chosen.labels])
    generator = torch.Generator().manual_seed(seed)
    mix = ScalarMix(states)
    weight = torch.zeros(len(names), vectors.shape[2], requires_grad=True)
    bias = torch.zeros(len(names), requires_grad=True)
    optimizer = torch.optim.Adam([*mix.parameters(), weight, bias], lr=1e-2)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(batch_size):
            optimizer.zero_grad()
            mixed = mix(vectors[rows].unbind(1))
            F.cross_entropy(F.linear(mixed, weight, bias), labels[rows]).backward()
            optimizer.step()
    return mix.requires_grad_(False)
