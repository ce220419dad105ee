"""Loads files of torch.save: no code runs, and nothing takes more memory than the file has bytes.

    load_torch(path)    ──> the tensors and plain values in it
    open_torch(path)    ──> {name: tensor} of a weight file

The pickle's instructions are scanned before torch executes them: only names that genuine files use
are allowed, and an error says which name was not. torch's weights-only loader allows more: with
`bytearray` or sparse tensors, a small file can take any amount of memory.
"""

from __future__ import annotations

import mmap
import pickletools
import re
import zipfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from palm_ds.common.errors import UserError
from palm_ds.common.files import check_right_file
from palm_ds.common.messages import printable

MOST_INSTRUCTIONS = 500_000  # per pickle; a tensor takes about forty
MOST_COPIES = 4
"""The tensors may have this many times the file's size: tied ones are stored once."""
_LARGEST_PICKLE = 1 << 26  # bytes
_LEGACY_PICKLES = 5  # of files from before torch 1.6: magic number, version, machine, data, keys
_STORAGE = re.compile(r"torch\.(\w+Storage|storage\.(Untyped|Typed)Storage)")
_DTYPE = re.compile(
    r"torch\.(bfloat16|float(16|32|64|8_\w+)|u?int(8|16|32|64)|complex(32|64|128)|bool)"
)
_GENUINE = frozenset(
    {
        "collections.OrderedDict",
        "collections.Counter",
        "builtins.set",
        "__builtin__.set",
        "torch.Size",
        "torch.Tensor",
        "torch._tensor._rebuild_from_type_v2",
        "torch.device",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch.nn.parameter.Parameter",
        "torch.nn.parameter.Buffer",
    }
)
_OTHER_TENSORS = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without values (device meta)",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_wrapper_subclass": "a tensor of a class of its own",
}


SAVE_WEIGHTS = (
    "save its weights alone, beside the model's config.json: "
    'torch.save(torch.load(FILE)["state_dict"], "pytorch_model.bin")'
)
"""What to do with a training checkpoint, of Lightning or of somebody's own loop."""


# ---- loading ----


def open_torch(path: Path) -> dict[str, torch.Tensor]:
    """Load a weight file. Raises UserError if it contains anything other than tensors by name."""
    state = load_torch(path)
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds {_kind(state)}; expected tensors by name")
    if isinstance(state.get("state_dict"), dict):
        raise UserError(f"{path}: is a training checkpoint; {SAVE_WEIGHTS}")
    for name, tensor in state.items():
        if not isinstance(name, str):
            shown = name if isinstance(name, int) else _kind(name)
            raise UserError(f"{path}: has the key {shown}; expected tensors by name")
        if not isinstance(tensor, torch.Tensor):
            shown = printable(name)[:80]
            raise UserError(f"{path}: {shown}: is {_kind(tensor)}; expected tensors by name")
    check_sizes(path, state)
    return {name: tensor.detach() for name, tensor in state.items()}


def load_torch(path: Path, classes: Collection[tuple[Callable[..., Any], str]] = ()) -> Any:
    """Load a file of torch.save. `classes`: further (class or function, name) pairs that it may
    use; what is given is called in place of what has the name. Raises UserError if it is damaged
    or asks for anything else."""
    check_right_file(path)
    try:
        zipped = is_zipped(path)
        _check_pickles(path, zipped, {name for _, name in classes})
        allowed: list[Any] = list(classes)
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except UserError:
        raise
    except Exception as error:  # of many types; each means that torch did not write it
        raise UserError(f"{path}: cannot be read as a file of torch.save: {_why(error)}") from None


def is_zipped(path: Path) -> bool:
    """Whether the file is a zip, as torch writes since 1.6; only these can be mapped."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def check_sizes(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Raises UserError for tensors that would take far more memory than the file has bytes."""
    for name, tensor in tensors.items():
        check_plain(tensor, f"{path}: {printable(name)[:80]}")
    check_total(path, sum(x.numel() * x.itemsize for x in tensors.values()), path.stat().st_size)


def check_plain(tensor: torch.Tensor, where: str) -> None:
    """Raises UserError for a tensor that does not store every element."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise UserError(f"{where}: is not a plain tensor; save it dense and on the CPU")
    stored = tensor.untyped_storage().nbytes() // tensor.itemsize
    if tensor.numel() > stored:
        shape = tuple(tensor.shape)
        raise UserError(f"{where}: has the shape {shape}, but only {stored:,} values are stored")


def check_total(path: Path, claimed: int, stored: int) -> None:
    """Raises UserError if the tensors of a file together are larger than it can hold."""
    if claimed > MOST_COPIES * stored:
        raise UserError(
            f"{path}: its tensors have {claimed:,} bytes, the file {stored:,}; the same values are "
            "used again and again"
        )


# ---- the pickle ----


def _check_pickles(path: Path, zipped: bool, allowed: Collection[str]) -> None:
    if path.stat().st_size == 0:
        raise UserError(f"{path}: is empty")
    left = MOST_INSTRUCTIONS
    for pickle in _zipped_pickle(path) if zipped else _legacy_pickles(path):
        left = _check_instructions(path, pickle, allowed, left)


def _zipped_pickle(path: Path) -> Iterator[bytes]:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        if len({name.casefold() for name in names}) < len(names):
            # torch's reader takes the last of them, in capitals or not, and this check another one
            raise UserError(f"{path}: has two members of one name, as torch.save's files never do")
        if packed := [x.filename for x in members if x.compress_type != zipfile.ZIP_STORED]:
            shown = printable(packed[0])[:80]
            raise UserError(f"{path}: {shown}: is compressed, as torch.save's files never are")
        check_total(path, sum(member.file_size for member in members), path.stat().st_size)
        if any(name.endswith("/constants.pkl") for name in names):
            raise UserError(f"{path}: is a TorchScript program; save the model's state_dict")
        pickles = [x for x in members if re.fullmatch(r"[^/]*/data\.pkl", x.filename)]
        if len(pickles) != 1:
            raise UserError(f"{path}: is a zip archive, but not one of torch.save")
        if pickles[0].file_size > _LARGEST_PICKLE:
            raise UserError(f"{path}: its pickle has {pickles[0].file_size:,} bytes; refused")
        yield archive.read(pickles[0])


def _legacy_pickles(path: Path) -> Iterator[mmap.mmap]:
    """The file, positioned at each of its pickles."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:1] != b"\x80":
            raise UserError(f"{path}: was not written by torch.save: neither a zip nor a pickle")
        for _ in range(_LEGACY_PICKLES):
            yield data


def _check_instructions(
    path: Path, pickle: bytes | mmap.mmap, allowed: Collection[str], left: int
) -> int:
    """Raises UserError for a name that weights do not need. Returns the number of instructions left
    for the rest of the file."""
    strings: list[str] = []  # the last two are what STACK_GLOBAL asks for
    for code, argument, _ in pickletools.genops(pickle):  # type: ignore[arg-type]
        left -= 1
        if left < 0:
            raise UserError(f"{path}: a pickle of over {MOST_INSTRUCTIONS:,} instructions; refused")
        if code.name in ("GLOBAL", "INST"):
            _check_name(path, str(argument).replace(" ", "."), allowed)
        elif code.name == "STACK_GLOBAL":
            _check_name(path, ".".join(strings[-2:]), allowed)
        elif isinstance(argument, str):
            strings = [*strings[-1:], argument]
    return left


def _check_name(path: Path, name: str, allowed: Collection[str]) -> None:
    if name in _GENUINE or name in allowed or _STORAGE.fullmatch(name) or _DTYPE.fullmatch(name):
        return
    if what := _OTHER_TENSORS.get(name):
        raise UserError(f"{path}: holds {what}; save the weights as plain tensors")
    raise UserError(
        f"{path}: asks for {printable(name)[:200]}, which files of weights do not; refused"
    )


def _why(error: Exception) -> str:
    """One line without torch's advice to trust the file."""
    text = str(error)
    if match := re.search(r"Unsupported \w+ [\w.]+", text):
        return match[0]
    line = next(iter(text.strip().splitlines()), "")
    return type(error).__name__ if not line or "weights_only" in text else printable(line)[:300]


def _kind(value: object) -> str:
    return {"NoneType": "nothing"}.get(type(value).__name__, f"a {type(value).__name__}")
