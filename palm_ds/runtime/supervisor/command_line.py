"""Command that each host starts: the user's, with this start's hosts and port.

`deepspeed --hostfile HOSTS SCRIPT ...` becomes `deepspeed --no_ssh --node_rank N ... SCRIPT ...` on
each host that answers: its own way over pdsh waits for ever for a host that is gone, and leaves
processes training when it is killed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from palm_ds.common.errors import UserError, suggest_path
from palm_ds.common.files import home_folder

FOLDER = "@FOLDER@"
"""In a command: the agent's own folder, where the file of hosts is."""
_DEEPSPEED = {"deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner"}
_TORCH = {"torchrun", "torch.distributed.run"}
_FLAGS = {
    *("--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi"),
    *("--save_pid", "--module", "--bind_cores_to_rank", "-q", "--quiet", "-h", "--help"),
}
"""Options of `deepspeed` without a value."""
_VALUED = {
    *("--hostfile", "--include", "--exclude", "--num_nodes", "--num_gpus", "--num_accelerators"),
    *("--master_port", "--master_addr", "--node_rank", "--launcher", "--launcher_args"),
    *("--enable_each_rank_log", "--autotuning", "--bind_core_list", "--ssh_port", "--venv_script"),
    "--log_level",
}
"""Those with one."""
_SHORT = {"-H": "--hostfile", "-i": "--include", "-e": "--exclude"}
_CHECKS = {"--check", "--plan"}
_REPLACED = {"--hostfile", "--master_addr", "--master_port", "--launcher"}
_DEFAULT_HOSTFILE = "/job/hostfile"
_PASSED_ON = ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW", "OMP_", "GLOO_", "DS_", "TORCH_", "PALM_")
"""Names of environment variables that go to other hosts begin like this."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The part of a host in one start."""

    number: int
    address: str
    """Of the first host."""
    port: int


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """The user's command, understood as far as a restart needs."""

    words: Sequence[str]
    launcher: int = -1
    """Which word is `deepspeed` or `torchrun`; -1: neither."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Those of `deepspeed`."""
    script: int = 0
    """The first word that is not the launcher's."""
    slots: Mapping[str, str] = field(default_factory=dict)
    """{host: the rest of its line}; empty: this machine only."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for other hosts."""

    @property
    def only_checks(self) -> bool:
        """Whether it trains nothing: every host must take part then."""
        return any(word.partition("=")[0] in _CHECKS for word in self.words[self.script :])

    def on(self, place: Place) -> list[str]:
        """The command line of one host."""
        if self.slots:
            return self._node(place)
        words = list(self.words)
        if self.launcher >= 0 and self._needs_port():
            words[self.launcher + 1 : self.launcher + 1] = ["--master_port", str(place.port)]
        return words

    def hosts_file(self, hosts: Sequence[str]) -> str:
        return "".join(f"{host} {self.slots[host]}\n" for host in hosts)

    def _node(self, place: Place) -> list[str]:
        kept = list(self.words[: self.launcher + 1])
        for name, value in self.options.items():
            if name not in _REPLACED:
                kept += [name] if name in _FLAGS else [name, value]
        address = self.options.get("--master_addr", place.address)
        port = self.options.get("--master_port", str(place.port))
        kept += ["--no_ssh", "--hostfile", f"{FOLDER}/hosts", "--node_rank", str(place.number)]
        return [*kept, "--master_addr", address, "--master_port", port, *self.words[self.script :]]

    def _needs_port(self) -> bool:
        if Path(self.words[self.launcher]).name in _DEEPSPEED:
            return "--master_port" not in self.options and "--no_ssh" not in self.options
        names = {word.split("=")[0].replace("-", "_") for word in self.words[self.launcher :]}
        return not names & {"__standalone", "__master_port", "__rdzv_endpoint", "__nnodes"}


def understand(words: Sequence[str]) -> RunCommand:
    """Raises UserError for a command that cannot be supervised."""
    if not words:
        raise UserError(
            "palm-ds run: no command; write it after `--`: palm-ds run -- deepspeed ..."
        )
    program = shutil.which(words[0])
    if program is None:
        raise UserError(f"palm-ds run: there is no program {words[0]!r}")
    words = [os.path.abspath(program), *words[1:]]  # other hosts may have another PATH
    for number, word in enumerate(words[:4]):
        name = Path(word).name
        if name in _TORCH:
            return RunCommand(words=words, launcher=number)
        if name in _DEEPSPEED:
            return _understand_deepspeed(words, number)
    return RunCommand(words=words)


def _understand_deepspeed(words: Sequence[str], launcher: int) -> RunCommand:
    options, at = _options(words, launcher + 1)
    command = RunCommand(words=words, launcher=launcher, options=options, script=at)
    if "--no_ssh" in options or options.get("--launcher", "pdsh") != "pdsh":
        return command
    given = options.get("--hostfile")
    hostfile = Path(given or _DEFAULT_HOSTFILE)
    if not hostfile.is_file():
        if given:
            raise UserError(f"--hostfile {given}: no such file{suggest_path(given)}")
        return command
    for name in ("--include", "--exclude", "--num_nodes"):
        if name in options:
            raise UserError(f"palm-ds run: {name}: name the hosts in {hostfile} only")
    return replace(command, slots=_read_hosts(hostfile), variables=variables_for_other_hosts())


def _options(words: Sequence[str], at: int) -> tuple[dict[str, str], int]:
    """Options of `deepspeed` from word `at` on, by their long names, and where the script is."""
    options: dict[str, str] = {}
    while at < len(words) and words[at].startswith("-"):
        name, value = _option(words[at])
        if value is None and name not in _FLAGS:
            at += 1
            value = words[at] if at < len(words) else ""
        options[name] = value or ""
        at += 1
    return options, at


def _option(word: str) -> tuple[str, str | None]:
    """The name and the value in a word, in all forms that argparse takes: `--hostfile=FILE`,
    `--host=FILE`, `-HFILE`. None: the value is the next word, if there is one."""
    if word[:2] in _SHORT:
        return _SHORT[word[:2]], word[2:].removeprefix("=") or None
    name, equals, value = word.partition("=")
    meant = [known for known in (*_FLAGS, *_VALUED) if known.startswith(name)]
    return meant[0] if len(meant) == 1 else name, value if equals else None


def _read_hosts(file: Path) -> dict[str, str]:
    slots: dict[str, str] = {}
    for number, line in enumerate(_lines(file), 1):
        host, *rest = line.partition("#")[0].split() or [""]
        if not host:
            continue
        refused = host in slots or host.startswith("-")  # ssh would read an option
        if refused or not re.match(r"slots=[1-9]\d*( |$)", " ".join(rest), re.ASCII):
            raise UserError(
                f"{file}:{number}: expected `HOST slots=N`, each host once, got {line!r}"
            )
        slots[host] = " ".join(rest)
    if not slots:
        raise UserError(f"{file}: names no host")
    return slots


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: cannot be read as text: {error}") from None


def variables_for_other_hosts() -> dict[str, str]:
    """Variables that `deepspeed` passes on too: some of the environment, and the file
    .deepspeed_env. Raises UserError."""
    variables = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
    given = os.environ.get("DS_ENV_FILE")
    name = given or ".deepspeed_env"
    files = [file for file in (home_folder() / name, Path(name)) if file.is_file()]
    if given and not files:
        raise UserError(f"DS_ENV_FILE={given}: no such file{suggest_path(given)}")
    for file in files:
        variables |= _read_variables(file)
    return variables


def _read_variables(file: Path) -> dict[str, str]:
    variables: dict[str, str] = {}
    for number, line in enumerate(_lines(file), 1):
        key, equals, value = line.strip().partition("=")
        if not key + equals or key.startswith("#"):
            continue
        if not equals or "\0" in value or not re.fullmatch(r"[A-Za-z_]\w*", key, re.ASCII):
            raise UserError(f"{file}:{number}: expected `NAME=VALUE`, got {line!r}")
        variables[key] = value
    return variables
