"""Python programs that start in a tenth of a second instead of six: each is forked from a process
that has imported torch, DeepSpeed and all of palm_ds.

    program = Program([SCRIPT, "--steps", "3"])     # also ["-m", MODULE, ...] and ["-c", CODE, ...]
    program.communicate(timeout=60)
    run([SCRIPT]).stdout                            # as subprocess.run
    run(["palm-ds", ..., "--launcher", python()])   # stands for Python in what a program starts

A program has a pid, an environment, a session and an exit code of its own, and ends as any other.
What it has not is a first import: tests of start-up, of memory and of launchers use subprocess. The
curves of its reports are empty: to draw them would take a second of each run.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import runpy
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("warm_child.py")
FOLDER = "PALM_TEST_PROGRAMS"
READ_AT_IMPORT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
"""What a program cannot choose, as it is read when torch and DeepSpeed are imported."""
REQUEST_BYTES = 150_000


# In the test --------------------------------------------------------------------------------------


@dataclass
class _Server:
    process: subprocess.Popen[bytes] | None = None
    control: socket.socket | None = None
    programs: list[Program] = field(default_factory=list)


_server = _Server()


class Program:
    """A running program; the part of subprocess.Popen that tests use. Its output goes to a file."""

    def __init__(
        self,
        words: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        output: IO[bytes] | None = None,
        apart: bool = False,
    ):
        """`output`: where stdout and stderr go, in one; a terminal is its input too, and sends it
        Ctrl-C. `apart`: stderr on its own."""
        self.args = [str(word) for word in words]
        self._out = output or tempfile.TemporaryFile()  # noqa: SIM115
        self._err = tempfile.TemporaryFile() if apart else self._out  # noqa: SIM115
        environment = {**os.environ, **READ_AT_IMPORT, **(env or {})}
        for name, value in READ_AT_IMPORT.items():
            assert environment[name] == value, f"{name}={environment[name]}: use subprocess"
        self._channel, theirs = socket.socketpair()
        request = {"words": self.args, "env": environment, "cwd": str(cwd or Path.cwd())}
        message = json.dumps(request).encode()
        assert len(message) < REQUEST_BYTES
        files = [theirs.fileno(), self._out.fileno(), self._err.fileno()]
        socket.send_fds(_start_server(), [message], files)
        theirs.close()
        self.returncode: int | None = None
        self.pid = int(self._channel.recv(20).decode().strip())
        _server.programs.append(self)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(1e-6)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                self.returncode = int(self._channel.recv(20).decode())
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """(all of its output, with `apart` only its stderr) after it has ended."""
        self.wait(timeout)
        return self.output(), _text(self._err) if self._err is not self._out else ""

    def output(self) -> str:
        return _text(self._out)

    def errors(self) -> str:
        """What is on its stderr, with `apart`."""
        return _text(self._err)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it can end in between
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def clear_away(self) -> None:
        """Kill whatever of its session still runs, and close what is open."""
        self.kill()
        _kill_group(self.pid)
        self.wait(30)
        for file in (self._out, self._err, self._channel):
            file.close()
        if self in _server.programs:
            _server.programs.remove(self)


def _kill_group(number: int) -> None:
    """Kill the processes of a group but for multiprocessing's tracker: it unlinks what the others
    leave in shared memory, and ends after them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(number, signal.SIGSTOP)  # so that none starts another meanwhile
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                if os.getpgid(process.pid) != number:
                    continue
                if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
        os.killpg(number, signal.SIGCONT)


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


def run(
    words: Sequence[object], *, timeout: float = 300, **options: Any
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run(..., capture_output=True, text=True)."""
    program = Program(words, apart=True, **options)
    try:
        out, err = program.communicate(timeout)
        return subprocess.CompletedProcess(program.args, program.wait(), out, err)
    finally:
        program.clear_away()


def python() -> str:
    """An executable that stands for Python in the commands that a program starts: they are forked
    as well (tests/helpers/warm_child.py), in sessions of their own."""
    _start_server()
    return str(_folder() / "python")


def start_together(
    world: int, words: Sequence[object], *, env: Mapping[str, str], **options: Any
) -> list[Program]:
    """The same program `world` times, with torchrun's environment if there are several."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    ranks = [{**place, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(world)]
    return [Program(words, env={**env, **(own if world > 1 else {})}, **options) for own in ranks]


def free_port() -> int:
    """Below the ports that the system gives to connections, one of which could take it before it is
    used; not from `random`, which may be seeded alike in two workers."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def clear_away(programs: Sequence[Program]) -> None:
    """Kill the processes of its session that still run, and close its files."""
    for program in programs:
        program.kill()
    for program in programs:
        program.clear_away()


def stop() -> None:
    """The process that programs are forked from ends with the last that has called this."""
    clear_away(list(_server.programs))
    if _server.control is not None:
        _server.control.close()
        _server.control = None
    if _server.process is not None:
        _server.process.returncode = 0  # not waited for, as others may still use it: no warning
        _server.process = None


def _start_server() -> socket.socket:
    """One process for all workers of pytest-xdist: it takes seconds to start."""
    if _server.control is None:
        with (_folder() / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _server.control = _connected() or _started()
    return _server.control


def _folder() -> Path:
    """Of the socket, of this test run (tests/conftest.py)."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="palm_")
    return Path(os.environ[FOLDER])


def _connected() -> socket.socket | None:
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        control.connect(str(_folder() / "socket"))
    except (FileNotFoundError, ConnectionRefusedError):
        control.close()
        return None
    return control


def _started() -> socket.socket:
    address = _folder() / "socket"
    address.unlink(missing_ok=True)
    words = [sys.executable, "-S", "-E", str(CHILD), str(address)]
    (_folder() / "python").write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    (_folder() / "python").chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen(64)
        _server.process = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            env={**os.environ, **READ_AT_IMPORT},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    control = _connected()
    assert control is not None
    return control


# In the process that programs are forked from -----------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A program to become."""

    words: list[str]
    env: dict[str, str]
    cwd: str


def serve(listener: socket.socket) -> tuple[Request, list[int]]:
    """Fork for each request; returns only in a program's own process. Ends when all who asked are
    gone."""
    asking: list[socket.socket] = []
    while True:
        for each in select.select([listener, *asking], [], [])[0]:
            if each is listener:
                asking.append(listener.accept()[0])
                continue
            message, files, _, _ = socket.recv_fds(each, REQUEST_BYTES, 3)
            if message and os.fork() == 0:
                for one in (listener, *asking):
                    one.close()
                return _keep(Request(**json.loads(message)), files)
            for file in files:
                os.close(file)
            if not message:
                asking.remove(each)
                each.close()
                if not asking:
                    _reap()
                    sys.exit()
        _reap()


def _reap() -> None:
    """Reap processes that have ended: their times are counted only then."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _keep(request: Request, files: list[int]) -> tuple[Request, list[int]]:
    """Fork again: the child is the program, this process reports its pid and exit code."""
    pid = os.fork()
    if pid == 0:
        return request, files
    channel, *outputs = files
    for file in outputs:
        os.close(file)
    os.write(channel, f"{pid:<20}".encode())
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        os.write(channel, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(request: Request, files: list[int]) -> None:
    """Adopt a program's session, output, environment, folder, arguments and path."""
    channel, out, err = files
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(out, 1)
    os.dup2(err, 2)
    if os.isatty(out):
        fcntl.ioctl(out, termios.TIOCSCTTY, 0)
        os.dup2(out, 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for file in files:
        os.close(file)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    sys.path[:0] = list(filter(None, request.env.get("PYTHONPATH", "").split(os.pathsep)))


def go(words: list[str]) -> None:
    """What `python ARGUMENTS` does."""
    first, *rest = words
    if first == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv, sys.path[:0] = rest, [os.getcwd()]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = words, [str(Path(first).resolve().parent)]
        runpy.run_path(first, run_name="__main__")


def import_all() -> None:
    """All of palm_ds, and the modules that it and DeepSpeed import later."""
    gc.disable()  # what is imported stays

    import palm_ds
    from palm_ds.runtime.deepspeed.deepspeed_import import import_deepspeed

    import_deepspeed()
    names = [module.name for module in pkgutil.walk_packages(palm_ds.__path__, "palm_ds.")]
    names.remove("palm_ds.__main__")
    names += ["deepspeed.runtime.engine", "deepspeed.runtime.zero.muon.muon_optimizer"]
    names += ["deepspeed.runtime.bf16_optimizer", "deepspeed.runtime.zero.stage3"]
    names += ["torch.utils.tensorboard", "torch._dynamo", "torch._inductor.compile_fx"]
    names += ["pandas", "matplotlib.figure", "matplotlib.backends.backend_svg", "safetensors.torch"]
    names += ["deepspeed.moe.fused_expert_layout", "deepspeed.utils.pin_memory", "numpy.ctypeslib"]
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()  # the program that needs it will say so itself
    os.fsync = lambda _: None  # as in tests/conftest.py
    charts: Any = importlib.import_module("palm_ds.train.report.charts")
    charts._svg = lambda *_: "<svg></svg>"
    read_settings()
    gc.collect()
    gc.freeze()  # so that collecting garbage in a program copies no memory
    gc.enable()


def read_settings() -> None:
    """pydantic's validators of a recipe, which take a quarter of a second to build."""
    from palm_ds.runtime.deepspeed.ds_config import make_ds_config
    from palm_ds.train.recipe.recipe import make_recipe

    values = {
        "backbone": {"preset": "tiny"},
        "length": 64,
        "batch": "8 rows",
        "sources": {"text": {"corpus": "."}},
    }
    tasks = {"tasks": {"knowledge_masking": {"source": "text"}}}
    make_ds_config({})
    make_recipe({**values, **tasks, "stages": [{"knowledge_masking": 1}]}, "recipe")


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    import_all()
    sys.path[:] = [entry for entry in sys.path if entry not in own]
    request, files = serve(socket.socket(fileno=int(sys.argv[1])))
    become(request, files)
    try:
        go(request.words)
        code = 0
    except SystemExit as error:
        code = _code(error)
    except KeyboardInterrupt as error:
        if not _began(error):
            os._exit(130)
        raise
    end(code)


def _code(error: SystemExit) -> int:
    """What Python makes of it."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def end(code: int) -> None:
    """What Python does at the end of a program, except that it does not take apart all that this
    one was forked from: that would copy it, in half a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    if "mpi4py.MPI" in sys.modules:  # as the interpreter does, past atexit
        sys.modules["mpi4py.MPI"].Finalize()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # closed
            stream.flush()
    os._exit(code)


def _began(error: KeyboardInterrupt) -> bool:
    """Whether a line of the program itself was running: one that is only being started (by this
    file and runpy) cannot answer a signal."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(name != __file__ and "runpy" not in name for name in frames)


if __name__ == "__main__":
    _main()
