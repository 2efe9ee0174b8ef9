"""Sizes in bytes, as users write them."""

import re

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_size(name: str, value: object) -> int:
    """Return a size in bytes, given as a whole number or as text such as "4GiB" or "500MB".

    Raises:
        ValueError: The value has none of these forms, or is less than a byte.
    """
    forms = 'give bytes, or a size such as "4GiB" or "500MB"'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{name}: {value!r:.60} is no size; {forms}")
    found = re.fullmatch(r"(\d{1,20}(?:\.\d{1,9})?)\s*([a-z]{0,3})", str(value).strip().lower(), re.ASCII)
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{name}: {value!r:.60} is no size; {forms}")
    size = int(float(found[1]) * _UNITS[found[2]]) if "." in found[1] else int(found[1]) * _UNITS[found[2]]
    if size < 1:
        raise ValueError(f"{name}: {value!r:.60} is nothing; {forms}")
    return size


def parse_bytes(name: str, text: str) -> int:
    """Parse a size in vLLM's format: k, m, g are powers of 1000; K, M, G are powers of 1024.

    Raises:
        ValueError: The text does not have this format.
    """
    number, unit = (text[:-1], text[-1]) if text[-1:] in tuple("kmgtKMGT") else (text, "")
    if not (number.isascii() and number.isdecimal() and len(number) < 20):
        raise ValueError(f"{name}: {text!r:.60} is not understood; give bytes, or a size such as 512M or 1G")
    base, power = 1000 if unit.islower() else 1024, " KMGT".index(unit.upper() or " ")
    return int(number) * int(base**power)
