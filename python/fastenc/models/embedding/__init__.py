"""From texts to vectors: `encode`, word vectors, standardization, and the files of sentence-transformers."""
