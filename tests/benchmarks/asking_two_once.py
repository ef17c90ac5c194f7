"""Query two model servers from a host, and print the result as JSON; standard library only.

`python - PATH CLIENTS SECONDS ADDRESS ADDRESS`, the program on stdin. Half of the clients begin with either server. A request
that fails is repeated once at the other, which the client then stays with.
"""

import http.client
import json
import sys
import threading
import time

PATH, CLIENTS, SECONDS, ADDRESSES = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:6]
BODY = json.dumps({"instances": [{"key": 1, "image": [place % 7 / 7 for place in range(784)]}]})
asked: list[int] = []
failed: list[str] = []
failed_twice: list[str] = []


class Client:
    """Speaks to one of the servers over a connection that it keeps."""

    def __init__(self, first: int) -> None:
        self._which = first
        self._connection = self._connected()

    def _connected(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(ADDRESSES[self._which], 8501, timeout=60)

    def change(self) -> None:
        """Switch to the other server."""
        self._connection.close()
        self._which = 1 - self._which
        self._connection = self._connected()

    def ask(self) -> str:
        """Send a request and return its error; empty for an answer."""
        try:
            self._connection.request("POST", PATH, BODY)
            answer = self._connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"
        return "" if answer.status == 200 else f"{answer.status}: {content.decode()}"


def load(first: int, until: float) -> None:
    client = Client(first)
    while time.monotonic() < until:
        asked.append(1)
        if why := client.ask():
            failed.append(why)
            client.change()
            if why := client.ask():
                failed_twice.append(why)


until = time.monotonic() + SECONDS
threads = [threading.Thread(target=load, args=(number % 2, until)) for number in range(CLIENTS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps({"asked": len(asked), "once": len(failed), "failed": len(failed_twice), "why": failed_twice[:1]}))
