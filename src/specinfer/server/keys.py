"""API keys: the settings of each, and the file that they are read from."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields

from specinfer.core.limits import TenantLimits

ROLES = frozenset({"admin", "generate", "metrics"})
MIN_KEY_LENGTH = 8
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LIMITS = tuple(each.name for each in fields(TenantLimits))
_EXAMPLE = "a line is such as: sk-0123456789 generate name=alice max-num-seqs=4"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySettings:
    """Settings of one key.

    Attributes:
        name: Its name in metrics; without one it is called by its place, such as "key-1".
        roles: "generate", "metrics" and "admin", or some of them.

    Raises:
        ValueError: A field cannot be used; the message names it and the remedy.
    """

    name: str = ""
    roles: Collection[str] = ROLES
    limits: TenantLimits = field(default_factory=TenantLimits)

    def __post_init__(self) -> None:
        if self.name and not _NAME.fullmatch(self.name):
            raise ValueError(f"name: {self.name!r:.80} must be up to 64 letters, digits, '.', '_' and '-'")
        if not self.roles or not ROLES.issuperset(self.roles):
            raise ValueError(f"{','.join(self.roles)!r:.60} after a key; write {', '.join(sorted(ROLES))}, with commas")


def check_key(name: str, key: str) -> None:
    """Check that a key is long enough and can be sent in a header.

    Raises:
        ValueError: It is not. The message begins with the name and does not show the key.
    """
    if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{name}: a key needs at least {MIN_KEY_LENGTH} visible ASCII characters without spaces")


def named(keys: Collection[str], settings: Mapping[str, KeySettings]) -> dict[str, KeySettings]:
    """Return the settings of each key by its name, in the order of the keys.

    Raises:
        ValueError: Two keys have one name.
    """
    by_name: dict[str, KeySettings] = {}
    for i, key in enumerate(keys, 1):
        each = settings.get(key, KeySettings())
        name = each.name or f"key-{i}"
        if name in by_name:
            raise ValueError(f"api_key_file: two keys have the name {name}; give each a name of its own")
        by_name[name] = each
    return by_name


def read_key_file(path: str, text: str) -> dict[str, KeySettings]:
    """Return the settings of each key in the text of a file.

    A line has a key, its roles if it may not do everything, then name=NAME and limits such as max-num-seqs=4.

    Raises:
        ValueError: A line cannot be used; the message names it and does not show the key.
    """
    keys: dict[str, KeySettings] = {}
    for i, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        place = f"api_key_file: {path}, line {i}"
        if words[0] in keys:
            raise ValueError(f"{place}: the key is in an earlier line too; name it once")
        try:
            check_key(place, words[0])
            keys[words[0]] = _settings(words[1:])
        except ValueError as error:
            raise ValueError(f"{place}: {str(error).removeprefix(f'{place}: ')}; {_EXAMPLE}") from error
    if not keys:
        raise ValueError(f"api_key_file: {path} has no key; {_EXAMPLE}")
    return keys


def _settings(words: Collection[str]) -> KeySettings:
    roles = " ".join(word for word in words if "=" not in word)
    given: dict[str, str] = {}
    for word in words:
        name, is_setting, value = word.partition("=")
        if is_setting:
            name = name.replace("-", "_")
            if name not in ("name", *_LIMITS):
                known = ", ".join(each.replace("_", "-") for each in ("name", *_LIMITS))
                raise ValueError(f"{word.partition('=')[0]!r:.60} is not a setting of a key; use {known}")
            if name in given:
                raise ValueError(f"{name.replace('_', '-')} is given twice; give it once")
            given[name] = value
    if given.get("name") == "":
        raise ValueError("name: is empty; write a name after =, or leave it out")
    return KeySettings(
        name=given.pop("name", ""),
        roles=tuple(role.strip() for role in roles.split(",")) if roles else ROLES,
        limits=_limits(given),
    )


def _limits(given: Mapping[str, str]) -> TenantLimits:
    for name, value in given.items():
        if not re.fullmatch(r"\d{1,15}", value):
            raise ValueError(f"{name.replace('_', '-')} must be a whole number, not {value!r:.40}")
    try:
        return TenantLimits(**{name: int(value) for name, value in given.items()})
    except ValueError as error:
        name, rest = str(error).split(" ", 1)
        raise ValueError(f"{name.replace('_', '-')} {rest}") from error
