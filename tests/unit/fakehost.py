"""An SSH server on stdin and stdout, as a ProxyCommand: `python fakehost.py HOSTKEY USERKEY`.

It runs commands through sh, as the user of the test, and speaks SFTP.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from typing import Any

import paramiko
from paramiko.common import AUTH_FAILED, AUTH_SUCCESSFUL, MSG_CHANNEL_REQUEST, OPEN_SUCCEEDED


class Stdio:
    """The part of a socket that paramiko uses."""

    _timeout: float | None = None

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def send(self, data: bytes) -> int:
        return os.write(1, data)

    def recv(self, size: int) -> bytes:
        if not select.select([0], [], [], self._timeout)[0]:
            raise TimeoutError
        return os.read(0, size)

    def close(self) -> None:
        os._exit(0)


class Host(paramiko.ServerInterface):
    def __init__(self, user_key: paramiko.PKey) -> None:
        self._user_key = user_key
        self._commands: dict[paramiko.Channel, str] = {}

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return OPEN_SUCCEEDED

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return AUTH_SUCCESSFUL if username == "scaletier" and key == self._user_key else AUTH_FAILED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self._commands[channel] = command.decode()
        return True

    def start(self, channel: paramiko.Channel) -> None:
        """Start the command of a channel, if one was requested, after the client got its answer."""
        if (command := self._commands.pop(channel, None)) is not None:
            threading.Thread(target=self._run, args=(channel, command), daemon=True).start()

    def _run(self, channel: paramiko.Channel, command: str) -> None:
        if command == "vanish":
            os._exit(1)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(["sh", "-c", command], **pipes) as process:
            threading.Thread(target=self._feed, args=(channel, process), daemon=True).start()
            while data := process.stdout.read1(65536):
                channel.sendall(data)
        channel.send_exit_status(process.returncode)
        channel.close()

    @staticmethod
    def _feed(channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
        try:
            while data := channel.recv(65536):
                process.stdin.write(data)
                process.stdin.flush()
            process.stdin.close()
        except OSError:
            pass


def main() -> None:
    transport: Any = paramiko.Transport(Stdio())  # type stubs have no _channel_handler_table
    # Several start at once on a busy machine: both sides of a connection get long time limits.
    transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = 120
    transport.add_server_key(paramiko.Ed25519Key.from_private_key_file(sys.argv[1]))
    host = Host(paramiko.Ed25519Key.from_private_key_file(sys.argv[2]))
    answer = transport._channel_handler_table[MSG_CHANNEL_REQUEST]

    def answer_and_start(channel: paramiko.Channel, message: paramiko.Message) -> None:
        answer(channel, message)
        host.start(channel)

    transport._channel_handler_table = {**transport._channel_handler_table, MSG_CHANNEL_REQUEST: answer_and_start}
    transport.start_server(server=host)
    transport.join()


if __name__ == "__main__":
    main()
