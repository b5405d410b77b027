"""Helpers of every layer, which import nothing of the package above them."""
