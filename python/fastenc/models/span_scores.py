"""Scores of spans of words from the words' vectors.

A span is given by its first and last word; a word's window is it and the words after it, as many as the longest span
has. What depends on a word alone is computed once a word, and not once a span: a projection of a mean of words is the
mean of their projections.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc.ops import bias_gelu


class BoundaryScores(nn.Module):
    """Spans by their first word, their last word and all of them, through a layer of GELU units.

        z = U_s h_i + U_e h_j + U_c c + b + l_{j-i},   logits = V gelu(z) + a

    Without ``attention`` c is the mean of h_i … h_j; with it their sum with the weights softmax(w · h_t), t = i … j
    ("head attention"). ``lengths`` adds the learnt vectors l, one for each length.

    Numerics: the means come from prefix sums in float32 that begin anew at every word, so that nothing is subtracted
    and nothing cancels, wherever in the batch a span is. Softmax weights are float32.
    Source: Lee et al. 2017, arXiv:1707.07045, section 4.

    Args:
        num_labels: classes; size: units of the layer; max_span_words: words of the longest span.
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
        self.lengths = nn.Embedding(max_span_words, size) if lengths else None
        self.bias = nn.Parameter(torch.zeros(size))
        self.out = nn.Linear(size, num_labels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Units of about the words' own size, since a head has few steps to grow; class 0 as :func:`prior`."""
        for layer in filter(None, (self.project, self.attend, self.out)):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        if self.lengths is not None:
            nn.init.normal_(self.lengths.weight, std=self.out.in_features**-0.5)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.out.bias)
        self.out.bias.data[0] = prior(self.out.out_features)

    def forward(self, words: Tensor, windows: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """Args:
            words: (W, hidden_size).
            windows: int64 (W, K), indices of each word and those after it; where the sentence ends, any word of it.
            starts, ends: int64 (spans,), 0 <= ends - starts < K.
        Returns: (spans, num_labels).
        """
        first, last, content = self.project(words).chunk(3, dim=1)
        # (W, K, size): what the first word, the first two, … of each window have in common.
        inside = _rows(content, windows)
        if self.attend is None:
            dtype = torch.promote_types(inside.dtype, torch.float32)
            sizes = torch.arange(1, windows.shape[1] + 1, device=words.device)[:, None]
            mixed = inside.cumsum(1, dtype=dtype) / sizes
        else:
            mixed = self._weights(words, windows) @ inside
        lengths = ends - starts
        z = first.index_select(0, starts) + last.index_select(0, ends)
        z = z + _of_spans(mixed, starts, lengths).to(z.dtype)
        if self.lengths is not None:
            z = z + self.lengths(lengths)
        return self.out(bias_gelu(z, self.bias))

    def _weights(self, words: Tensor, windows: Tensor) -> Tensor:
        """(W, K, K): for each of a window's first words the weights of those up to it."""
        assert self.attend is not None
        scores = self.attend(words)
        scores = _rows(scores, windows).transpose(1, 2)  # (W, 1, K)
        count = windows.shape[1]
        later = torch.ones(count, count, dtype=torch.bool, device=words.device).triu(1)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        scores = scores.to(dtype).masked_fill(later, float("-inf"))
        return scores.softmax(2).to(words.dtype)


class BiaffineScores(nn.Module):
    """Spans by their first and last word alone, each through a network of its own, and all products of the two.

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
        """As :meth:`BoundaryScores.reset_parameters`; the bilinear weights are summed over both of their sides."""
        width = self.bilinear.in_features
        nn.init.normal_(self.project.weight, std=self.project.in_features**-0.5)
        nn.init.zeros_(self.bias)
        nn.init.normal_(self.bilinear.weight, std=1 / width)
        # Of class 0 what belongs to the two ones: its bias.
        self.bilinear.weight.data[width - 1, -1] = prior(self.bilinear.out_features // width)

    def forward(self, words: Tensor, windows: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """As :meth:`BoundaryScores.forward`."""
        first, last = bias_gelu(self.project(words), self.bias).chunk(2, dim=1)
        first, last = F.pad(first, (0, 1), value=1.0), F.pad(last, (0, 1), value=1.0)
        # A window's products at once: (size, classes) numbers a word, where a span at a time would need them a span.
        by_class = self.bilinear(first).unflatten(1, (-1, last.shape[1]))
        scores = _rows(last, windows) @ by_class.transpose(1, 2)  # (W, K, classes)
        return _of_spans(scores, starts, ends - starts)


def prior(num_labels: int) -> float:
    """The first bias of class 0, "none", with which a span is one of the others with probability 0.01.

    Nearly all spans are none: without it the first steps would spend themselves on saying so of every one.
    Source: Lin et al. 2017, arXiv:1708.02002, section 4.1.
    """
    return math.log(99 * (num_labels - 1))


def _rows(x: Tensor, windows: Tensor) -> Tensor:
    """(W, width) → (W, K, width), the rows of each window."""
    return x.index_select(0, windows.flatten()).view(*windows.shape, x.shape[1])


def _of_spans(x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """(W, K, width) → (spans, width), for each span the row that ends where it does."""
    return x.flatten(0, 1).index_select(0, starts * x.shape[1] + lengths)
