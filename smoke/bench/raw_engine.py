"""A bare engine core that makes nothing: what the wire and pyzmq allow.

Run as ``python -m bench.raw_engine ADDRESS [--gather SECONDS | --echo]``. It answers what has come
(with ``--gather``, what comes until there is nothing new for so long) with the same message over and
over, all at one go, until the requests have their tokens. With ``--echo`` it answers every message
with the same one, unread.
"""

import argparse
import time

import ormsgpack
import zmq

from ready import READY

ADD = b"\0"
MAX_SOCKETS = 4096

TOKEN = 31_999
LENGTH = 1
"""The finish reason."""


def main() -> None:
    """Join the frontend and serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--gather", type=float, default=0.0)
    parser.add_argument("--echo", action="store_true")
    arguments = parser.parse_args()
    requests, outputs = join(arguments.address)
    if arguments.echo:
        echo(requests, outputs)
    while True:
        answer(outputs, gather(requests, arguments.gather))


def join(address: str, index: int = 0) -> tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]:
    """Shake hands; gives the sockets for requests and outputs."""
    context = zmq.Context[zmq.Socket[bytes]].instance()
    context.max_sockets = MAX_SOCKETS

    def connect(kind: int, where: str) -> "zmq.Socket[bytes]":
        socket = context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.IDENTITY, index.to_bytes(2, "little"))
        socket.connect(where)
        return socket

    def report(status: str) -> None:
        handshake.send(ormsgpack.packb({"status": status, "local": False, "headless": True}))

    handshake = connect(zmq.DEALER, address)
    report("HELLO")
    addresses = ormsgpack.unpackb(handshake.recv())["addresses"]
    requests = connect(zmq.DEALER, addresses["inputs"][0])
    outputs = connect(zmq.PUSH, addresses["outputs"][0])
    requests.send(ormsgpack.packb(READY))
    report("READY")
    handshake.close()
    return requests, outputs


def echo(requests: "zmq.Socket[bytes]", outputs: "zmq.Socket[bytes]") -> None:
    """Answer whatever comes, for ever."""
    output = one_output()
    while True:
        requests.recv_multipart()
        outputs.send(output)


def one_output() -> bytes:
    """A message of the size that a last token has."""
    row = ["bench-00000000-a1b2c3d4", [TOKEN], None, None, None, LENGTH, *[None] * 13]
    return ormsgpack.packb([0, [row], None, time.monotonic(), None, [row[0]], None, None, None])


def gather(requests: "zmq.Socket[bytes]", patience: float) -> dict[str, int]:
    """Wait for requests; gives their ids and how many tokens each wants."""
    wanted: dict[str, int] = {}
    while requests.poll(int(patience * 1000) if wanted else None):
        kind, payload, *_ = requests.recv_multipart()
        if kind == ADD:
            request = ormsgpack.unpackb(payload)
            wanted[request[0]] = request[3]["max_tokens"]
    return wanted


def answer(outputs: "zmq.Socket[bytes]", wanted: dict[str, int]) -> None:
    """Give all requests as many tokens as the greediest wants."""
    rows = [[request_id, [TOKEN]] for request_id in wanted]
    step = ormsgpack.packb([0, rows, None, time.monotonic()])
    for _ in range(max(wanted.values()) - 1):
        outputs.send(step)
    last = [[*row, None, None, None, LENGTH] for row in rows]
    outputs.send(ormsgpack.packb([0, last, None, time.monotonic(), None, list(wanted)]))


if __name__ == "__main__":
    main()
