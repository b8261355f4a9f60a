"""What looks like a secret: by the name that it has, or by its own form. Errors are shown without any.

House rule: a config names secrets (the environment variable that holds one) and never holds them, since a config is
stored with its run, in the record, and in messages. `composer.secrecy` holds a config against this. Pure.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_plus

HIDDEN = "(hidden)"
_MAX_LOOKED_AT = 4096
"""Characters of a value, of which fewer are shown."""

_NAME = re.compile(
    r"""(?:password|passwd|passphrase|secret|token|api_?key|credentials?|(?:private|access|auth)_?key|access_key_id
        |authorization|(?:^|_)(?:pwd|cookie))$""",
    re.VERBOSE,
)
_NAMES_A_FILE = re.compile(r"(?:credentials?|private_?key|cookie)$")
_PLACEHOLDER = re.compile(
    r"""\s* | \(hidden\) | .*\{[\w.: -]+\}.* | \$\w+ | .*\$[{(].* | <[^<>]*> | [*xX.?-]+
        | (?i:none|null|empty|dummy|unused|ignored|placeholder|no[-_]?key|not[-_]needed|true|false)""",
    re.VERBOSE | re.DOTALL,
)
"""What stands where a secret would: nothing, `{api_key}`, `${VARIABLE}`, `<token>`, `***`, `EMPTY`."""
_IN_ADDRESS = re.compile(
    r"""(?P<before>\b[a-z][a-z0-9+.-]{0,20}://[^\s/?#@:'"]*:)(?P<secret>[^\s/?#@'"]+)(?=@)""", re.IGNORECASE
)
"""A password in an address that stands anywhere in a text."""
# These two must not split an address: a password may hold a slash. SQLAlchemy ends one at "@" only.
_USERINFO = re.compile(
    r"https?://(?P<web>[^/?#]*)@|(?!https?://)(?:[a-z0-9+]+://)?+[^:/@]*:(?P<other>[^@]*)@", re.IGNORECASE
)
_PARAMETER = re.compile(
    r"[?&;#][^=&;#]*(passw|pwd|token|secret|credential|(?<!ssl)(?<!ssl_)key)[^=&;#]*=(?P<secret>[^&;#]*)", re.IGNORECASE
)
"""Of an address; `sslkey` and `ssl_key` name files."""
_TOKEN = re.compile(
    r"""(?<![\w-])(?:
        sk-(?=[\w-]*\d)[\w-]{16,}                      # OpenAI, Anthropic, and those who speak like them
      | gh[pousr]_\w{20,} | github_pat_\w{20,} | glpat-[\w-]{16,}
      | hf_[A-Za-z0-9]{20,} | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{40,} | gsk_\w{20,} | xai-[\w-]{20,} | dapi[0-9a-f]{32}
      | xox[abeprs]-[\w-]{10,} | AIza[\w-]{30,} | (?:AKIA|ASIA)[A-Z0-9]{16}
      | eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}         # a JSON web token
      )(?![\w-])
      | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----(?:.*?-----END\ [A-Z ]*PRIVATE\ KEY-----|.*)
      | (?<![\w-])(?:Bearer|Basic)\ (?=\S*\d)[A-Za-z0-9+/._~=-]{16,}
    """,
    re.VERBOSE | re.DOTALL,
)
_PAIR = re.compile(r"""\b(?P<name>[A-Za-z][\w-]{0,60})(?P<sign>['"]?\s*[:=]\s*['"]?)(?P<value>[^\s,;&'"}\])]+)""")


def names_secret(name: str) -> bool:
    """Whether something of this name is a secret: the last part of a dotted key, a variable, an option, a header.

    Example:
        >>> names_secret("OPENAI_API_KEY"), names_secret("--auth-token"), names_secret("clientSecret")
        (True, True, True)
        >>> names_secret("api_key_env"), names_secret("max_tokens"), names_secret("key")
        (False, False, False)
    """
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return _NAME.search(re.sub(r"[^a-z0-9]+", "_", snake.lower())) is not None


def is_placeholder(text: str) -> bool:
    """Whether a text only stands where a secret would."""
    return _PLACEHOLDER.fullmatch(text) is not None


def named_secret(name: str, value: object) -> str | None:
    """What makes the value of a name a secret, in words; None if nothing does."""
    if isinstance(value, bool) or not names_secret(name):
        return None
    if isinstance(value, int | float):  # counts of tokens are none
        return None if re.search(r"token$", name, re.IGNORECASE) else "is named like a secret"
    if not isinstance(value, str) or is_placeholder(value):
        return None
    if _NAMES_A_FILE.search(name.lower()) and value.startswith(("/", "~/", "./")):
        return None
    return "is named like a secret"


def secret_in(text: str) -> str | None:
    """What in a text is a secret by its own form, in words; None if nothing is."""
    if any(not is_placeholder(found["secret"]) for found in _IN_ADDRESS.finditer(text)):
        return "has a password in its address"
    if _TOKEN.search(text):
        return "holds what looks like a token"
    return secret_in_address(text) if re.fullmatch(r"[a-z][a-z0-9+.-]*://\S+", text, re.IGNORECASE) else None


def secret_in_address(address: str) -> str | None:
    """What in an address is a secret, in words; None if nothing is. Whoever is named before a web host is one."""
    if (found := _USERINFO.match(address)) and not is_placeholder(found["web"] or found["other"] or ""):
        return "has a password in its address"
    for found in _PARAMETER.finditer(_parameters(address)):
        if not is_placeholder(found["secret"]):
            return "has a secret among its parameters"
    return None


def hide_address(address: str) -> str:
    """An address without anything that could be a secret."""
    address = re.sub(r"^([a-z0-9+]*://)?.*@", r"\1***@", address, flags=re.DOTALL | re.IGNORECASE)
    return re.sub(r"([?#]).*", r"\1***", address, flags=re.DOTALL)


def _parameters(address: str) -> str:
    """What follows the path, decoded: ODBC hides a whole connection string in one parameter."""
    found = re.search(r"[?#].*", address, re.DOTALL)
    return unquote_plus(found[0]) if found else ""


def secret_in_words(words: list[object]) -> tuple[int, str] | None:
    """The first word of a command line, or of a list of variables, that is a secret: its place, and what makes it one.

    Example:
        >>> secret_in_words(["serve", "--api-key", "abc", "--port", "1"])
        (2, 'follows --api-key')
        >>> secret_in_words(["sh", "-c", "API_KEY=abc serve"])
        (2, 'sets API_KEY')
        >>> secret_in_words(["serve", "--api-key", "{api_key}"])
    """
    for place, word in enumerate(words):
        if not isinstance(word, str) or "\n" in word:
            continue
        for pair in re.finditer(r"(?:^|(?<=\s))-*(?P<name>[A-Za-z][\w-]*)=(?P<value>\S+)", word):
            if named_secret(pair["name"], pair["value"].strip("'\"")):
                return place, f"sets {pair['name']}"
        before = words[place - 1] if place else None
        is_option = isinstance(before, str) and re.fullmatch(r"-{1,2}[A-Za-z][\w-]*", before)
        if is_option and not word.startswith("-") and named_secret(str(before), word):
            return place, f"follows {before}"
    return None


def hide(text: str) -> str:
    """A text without what is a secret by its own form.

    Example:
        >>> hide("no such key: postgresql://me:hunter2@host/db")
        'no such key: postgresql://me:***@host/db'
    """
    return _TOKEN.sub("***", _IN_ADDRESS.sub(r"\g<before>***", text))


def hide_named(text: str) -> str:
    """A text without what is a secret by its form, or by the name before it: `{API_KEY: abc}`, `API_KEY=abc`."""

    def without(pair: re.Match[str]) -> str:
        shown = "***" if named_secret(pair["name"], pair["value"]) else pair["value"]
        return f"{pair['name']}{pair['sign']}{shown}"

    return _PAIR.sub(without, hide(text))


def shown_value(name: str, value: object, sentence: str) -> tuple[str, str]:
    """The value of a name, as Python writes it, and a sentence about it that may quote it: both without a secret."""
    written = repr(value)[:_MAX_LOOKED_AT]
    if named_secret(name, value) or (names_secret(name) and isinstance(value, dict | list | tuple)):
        return repr(HIDDEN), sentence.replace(str(value), HIDDEN)
    shown = hide_named(written)
    return shown, sentence if shown == written else hide_named(sentence.replace(str(value), HIDDEN))
