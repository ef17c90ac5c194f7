"""Query the model server of this host, and print the result as JSON; standard library only.

`python - PATH CLIENTS SECONDS`, the program on stdin; TensorFlow Serving's address is the host's own.
"""

import http.client
import json
import sys
import threading
import time

PATH, CLIENTS, SECONDS = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
BODY = json.dumps({"instances": [{"key": 1, "image": [place % 7 / 7 for place in range(784)]}]})
took: list[float] = []
failed: list[str] = []


def ask(until: float) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", 8501, timeout=60)
    while time.monotonic() < until:
        began = time.perf_counter()
        connection.request("POST", PATH, BODY)
        answer = connection.getresponse()
        content = answer.read()
        took.append(time.perf_counter() - began)
        if answer.status != 200:
            failed.append(content.decode())


ask(time.monotonic() + 0.5)
took.clear()
began = time.monotonic()
threads = [threading.Thread(target=ask, args=(began + SECONDS,)) for _ in range(CLIENTS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
seconds = time.monotonic() - began
took.sort()
p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
print(
    json.dumps(
        {"rate": len(took) / seconds, "p50": p50, "p99": p99, "asked": len(took), "failed": len(failed), "why": failed[:1]}
    )
)
