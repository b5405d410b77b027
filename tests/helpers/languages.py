"""Documents of several languages."""

DOCUMENTS = {
    "en": ["\n".join(f"the {i} lines of a large language" for i in range(400))] * 2,
    "mt": ["lingwa żgħira\nb'ftit kliem", "kelma"],
}
