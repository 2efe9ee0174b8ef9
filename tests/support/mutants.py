"""Mutants of files that come with models: each is one or a few changes of a good file, chosen by a seed."""

import copy
import json
import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any

# What stands where another type, size or form is expected.
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 7, 0.5, -0.0, 1e308, float("inf"), float("nan"), 2**31 - 1, 2**31, 2**32, 2**63,
    2**64, 10**30, -(2**63), 10**6, "", "a", "\0", "\ud800", "../../etc/passwd", "a" * 100_000, "(a*)*b", "{{",
    "{% for i in range(99999) %}{% for i in range(9) %}{% endfor %}{% endfor %}", [], {}, [None], [[]],
    [[[[[[]]]]]], {"a": None}, {"": {}}, "none-such", "llama", "gpt2", "mamba", "yarn", "float16", "torch.int8",
    ["full_attention"] * 3, ["sliding_attention"] * 2, [0] * 10_000, {"rope_type": "yarn"},
    {"rope_type": "llama3", "factor": 0}, {"rope_type": "dynamic", "factor": 1e30}, {"quant_method": "gptq", "bits": 0},
)  # fmt: skip
_TYPES = (b'"BF16"', b'"F16"', b'"F64"', b'"I64"', b'"U8"', b'"F8_E4M3"', b'"BOOL"', b'"C64"', b'"F4"', b'"F99"')


def mutated_json(data: bytes, seed: int, fields: Sequence[str] = ()) -> bytes:
    """Return JSON with other values, keys or lengths, or damaged bytes.

    Args:
        fields: Names of fields that the file may have, or may not yet.
    """
    source = random.Random(seed)
    if source.random() < 0.15:
        return mutated_bytes(data, seed)
    value = json.loads(data)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        if fields and source.random() < 0.6 and isinstance(value, dict):
            value[source.choice(fields)] = copy.deepcopy(source.choice(HOSTILE))
        else:
            value = _changed(value, source)
    return json.dumps(value).encode()


def mutated_safetensors(data: bytes, seed: int) -> bytes:
    """Return a file of safetensors with another header, or with damaged bytes."""
    source = random.Random(seed)
    if source.random() < 0.4:
        return mutated_bytes(data, seed)
    (size,) = struct.unpack("<Q", data[:8])
    header = json.dumps(_changed(json.loads(data[8 : 8 + size]), source)).encode()
    if source.random() < 0.2:
        header = header.replace(b'"F32"', source.choice(_TYPES), source.choice((1, 100)))
    return struct.pack("<Q", len(header) + source.choice((0, 0, 0, 0, 1, -1))) + header + data[8 + size :]


def mutated_bytes(data: bytes, seed: int) -> bytes:
    """Return the bytes with some changed, added, removed or cut off, mostly near the start."""
    source, changed = random.Random(seed), bytearray(data)
    for _ in range(source.choice((1, 1, 2, 5))):
        size = len(changed)
        at = source.randrange(min(size, source.choice((16, 200, size)))) if size else 0
        kind = source.choice(("byte", "byte", "insert", "remove", "cut", "copy", "number"))
        if kind == "byte":
            changed[at : at + 1] = bytes([source.randrange(256)])
        elif kind == "insert":
            changed[at:at] = source.randbytes(source.choice((1, 8, 1000)))
        elif kind == "remove":
            del changed[at : at + source.choice((1, 8, 1000))]
        elif kind == "cut":
            del changed[at:]
        elif kind == "copy" and size:
            start = source.randrange(size)
            changed[at : at + 8] = changed[start : start + 8]
        else:
            number = source.choice((0, 1, 2**63, 2**64 - 1, 2**32, 2**31, 10**8))
            changed[at : at + 8] = struct.pack("<Q", number)
    return bytes(changed)


def _changed(value: Any, source: random.Random) -> Any:
    """Return a JSON value of which one part is removed, renamed, repeated, scaled or replaced; the value is changed."""
    holder, key, part = None, None, value
    while isinstance(part, (dict, list)) and part and (holder is None or source.random() < 0.75):
        holder = part
        key = source.choice(list(part)) if isinstance(part, dict) else source.randrange(len(part))
        part = part[key]
    if holder is None:
        return copy.deepcopy(source.choice(HOSTILE))
    chance = source.random()
    if chance < 0.2:
        del holder[key]
    elif chance < 0.3 and isinstance(holder, Mapping):
        holder[source.choice(("", "a", "type", "x" * 1000, f"{key} "))] = part
    elif chance < 0.4 and isinstance(holder, list):
        holder.extend([copy.deepcopy(part)] * source.choice((1, 2, 1000)))
    elif chance < 0.5 and isinstance(part, int | float):
        holder[key] = part * source.choice((2, -1, 1000, 2**31)) + source.choice((0, 1))
    else:
        holder[key] = copy.deepcopy(source.choice(HOSTILE))
    return value
