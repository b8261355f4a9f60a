"""Text for addresses."""


def slugify(title: str) -> str:
    """A title as part of an address: lower case, words joined by dashes."""
    kept = "".join(c if c.isalnum() else "-" for c in title.lower())
    return kept.strip("-")
