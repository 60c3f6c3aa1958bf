"""Stands for ``nvidia-cuda-mps-control``: a daemon with a server process, and the client that sends it commands.

``MPS_TOOL`` says how it misbehaves: ``crash`` (at the start), ``mute`` (does not answer), ``serverless`` (no process is
its client), ``stubborn`` (minds neither quit nor SIGTERM).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HOW = os.environ.get("MPS_TOOL")
PIPE = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "control")


def daemon() -> None:
    print(f"Starting control daemon using socket {PIPE}", flush=True)
    if HOW == "crash":
        sys.exit("no CUDA-capable device is detected")
    if HOW == "mute":
        time.sleep(60)
    if HOW == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server inherits it
    server = subprocess.Popen(["sleep", "60"])
    Path(os.environ["CUDA_MPS_LOG_DIRECTORY"], "control.log").write_text("started\n")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(PIPE))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                words = connection.recv(1000).decode().split()
                if words == ["get_server_list"]:
                    connection.sendall(b"" if HOW == "serverless" else b"%d\n" % server.pid)
                if words[0] == "quit" and HOW != "stubborn":
                    server.kill()
                    server.wait()
                    PIPE.unlink()
                    return


def client() -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(PIPE))
        except OSError:
            sys.exit("Cannot find MPS control daemon process")
        connection.sendall(sys.stdin.read().encode())
        sys.stdout.write(connection.makefile().read())


if __name__ == "__main__":
    daemon() if sys.argv[1:] == ["-f"] else client()
