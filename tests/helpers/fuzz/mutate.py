"""Seeded mutations of bytes, JSON and pickles. All take a `random.Random` and change a copy."""

from __future__ import annotations

import copy
import json
import pickletools
import struct
from random import Random
from typing import Any

NASTY: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 1.5, -0.0),
    *(float("nan"), float("inf"), 1e308, 1e-320),
    *(255, 65_535, 2**31 - 1, 2**31, 2**32, 10**9, 10**12, 2**63, -(2**63), 10**30, 10**400),
    *("", "32", "1e-12", "true", "a" * 10_000, "\x1b[2J\x07", "\x9b31m", "\u202e", "a\nb", "\x00"),
    *("../../etc/passwd", "/", "..", "[PAD]", "LABEL_0", "%s%n", "{0}", "LEGACY_Bert", "gelu"),
    *([], {}, [None], [[]], {"a": 1}, {"0": "x"}, [1, "a"], [0] * 1000, {"": ""}),
)
_NUMBERS = (0, 1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_PIECES = (
    b"\x00" * 8,
    b"\xff" * 8,
    b"{",
    b"}",
    b"[",
    b'"',
    b",",
    b"\t",
    b"\n",
    b"\r\n",
    b"\xef\xbb\xbf",
    b"\x1b[2J",
    b"\xc3\x28",
    b"PK\x03\x04",
    b"\x80\x04",
    b"NaN",
    b"1e999",
    b"9" * 5000,
    b"[" * 3000,
)
_OPCODES = (
    b"cos\nsystem\n",
    b"cbuiltins\neval\n",
    b"ctorch\nFloatStorage\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"cnumpy\nndarray\n",
    b"ccollections\nOrderedDict\n",
    b"X\x03\x00\x00\x00abc",
    b"J\xff\xff\xff\x7f",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"h\x00",
    b"q\x00",
    b"K\x00",
    b"\x94",
    *(bytes([code]) for code in b"}])(NutsaebRQ.02\x85\x86\x87\x88\x89\x93"),
)


def mutated_bytes(data: bytes, random: Random) -> bytes:
    """With one to four changes."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        data = _changed(data, random)
    return data


def _changed(data: bytes, random: Random) -> bytes:
    at, end = sorted(random.randrange(len(data) + 1) for _ in range(2))
    kind = random.randrange(8)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + random.choice(_PIECES) + data[at:]
    if kind == 3:
        return data[:at] + data[min(end, at + 64) :]
    if kind == 4:
        return data[:end] + data[at : min(end, at + 4096)] + data[end:]
    if kind == 5:
        form = random.choice(("<I", "<Q", "<H"))
        size = struct.calcsize(form)
        number = struct.pack(form, random.choice(_NUMBERS) % (1 << 8 * size))
        return data[:at] + number + data[at + size :]
    if kind == 6:
        flipped = [data[at] ^ 1 << random.randrange(8)] if at < len(data) else []
        return data[:at] + bytes(flipped) + data[at + 1 :]
    return data[:at] + bytes(random.randrange(256) for _ in range(8)) + data[at + 8 :]


def overwritten(data: bytes, random: Random, start: int, end: int) -> bytes:
    """With other bytes in [start, end), of the same length."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(start, end)
        changed[at] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))
    return bytes(changed)


def mutated_json(text: str, random: Random) -> str:
    """JSON with other values, without keys, with strange ones, or with a key twice."""
    if random.random() < 0.1:
        data = mutated_bytes(text.encode(), random)
        return data.decode("utf-8", "surrogateescape")
    value = json.loads(text)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        value = changed_value(value, random)
    text = json.dumps(value, ensure_ascii=random.random() < 0.5)
    if random.random() < 0.03 and text.startswith("{") and len(text) > 2:
        return '{"model_type": 1, ' + text[1:]
    return text


def changed_value(value: Any, random: Random) -> Any:
    """A copy with one place changed."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return nasty(random)
    # mostly near the top: a vocabulary has thousands of places
    near = [place for place in places if place[2] <= 2]
    holder, key, _ = random.choice(near if near and random.random() < 0.7 else places)
    kind = random.randrange(10)
    if kind < 6:
        holder[key] = nasty(random)
    elif kind == 6:
        del holder[key]
    elif kind == 7 and isinstance(holder, dict):
        holder[str(nasty(random))[:50]] = holder.pop(key)
    elif kind == 8 and isinstance(holder[key], int | float):
        holder[key] = holder[key] * random.choice((-1, 2, 0.5, 10**6))
    else:
        holder[key] = [holder[key]] * random.choice((1, 2, 100))
    return value


def nasty(random: Random) -> Any:
    return copy.deepcopy(random.choice(NASTY))


def _places(value: Any, depth: int = 0) -> list[tuple[Any, Any, int]]:
    """(holder, key, depth) of every value inside."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    found = [(value, key, depth) for key in keys]
    for key in keys:
        if isinstance(value[key], dict | list) and value[key]:
            found += _places(value[key], depth + 1)
    return found


def mutated_pickle(data: bytes, random: Random) -> bytes:
    """With other instructions: dropped, repeated, moved, or hostile ones."""
    if random.random() < 0.3:
        return mutated_bytes(data, random)
    starts = [position for _, _, position in pickletools.genops(data) if position is not None]
    for _ in range(random.choice((1, 1, 2, 3))):
        i = random.randrange(len(starts) - 1)
        at, end = starts[i], starts[min(i + random.choice((1, 1, 2, 10)), len(starts) - 1)]
        kind = random.randrange(4)
        if kind == 0:
            data = data[:at] + data[end:]
        elif kind == 1:
            data = data[:end] + data[at:end] * random.choice((1, 1, 50)) + data[end:]
        else:
            data = data[:at] + random.choice(_OPCODES) + data[at if kind == 2 else end :]
    return data
