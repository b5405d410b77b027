"""Scores of spans of words from the words' vectors.

A span is given by its first and last word. A word's window is the word and the words after it, as many as the longest
span has. Projections are computed once for each word and not for each span, because the projection of a mean is the
mean of the projections.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc.nn.embedding_table import EmbeddingTable
from fastenc.ops import bias_gelu


class BoundaryScores(nn.Module):
    """Scores a span i … j from its first word, its last word and an average c of its words, with one hidden layer.

        z = U_s h_i + U_e h_j + U_c c + b + l_{j-i},   logits = V gelu(z) + a

    Without ``attention`` c is the mean of h_i … h_j. With it c is their weighted sum with softmax(w · h_t), t = i … j
    ("head attention"). ``lengths`` adds the learned vectors l, one for each length of a span.

    Numerics: means are computed from float32 prefix sums that start at every word, so there is no cancellation. Softmax
    weights are float32.
    Source: Lee et al. 2017, arXiv:1707.07045, section 4.

    Args:
        num_labels: number of classes.
        size: number of units of the hidden layer.
        max_span_words: largest number of words of a span.
    """

    def __init__(
        self,
        hidden_size: int,
        num_labels: int,
        size: int,
        max_span_words: int,
        attention: bool = False,
        lengths: bool = False,
    ):
        super().__init__()
        self.project = nn.Linear(hidden_size, 3 * size, bias=False)
        self.attend = nn.Linear(hidden_size, 1, bias=False) if attention else None
        self.lengths = EmbeddingTable(max_span_words, size) if lengths else None
        self.bias = nn.Parameter(torch.zeros(size))
        self.out = nn.Linear(size, num_labels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights so that hidden units are about as large as the words' vectors.

        Smaller weights would need more steps of fine-tuning to grow. The bias of class 0 is :func:`prior`.
        """
        for layer in filter(None, (self.project, self.attend, self.out)):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        if self.lengths is not None:
            nn.init.normal_(self.lengths.weight, std=self.out.in_features**-0.5)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.out.bias)
        self.out.bias.data[0] = prior(self.out.out_features)

    def forward(self, words: Tensor, windows: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """Scores of spans.

        Args:
            words: (W, hidden_size).
            windows: int64 (W, K), for each word the indices of itself and the K - 1 words after it; beyond the end of
                the sentence any index of it.
            starts, ends: int64 (spans,), indices of first and last word, 0 <= ends - starts < K.
        Returns: (spans, num_labels).
        """
        first, last, content = self.project(words).chunk(3, dim=1)
        inside = _rows(content, windows)
        # averages (W, K, size): those of the first word, the first two words, … of each window.
        if self.attend is None:
            dtype = torch.promote_types(inside.dtype, torch.float32)
            sizes = torch.arange(1, windows.shape[1] + 1, device=words.device)[:, None]
            averages = inside.cumsum(1, dtype=dtype) / sizes
        else:
            averages = self._weights(words, windows) @ inside
        lengths = ends - starts
        z = first.index_select(0, starts) + last.index_select(0, ends)
        z = z + _of_spans(averages, starts, lengths).to(z.dtype)
        if self.lengths is not None:
            z = z + self.lengths(lengths)
        return self.out(bias_gelu(z, self.bias))

    def _weights(self, words: Tensor, windows: Tensor) -> Tensor:
        """(W, K, K): row k has the softmax weights of the first k + 1 words of the window."""
        assert self.attend is not None
        scores = self.attend(words)
        scores = _rows(scores, windows).transpose(1, 2)  # (W, 1, K)
        count = windows.shape[1]
        later = torch.ones(count, count, dtype=torch.bool, device=words.device).triu(1)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        scores = scores.to(dtype).masked_fill(later, float("-inf"))
        return scores.softmax(2).to(words.dtype)


class BiaffineScores(nn.Module):
    """Scores a span from its first and last word, by a bilinear form of two hidden layers.

        s_i = gelu(F_s h_i + b_s),   e_j = gelu(F_e h_j + b_e),   logits_m = [s_i; 1]ᵀ U_m [e_j; 1]

    Source: Yu et al. 2020, arXiv:2005.07150; the linear terms are U's last row and column, as in Dozat and Manning
    2017, arXiv:1611.01734.
    """

    def __init__(self, hidden_size: int, num_labels: int, size: int):
        super().__init__()
        self.project = nn.Linear(hidden_size, 2 * size, bias=False)
        self.bias = nn.Parameter(torch.zeros(2 * size))
        self.bilinear = nn.Linear(size + 1, num_labels * (size + 1), bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As :meth:`BoundaryScores.reset_parameters`. A bilinear form sums over both of its sides, hence 1 / width."""
        width = self.bilinear.in_features
        nn.init.normal_(self.project.weight, std=self.project.in_features**-0.5)
        nn.init.zeros_(self.bias)
        nn.init.normal_(self.bilinear.weight, std=1 / width)
        # The weight of class 0 for the two appended ones is its bias.
        self.bilinear.weight.data[width - 1, -1] = prior(self.bilinear.out_features // width)

    def forward(self, words: Tensor, windows: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """As :meth:`BoundaryScores.forward`."""
        first, last = bias_gelu(self.project(words), self.bias).chunk(2, dim=1)
        first, last = F.pad(first, (0, 1), value=1.0), F.pad(last, (0, 1), value=1.0)
        # The left product is computed once for each word and not for each span.
        by_class = self.bilinear(first).unflatten(1, (-1, last.shape[1]))
        scores = _rows(last, windows) @ by_class.transpose(1, 2)  # (W, K, classes)
        return _of_spans(scores, starts, ends - starts)


def prior(num_labels: int) -> float:
    """Initial bias of class 0 (no entity), with which an untrained model gives all other classes together 0.01.

    Nearly all spans are no entities. Without this bias the first steps would mostly learn that.
    Source: Lin et al. 2017, arXiv:1708.02002, section 4.1.
    """
    return math.log(99 * (num_labels - 1))


def _rows(x: Tensor, windows: Tensor) -> Tensor:
    """(W, width) → (W, K, width), the rows of each window."""
    return x.index_select(0, windows.flatten()).view(*windows.shape, x.shape[1])


def _of_spans(x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """(W, K, width) → (spans, width): for each span the row of its first word and its length."""
    return x.flatten(0, 1).index_select(0, starts * x.shape[1] + lengths)
