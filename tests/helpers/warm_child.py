"""What stands for Python where a program starts others of palm_ds: each becomes a program of
tests/helpers/warm_python.py, whose signals and exit code pass through here.

    warm_child.py SOCKET ARGUMENTS...       # those of Python
"""

import json
import os
import signal
import socket
import sys


def main(address: str, words: list[str]) -> int:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(address)
    channel, theirs = socket.socketpair()
    request = {"words": words, "env": dict(os.environ), "cwd": os.getcwd()}
    socket.send_fds(server, [json.dumps(request).encode()], [theirs.fileno(), 1, 2])
    theirs.close()
    pid = int(channel.recv(20))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    return int(channel.recv(20))


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
