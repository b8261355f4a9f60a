"""Reads profiles. Apart from profile.py, since the fork server, which dresses the sandboxes, has no YAML."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from envs.sandbox.realism.profile import Profile

_FOLDER = Path(__file__).with_name("profiles")


def load_profile(name: str, *, user: str | None = None, hostname: str | None = None) -> Profile:
    """A profile by name, or from a file of the user's.

    Args:
        name: of a file in profiles/, or the path of one (with a slash, or ending in .yaml).
        user: in place of the profile's own; None: that.
        hostname: the same.

    Raises:
        ValueError: there is no such profile, or its file holds something else.
    """
    is_path = "/" in name or name.endswith((".yaml", ".yml"))
    path = Path(name).expanduser() if is_path else _FOLDER / f"{name}.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(sorted(p.stem for p in _FOLDER.glob("*.yaml")))
        raise ValueError(f"profile={name!r} cannot be read ({error.strerror}): give {known}, or a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"profile={name!r} is no YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise ValueError(f"profile={name!r} must hold keys and values, such as `hostname: box`")
    try:
        profile = Profile.from_dict(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"profile={name!r}: {error}") from None
    given = {key: value for key, value in (("user", user), ("hostname", hostname)) if value is not None}
    return replace(profile, **given)
