"""Untrusted archives: good ones are unpacked completely, nothing of the others."""

from __future__ import annotations

import gzip
import io
import os
import resource
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from palm_ds.common.errors import UserError
from palm_ds.weights.download.archive import BadArchiveError, Limits, unpack

FILES = {"vocab.txt": b"[PAD]\n[UNK]\n", "params/word": os.urandom(3000), "params/empty": b""}


def header(name: str, data: bytes = b"", **fields: object) -> bytes:
    """A tar header and its data, whatever they claim."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in fields.items():
        setattr(member, key, value)
    raw = member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    return raw + data + bytes(-len(data) % 512)


END = bytes(1024)
GOOD = header("good.txt", b"good")


def tar(*records: bytes, end: bytes = END) -> bytes:
    return b"".join(records) + end


def zipped(*members: tuple[str | zipfile.ZipInfo, bytes], **options: object) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in members:
            made.writestr(name, data, **options)  # type: ignore[arg-type]
    return file.getvalue()


def special(name: str, mode: int) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name)
    member.external_attr = mode << 16
    return member


def good(kind: str, files: dict[str, bytes] = FILES, top: str = "") -> bytes:
    named = {top + name: data for name, data in files.items()}
    if kind == "zip":
        return zipped(*named.items())
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz" if kind != "tar" else "w") as made:
        for name, data in named.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o4777
            made.addfile(member, io.BytesIO(data))
    return file.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


# ---- good ones ----


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "tgz", "zip"])
@pytest.mark.parametrize("top", ["", "ERNIE_stable/", "./", "./model/"])
def test_every_kind_of_archive_is_unpacked_completely(kind: str, top: str, tmp_path: Path) -> None:
    archive = tmp_path / "given by content, not by name"
    archive.write_bytes(good(kind, top=top))
    assert unpack(archive, tmp_path / "out", flatten=True) == tmp_path / "out"
    assert contents(tmp_path / "out") == FILES
    assert sorted(os.listdir(tmp_path)) == [archive.name, "out"]


def test_without_flatten_the_top_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "a.tgz").write_bytes(good("tgz", top="model/"))
    unpack(tmp_path / "a.tgz", tmp_path / "new" / "out")
    assert contents(tmp_path / "new/out/model") == FILES


def test_permissions_follow_the_umask_not_the_archive(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar(header("d", type=tarfile.DIRTYPE, mode=0), GOOD))
    (tmp_path / "b.tgz").write_bytes(good("tgz"))
    old = os.umask(0o022)
    try:
        for name in ("a.tar", "b.tgz"):
            unpack(tmp_path / name, tmp_path / f"out_{name}")
    finally:
        os.umask(old)
    modes = {
        stat.S_IMODE(path.stat().st_mode)
        for name in ("a.tar", "b.tgz")
        for path in (tmp_path / f"out_{name}").rglob("*")
    }
    assert modes == {0o644, 0o755}


def test_long_names_of_both_kinds_of_tar(tmp_path: Path) -> None:
    name = "/".join(["a" * 90] * 3) + "/字典.txt"
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "a.tar", "w", format=form) as made:
            member = tarfile.TarInfo(name)
            member.size = 2
            made.addfile(member, io.BytesIO(b"ok"))
        assert contents(unpack(tmp_path / "a.tar", tmp_path / f"out{form}")) == {name: b"ok"}


def test_leftovers_and_empty_folders_do_not_prevent_unpacking(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(good("zip"))
    (tmp_path / ".out.unpacking").mkdir()
    (tmp_path / ".out.unpacking" / "half").write_text("half")
    (tmp_path / "out").mkdir()
    assert contents(unpack(tmp_path / "a.zip", tmp_path / "out")) == FILES
    assert sorted(os.listdir(tmp_path)) == ["a.zip", "out"]


def test_a_folder_that_is_not_empty_stays_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(good("zip"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    assert contents(tmp_path / "out") == {"mine": b"mine"}


# ---- hostile and broken ones ----


def nested_headers() -> bytes:
    """Long-name headers in long-name headers: tarfile reads them by recursion."""
    one = header("././@LongLink", b"a" * 40 + b"\0", type=tarfile.GNUTYPE_LONGNAME)
    return gzip.compress(tar(one * 3000, GOOD))


def long_headers() -> bytes:
    """Headers of 3 MiB each, all held in memory until the last."""
    one = header("././@LongLink", b"a" * (3 << 20), type=tarfile.GNUTYPE_LONGNAME)
    return gzip.compress(tar(one * 20, GOOD))


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


def bad_number(field: str, value: bytes) -> bytes:
    """A header with a size that tarfile itself would not write."""
    raw = bytearray(GOOD)
    start, length = {"size": (124, 12)}[field]
    raw[start : start + length] = value.ljust(length, b"\0")
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    return bytes(raw)


def cyclic_zip() -> bytes:
    """Two directory entries for the same bytes."""
    data = zipped(("a", b"x" * 500), ("b", b"y" * 500))
    start = data.index(b"PK\1\2", data.index(b"PK\1\2") + 4)
    return data[: start + 42] + bytes(4) + data[start + 46 :]


def encrypted() -> bytes:
    data = bytearray(zipped(("secret", b"x" * 50)))
    data[6] |= 1
    data[data.index(b"PK\1\2") + 8] |= 1
    return bytes(data)


def wrong_size_zip(size: int) -> bytes:
    data = bytearray(zipped(("liar", os.urandom(5000))))
    start = data.index(b"PK\1\2")
    data[start + 24 : start + 28] = size.to_bytes(4, "little")
    return bytes(data)


LINK = tarfile.SYMTYPE
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "tar ../": (lambda: tar(GOOD, header("../evil", b"x")), "'../evil' is refused: .*leads out"),
    "tar a/../../b": (lambda: tar(header("a/../../b", b"x")), "leads out"),
    "tar absolute": (lambda: tar(header("/tmp/evil", b"x")), "'/tmp/evil' .*absolute"),
    "tar drive": (lambda: tar(header("C:evil", b"x")), "'C:evil' .*drive"),
    "tar backslash": (lambda: tar(header("..\\evil", b"x")), "backslash"),
    "tar symlink out": (
        lambda: tar(header("a", type=LINK, linkname="/etc"), header("a/passwd", b"x")),
        "'a' is refused: it is a link",
    ),
    "tar symlink inside": (
        lambda: tar(GOOD, header("a", type=LINK, linkname="good.txt")),
        "a link",
    ),
    "tar hard link": (
        lambda: tar(header("a", type=tarfile.LNKTYPE, linkname="../../etc/passwd")),
        "'a' is refused: it is a link",
    ),
    "tar device": (lambda: tar(header("sda", type=tarfile.BLKTYPE)), "'sda' .*a device"),
    "tar character device": (lambda: tar(header("tty", type=tarfile.CHRTYPE)), "a device"),
    "tar fifo": (lambda: tar(header("pipe", type=tarfile.FIFOTYPE)), "'pipe' .*a device"),
    "tar unknown type": (lambda: tar(header("what", type=b"Z")), "'what' .*not a regular file"),
    "tar escape codes": (lambda: tar(header("a\x1b[2Jb", b"x")), "unprintable characters"),
    "tar two lines": (lambda: tar(header("a\nerror: all is well", b"x")), "unprintable characters"),
    "tar no UTF-8": (lambda: tar(header("a\udcff", b"x")), "unprintable characters"),
    "tar twice": (lambda: tar(GOOD, GOOD), "'good.txt' .*twice"),
    "tar twice by another path": (lambda: tar(GOOD, header("./good.txt", b"x")), "twice"),
    "tar file as folder": (lambda: tar(GOOD, header("good.txt/a", b"x")), "'good.txt' is a file"),
    "tar folder as file": (
        lambda: tar(header("a/b", b"x"), header("a", b"x")),
        "'a' is refused: it appears twice",
    ),
    "tar name too long": (lambda: tar(header("a" * 300, b"x")), "too long"),
    "tar path too long": (lambda: tar(header("a/" * 600 + "b", b"x")), "too long"),
    "tar bomb": (lambda: gzip.compress(tar(header("bomb", bytes(9 << 20)))), "'bomb' is refused"),
    "tar of many": (
        lambda: tar(*(header(f"{i}", type=tarfile.DIRTYPE) for i in range(101))),
        "more than 100 members",
    ),
    "tar header says much": (
        lambda: tar(bad_number("size", b"77777777777")),
        "'good.txt' is refused: 8,589,934,591 bytes",
    ),
    "tar negative size": (
        lambda: tar(GOOD, bad_number("size", b"\xff" * 10 + b"\xfe\x00")),
        "cannot be read|is refused|broken",
    ),
    "tar long name says much": (
        lambda: tar(
            header("././@LongLink", type=tarfile.GNUTYPE_LONGNAME, size=1 << 40), end=bytes(512)
        ),
        "cannot be read",
    ),
    "tar nested headers": (nested_headers, "cannot be read"),
    "tar long headers": (long_headers, "cannot be read"),
    "tar cut in a file": (lambda: tar(GOOD, header("b", bytes(5000)))[:3000], "cannot be read"),
    "tar cut between files": (lambda: tar(GOOD, end=b""), "broken or cut off"),
    "tar damaged header": (lambda: damaged(tar(GOOD, GOOD, GOOD), 1030), "broken or cut off"),
    "tar of nothing": (lambda: tar(), "cannot be read|contains no files"),
    "tar of folders": (lambda: tar(header("a", type=tarfile.DIRTYPE)), "contains no files"),
    "gzip cut off": (lambda: good("tgz")[:-9], "cannot be read"),
    "gzip damaged": (lambda: damaged(good("tgz"), 1500), "cannot be read|broken|cut off"),
    "gzip wrong checksum": (lambda: damaged(good("tgz"), -6), "cannot be read.*CRC"),
    "gzip of no tar": (lambda: gzip.compress(b"hello" * 500), "cannot be read"),
    "gzip with a tail": (lambda: gzip.compress(tar(GOOD) + bytes(9 << 20)), "bytes after the last"),
    "zip ../": (lambda: zipped(("../evil", b"x")), "'../evil' .*leads out"),
    "zip absolute": (lambda: zipped(("/evil", b"x")), "'/evil' .*absolute"),
    "zip backslash": (lambda: zipped(("a\\..\\..\\evil", b"x")), "backslash"),
    "zip symlink": (lambda: zipped((special("a", 0o120777), b"/etc")), "'a' .*a link"),
    "zip fifo": (lambda: zipped((special("a", stat.S_IFIFO), b"")), "'a' .*not a regular file"),
    "zip encrypted": (encrypted, "'secret' .*encrypted"),
    "zip packed by lzma": (
        lambda: zipped(("a", b"x" * 99), compress_type=zipfile.ZIP_LZMA),
        "'a' .*not compressed with deflate",
    ),
    "zip bomb": (lambda: zipped(("bomb", bytes(9 << 20))), "'bomb' is refused: 9,437,184 bytes"),
    "zip that lies small": (lambda: wrong_size_zip(10), "cannot be read|cut off"),
    "zip that lies large": (lambda: wrong_size_zip(50000), "cannot be read|cut off"),
    "zip of one body": (cyclic_zip, "cannot be read"),
    "zip cut off": (lambda: good("zip")[:-30], "cannot be read"),
    "zip damaged": (lambda: damaged(good("zip"), 1500), "cannot be read"),
    "zip of nothing": (lambda: zipped(), "contains no files"),
    "zip 0 byte": (lambda: zipped(("a.txtb", b"x")).replace(b"a.txtb", b"a\0txtb"), "0 byte"),
    "a page": (lambda: b"<!DOCTYPE html><title>404</title>" * 40, "cannot be read"),
    "nothing at all": (lambda: b"", "cannot be read"),
    "raw deflate": (lambda: zlib.compress(tar(GOOD)), "cannot be read"),
}
SMALL = Limits(members=100, total=8 << 20, ratio=100, small=8 << 20)


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_is_left_of_a_hostile_or_broken_archive(case: str, tmp_path: Path) -> None:
    make, words = HOSTILE[case]
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    archive = folder / "archive"
    archive.write_bytes(make())
    with pytest.raises(BadArchiveError, match=words) as caught:
        unpack(archive, folder / "out", limits=SMALL)
    message = str(caught.value)
    assert message.startswith(str(archive)) and "\n" not in message and message.isprintable()
    assert len(message) < len(str(archive)) + 300
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [archive]
    assert os.listdir(folder) == ["archive"]


def test_bombs_are_recognized_by_their_ratio_and_small_archives_may_shrink(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zipped(("zeros", bytes(1 << 20))))
    with pytest.raises(BadArchiveError, match="'zeros' is refused"):
        unpack(tmp_path / "a.zip", tmp_path / "out", limits=Limits(small=1 << 18))
    unpack(tmp_path / "a.zip", tmp_path / "out", limits=Limits(small=1 << 18, ratio=2000))
    unpack(tmp_path / "a.zip", tmp_path / "again")
    assert (tmp_path / "again/zeros").stat().st_size == 1 << 20


@pytest.mark.parametrize("kind", ["tar", "tgz", "zip"])
def test_a_full_disk_is_not_the_archives_fault(kind: str, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(good(kind))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match="word: cannot be written: File too large") as caught:
            unpack(tmp_path / "archive", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not isinstance(caught.value, BadArchiveError)
    assert os.listdir(tmp_path) == ["archive"]


def test_a_folder_without_write_access_is_not_the_archives_fault(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(good("zip"))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="cannot be written") as caught:
        unpack(tmp_path / "a.zip", tmp_path / "file" / "out")
    assert not isinstance(caught.value, BadArchiveError)


def test_a_missing_archive(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none.tgz: cannot be read: No such file"):
        unpack(tmp_path / "none.tgz", tmp_path / "out")
    assert os.listdir(tmp_path) == []
