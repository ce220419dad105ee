"""What every test may rely on: one thread per process, no downloads, no leftovers.

`shared` is a folder of real data that does not come with the project: PALM_SHARED, or `shared`
next to the clone. Tests that need it are skipped without it.
"""

from __future__ import annotations

import compileall
import errno
import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
import uuid
import zlib
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import psutil
import pytest
from _pytest.assertion import rewrite
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from palm_ds.corpus.store import Corpus

pytest.register_assert_rewrite("tests.helpers")  # their assertions hold under python -O, too

ROOT = Path(__file__).resolve().parent.parent
SHARED_MEMORY = Path("/dev/shm")
MARK = "PALM_TEST_SESSION"  # inherited by every process that a test starts
PROGRAMS = "PALM_TEST_PROGRAMS"  # the folder of what tests/helpers/warm_python.py shares

for name, value in {
    "OMP_NUM_THREADS": "1",  # before torch is imported, here and in every process started here
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "ORT_DISABLE_TELEMETRY": "1",
    # Triton kernels compute on the CPU where there is no GPU.
    **({} if Path("/dev/nvidiactl").exists() else {"TRITON_INTERPRET": "1"}),
}.items():
    os.environ.setdefault(name, value)
# The commands that tests start find this palm_ds, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# Compiled files are kept, or every process would compile all again, and pytest rewrite 7,000
# assertions in each of its workers: 13 s of CPU time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Until all tests are collected: what modules and tests are made of stays, and there are millions.
gc.disable()
# What tests write need not outlive a power failure; to wait for the disk takes minutes in all.
os.fsync = lambda _: None
# The same cases every time, so that a suite that passed passes; `PALM_FUZZ=1` draws new ones.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.load_profile("default" if os.environ.get("PALM_FUZZ") else "same")
if not os.environ.get("PALM_FUZZ"):
    # It would try the constants of every module that is imported at the time: other cases where
    # other tests ran before, and half a minute of CPU time to find them in 550 modules.
    providers._get_local_constants = lambda: providers._local_constants


@pytest.fixture(scope="session")
def root() -> Path:
    """The top folder of the project."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data next to the project; skips the test if there is none."""
    folder = Path(os.environ.get("PALM_SHARED") or ROOT.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"no real data here: {folder} is no folder (PALM_SHARED names another)")
    return folder


@pytest.fixture(scope="session", autouse=True)
def no_warm_python_left() -> Iterator[None]:
    """Processes started by tests/helpers/warm_python.py end with the tests that started them."""
    yield
    if warm_python := sys.modules.get("tests.helpers.warm_python"):
        warm_python.stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="every combination of layouts, models and programs",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--exhaustive"):
        further = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=further)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    items[:] = _spread(items)
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a GPU; torch sees none"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test starts with the same random numbers. Modules are frozen for the garbage
    collector: otherwise every collection, and tests request many, would traverse all of torch
    and transformers: 0.4 s each time."""
    if torch := sys.modules.get("torch"):
        # Without a GPU torch.manual_seed() would note for one who called it: a millisecond a test.
        seeded = torch if torch.cuda.is_available() else torch.default_generator
        seeded.manual_seed(zlib.crc32(item.nodeid.partition("::")[0].encode()))
    if len(sys.modules) > item.config.stash.get(_MODULES, 0) + 50:
        item.config.stash[_MODULES] = len(sys.modules)
        gc.collect()
        gc.freeze()


_MODULES = pytest.StashKey[int]()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


_END = 0.9  # of the run: no worker is left with a long test at the end


def _spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Long tests, which also wait, evenly among those that only compute; tests of a module that
    are alike stay together, as they share fixtures."""
    placed: list[tuple[float, list[pytest.Item]]] = []
    for long in (True, False):
        ours = [item for item in items if _is_long(item) == long]
        done = 0
        for _, together in groupby(ours, key=lambda item: item.path):
            module = list(together)
            placed.append(((_END if long else 1.0) * done / len(ours), module))
            done += len(module)
    return [item for _, module in sorted(placed, key=itemgetter(0)) for item in module]


def _is_long(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("slow", "distributed"))


# No leftovers ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def signal_handlers_stay() -> Iterator[None]:
    """What one test ignores, the programs that later tests start would ignore too."""
    before = {number: signal.getsignal(number) for number in _HANDLED}
    yield
    changed = [number for number in _HANDLED if signal.getsignal(number) != before[number]]
    for number in changed:
        signal.signal(number, before[number])
    assert not changed, f"the test changed what these do: {changed}"


_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD)


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background jobs ignore Ctrl-C, and so would all that the tests start and interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # in the workers of pytest-xdist
        _compile_share(config)
    else:
        os.environ[MARK] = uuid.uuid4().hex
        os.environ[PROGRAMS] = tempfile.mkdtemp(prefix="palm_")
        config.stash[_BEFORE] = None if _others_test() else _in_shared_memory()


def _compile_share(config: Any) -> None:
    """Compile a share of what all workers are about to import: in a new clone each would compile
    all of it, at the same time and so in vain."""
    number, workers = int(config.workerinput["workerid"][2:]), config.workerinput["workercount"]
    files = sorted(file for part in ("palm_ds", "tests") for file in (ROOT / part).rglob("*.py"))
    for file in files[number::workers]:
        if not file.name.startswith("test_"):
            compileall.compile_file(file, quiet=2)
            continue
        compiled = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if not compiled.exists() or compiled.stat().st_mtime < file.stat().st_mtime:
            rewrite.try_makedirs(compiled.parent)
            status, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, status, compiled)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    psutil.wait_procs(_started_here(), timeout=10)  # those that are just ending
    shutil.rmtree(os.environ[PROGRAMS], ignore_errors=True)
    left = [f"process {each.pid}: {line[:200]}" for each, line in _started_here().items()]
    before = session.config.stash[_BEFORE]
    if before is not None and not _others_test():
        new = sorted(_in_shared_memory() - before)
        left += [f"shared memory: {path}" for path in new if not _in_use(path)]
    session.config.stash[_LEFT] = left
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    left = config.stash.get(_LEFT, [])
    if left:
        terminalreporter.section("leftovers of the tests", red=True)
        for line in left:
            terminalreporter.line(line)


_BEFORE = pytest.StashKey[set[Path] | None]()
"""None: not known, as files do not tell which of two test runs made them."""
_LEFT = pytest.StashKey[list[str]]()


def _in_shared_memory() -> set[Path]:
    try:
        return {path for path in SHARED_MEMORY.iterdir() if path.owner() == _me()}
    except (OSError, KeyError):  # no such folder here, or a file that went meanwhile
        return set()


def _me() -> str:
    return psutil.Process().username()


def _started_here() -> dict[psutil.Process, str]:
    """Processes that inherited this session's mark and still run, orphans included, and their
    command lines."""
    found = {}
    for process in psutil.process_iter():
        try:
            mine = process.environ().get(MARK) == os.environ[MARK]
            alive = process.status() != psutil.STATUS_ZOMBIE
            line = " ".join(process.cmdline())
        except (psutil.Error, OSError):
            continue
        tracker = "resource_tracker" in line  # ends with its parent
        if mine and alive and not tracker and process.pid != os.getpid():
            found[process] = line
    return found


def _others_test() -> bool:
    """Whether another test run is active."""
    here = psutil.Process()
    mine = {each.pid for each in (here, *here.parents(), *here.children(recursive=True))}
    return any(
        "pytest" in map(os.path.basename, (process.info["cmdline"] or [])[:4])
        for process in psutil.process_iter(["cmdline"])
        if process.pid not in mine
    )


def _in_use(path: Path) -> bool:
    """Whether a live process, perhaps of another test run on this machine, has the file open."""
    for process in psutil.process_iter():
        try:
            if any(m.path == str(path) for m in process.memory_maps()):
                return True
        except (psutil.Error, OSError):
            continue
    return False


# Corpora of real text --------------------------------------------------------------------------


def _prepared(
    factory: pytest.TempPathFactory, name: str, inputs: list[Path], *options: str
) -> Corpus:
    """Prepared by the first pytest-xdist worker that needs it; complete for the others."""
    from palm_ds.cli.prepare import COMMAND
    from palm_ds.corpus.store import open_corpus

    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared_{name}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        COMMAND.call([str(folder), *map(str, inputs), *options])
    return open_corpus(folder)


@pytest.fixture(scope="session")
def shared_en(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Real English: encyclopedia articles and textbooks, about seven megabytes."""
    texts = [
        shared / "data/corpus/en" / f"{name}.jsonl" for name in ("wikitext2_valid", "openstax")
    ]
    vocabulary = shared / "data/ernie/vocab_en.txt"
    options = ("--language", "en", "--lower", "--tokenizer", str(vocabulary))
    return _prepared(tmp_path_factory, "en", texts, *options)


@pytest.fixture(scope="session")
def shared_zh(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Real Chinese: encyclopedia passages, about three megabytes."""
    texts = [shared / "data/corpus/zh" / "wiki_mrc_contexts.jsonl"]
    vocabulary = shared / "data/ernie/vocab.txt"
    options = ("--language", "zh", "--lower", "--simplify", "--tokenizer", str(vocabulary))
    return _prepared(tmp_path_factory, "zh", texts, *options)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, such as Lustre mounted without `flock`."""

    def flock(descriptor: Any, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
