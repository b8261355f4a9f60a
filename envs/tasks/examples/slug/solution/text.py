"""Text for addresses."""

import re
import unicodedata


def slugify(title: str) -> str:
    """A title as part of an address: lower case, words joined by dashes."""
    plain = unicodedata.normalize("NFKD", title.lower()).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
