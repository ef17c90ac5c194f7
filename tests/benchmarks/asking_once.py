"""Query model servers from a host, and print the result as JSON; standard library only.

`python - PATH CLIENTS SECONDS ADDRESS …`, the program on stdin. If there are two addresses, half of the clients begin with
either server, and a client repeats a failed request once at the other server, which it keeps.
"""

import http.client
import json
import sys
import threading
import time

PATH, CLIENTS, SECONDS, ADDRESSES = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
BODY = json.dumps({"instances": [{"key": 1, "image": [place % 7 / 7 for place in range(784)]}]})
took: list[float] = []
failed: list[str] = []
failed_twice: list[str] = []


def ask(connection: http.client.HTTPConnection) -> str:
    """Send a request and return its error; empty for an answer."""
    began = time.perf_counter()
    try:
        connection.request("POST", PATH, BODY)
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    took.append(time.perf_counter() - began)
    return "" if answer.status == 200 else f"{answer.status}: {content.decode()}"


def load(server: int, until: float) -> None:
    connections = [http.client.HTTPConnection(address, 8501, timeout=60) for address in ADDRESSES]
    while time.monotonic() < until:
        if why := ask(connections[server]):
            failed.append(why)
            connections[server].close()
            server = (server + 1) % len(connections)
            if len(connections) > 1 and (why := ask(connections[server])):
                failed_twice.append(why)
                connections[server].close()


load(0, time.monotonic() + 0.5)
for values in (took, failed, failed_twice):
    values.clear()
began = time.monotonic()
threads = [threading.Thread(target=load, args=(number % len(ADDRESSES), began + SECONDS)) for number in range(CLIENTS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
seconds = time.monotonic() - began
took.sort()
print(
    json.dumps(
        {
            "rate": len(took) / seconds,
            "p50": took[len(took) // 2],
            "p99": took[len(took) * 99 // 100],
            "asked": len(took) + len(failed),
            "failed": len(failed),
            "failedTwice": len(failed_twice),
            "why": [*failed_twice, *failed][:1],
        }
    )
)
