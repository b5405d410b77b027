"""A text that several data tests read."""

TEXT = (
    "= A heading =\nThe first sentence. A second one!  Was there a third? Yes: 3.5 of them.\n\n"
    "A line that ends without a mark\nand goes on... Dr. Who said so."
)
