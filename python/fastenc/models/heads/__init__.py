"""Models with a head: the encoder, the layers of a task and its loss."""
