"""Sizes in bytes, as users write them."""

import re

# Single letters are vLLM's: small ones are powers of 1000, capital ones of 1024. Longer units may be in any case.
_UNITS = {"": 1}
for power, letter in enumerate("kmgt", 1):
    _UNITS |= {letter: 1000**power, letter.upper(): 1024**power, f"{letter}b": 1000**power, f"{letter}ib": 1024**power}


def parse_size(name: str, value: object) -> int:
    """Return a size in bytes, given as a whole number or as text such as "4GiB", "500MB" or "512M".

    Raises:
        ValueError: The value has none of these forms, or is less than a byte.
    """
    forms = "give bytes, or a size such as 4GiB, 500MB or 512M"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{name}: {value!r:.60} is not a size; {forms}")
    found = re.fullmatch(r"(\d{1,20}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})", str(value).strip(), re.ASCII)
    unit = None if found is None else found[2] if len(found[2]) < 2 else found[2].lower()
    if found is None or unit not in _UNITS:
        raise ValueError(f"{name}: {value!r:.60} is not a size; {forms}")
    size = int(float(found[1]) * _UNITS[unit]) if "." in found[1] else int(found[1]) * _UNITS[unit]
    if size < 1:
        raise ValueError(f"{name}: {value!r:.60} is nothing; {forms}")
    return size
