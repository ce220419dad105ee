"""Several hosts on one machine: network namespaces with their own sshd, names and processes.

    with hosts(3, folder) as cluster: cluster.run(["hostname"], on=0)

Host 0 is where commands are entered; all see the same files. Needs root, ip, unshare and sshd;
everything is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

NETWORK = "10.231.7"
SSHD = "/usr/sbin/sshd"


@dataclass
class Cluster:
    """Hosts w0, w1, ... in the namespaces PREFIX-0, PREFIX-1, ..."""

    prefix: str
    folder: Path
    sshd: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.folder}/ssh_config"

    def inside(self, number: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in the network of a host."""
        return ["ip", "netns", "exec", f"{self.prefix}-{number}", *command]

    def link(self, number: int, state: str) -> None:
        """Cut the link of a host (down), or mend it (up)."""
        _do("ip", "-n", f"{self.prefix}-sw", "link", "set", f"p{number}", state)

    def kill(self, number: int) -> None:
        """End the host with everything that runs on it."""
        self.sshd[number].kill()
        self.sshd[number].wait()

    def start(self, number: int) -> None:
        script = f"hostname w{number}; exec {SSHD} -D -e -f {self.folder}/sshd_config"
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self.folder / f"sshd-{number}.log").open("ab") as log:
            self.sshd[number] = subprocess.Popen(
                self.inside(number, [*apart, "sh", "-c", script]), stdout=log, stderr=log
            )

    def wait(self, number: int) -> None:
        """Until the host answers."""
        command = self.inside(0, [*self.ssh.split(), f"w{number}", "true"])
        for _ in range(100):
            if subprocess.run(command, capture_output=True).returncode == 0:
                return
            time.sleep(0.1)
        raise AssertionError((self.folder / f"sshd-{number}.log").read_text())


@contextlib.contextmanager
def hosts(number: int, folder: Path) -> Iterator[Cluster]:
    """Skips the test where this cannot be done."""
    _skip_without_means()
    cluster = Cluster(f"pds{os.getpid()}", folder)
    try:
        _write_ssh(folder, number)
        _make_networks(cluster, number)
        for one in range(1, number):
            cluster.start(one)
        for one in range(1, number):
            cluster.wait(one)
        yield cluster
    finally:
        for process in cluster.sshd.values():
            process.kill()
            process.wait()
        for name in (*range(number), "sw"):
            subprocess.run(["ip", "netns", "del", f"{cluster.prefix}-{name}"], capture_output=True)
            shutil.rmtree(f"/etc/netns/{cluster.prefix}-{name}", ignore_errors=True)


def _skip_without_means() -> None:
    if os.getuid() != 0:
        pytest.skip("needs root for network namespaces")
    for program in ("ip", "unshare", "ssh", "ssh-keygen", SSHD):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    tried = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "true"])
    if tried.returncode:
        pytest.skip("may not make network namespaces here")


def _make_networks(cluster: Cluster, number: int) -> None:
    switch = f"{cluster.prefix}-sw"
    _do("ip", "netns", "add", switch)
    _do("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
    _do("ip", "-n", switch, "link", "set", "br0", "up")
    names = "".join(f"{NETWORK}.{10 + one} w{one}\n" for one in range(number))
    for one in range(number):
        name = f"{cluster.prefix}-{one}"
        _do("ip", "netns", "add", name)
        peer = ["peer", "name", f"p{one}", "netns", switch]
        _do("ip", "-n", name, "link", "add", "eth0", "type", "veth", *peer)
        _do("ip", "-n", switch, "link", "set", f"p{one}", "master", "br0", "up")
        _do("ip", "-n", name, "addr", "add", f"{NETWORK}.{10 + one}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _do("ip", "-n", name, "link", "set", device, "up")
        own = Path(f"/etc/netns/{name}")
        own.mkdir(parents=True)
        (own / "hosts").write_text(f"127.0.0.1 localhost\n{names}")


def _write_ssh(folder: Path, number: int) -> None:
    for key in ("host", "user"):
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPermitRootLogin yes\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n IdentityFile {folder}/user\n UserKnownHostsFile /dev/null\n BatchMode yes\n"
        " StrictHostKeyChecking no\n LogLevel ERROR\n ConnectTimeout 3\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
