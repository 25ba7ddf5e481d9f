"""Clients that hold connections and say nothing keep nobody out; and the server ends when it is told to."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from serving import ask, started

MEGABYTE = 2**20
RECORD = b"POST /record HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{"
HOSTILE = {
    "says nothing": b"",
    "has half of its headers": b"GET / HTTP/1.1\r\nHost: local",
    "has half of its body": RECORD,
    "reads nothing": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8,
    "stays after an answer": b"GET /kernels HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.fixture(scope="module")
def port():
    process, port = started(5, padding=4 * MEGABYTE)
    ask(port, "POST", "/record", {"kernel": "naive", "matrix": [[1]]})
    yield port
    process.terminate()
    assert "Traceback" not in process.communicate(timeout=30)[1]


@pytest.fixture
def clients(port):
    """Connects so many clients that send the same."""
    with contextlib.ExitStack() as open_ones:

        def connect(count, sent):
            sockets = []
            for _ in range(count):
                client = open_ones.enter_context(socket.socket())
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", port))
                client.sendall(sent)
                client.settimeout(20)
                sockets.append(client)
            return sockets

        yield connect


def seconds_of(port, *asked):
    before = time.monotonic()
    assert ask(port, *asked)[0] == 200
    return time.monotonic() - before


# CI allows for a shared machine that stands still, yet for less than the three seconds after which a client is cut off.
WITHIN = [pytest.param(1, marks=pytest.mark.exhaustive), 2.5]


@pytest.mark.parametrize("seconds", WITHIN)
@pytest.mark.parametrize("what", HOSTILE)
def test_hundreds_keep_nobody_out(port, clients, what, seconds):
    # A third more than the server holds, so that connections have to make room too.
    for count in (200, 140):
        clients(count, HOSTILE[what])
        assert seconds_of(port, "GET", "/kernels") < seconds
    assert seconds_of(port, "POST", "/record", {"kernel": "naive", "matrix": [[1, 2]]}) < 2 * seconds


@pytest.mark.parametrize("what", [what for what in HOSTILE if what != "has half of its body"])  # that one is told so
def test_each_is_cut_off_in_time(port, clients, what):
    (client,) = clients(1, HOSTILE[what])
    before = time.monotonic()
    if what == "reads nothing":
        time.sleep(4)
    with contextlib.suppress(ConnectionError):
        while client.recv(MEGABYTE):
            pass
    assert time.monotonic() - before < 6


def test_headers_that_trickle_have_the_same_deadline(port, clients):
    (client,) = clients(1, b"GET / HTTP/1.1\r\nHost: localhost\r\n")
    before = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - before < 20:
            client.sendall(b"X-More: 1\r\n")
            time.sleep(0.2)
    assert time.monotonic() - before < 6


def test_a_client_that_asks_again_in_time_keeps_its_connection(port, clients):
    (client,) = clients(1, b"")
    for _ in range(3):
        time.sleep(1.5)
        client.sendall(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += (part := client.recv(MEGABYTE))
            assert part
        assert answer.startswith(b"HTTP/1.1 404")


def test_what_runs_in_the_background_of_a_shell_can_be_interrupted():
    """A shell lets what it starts with & ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process, _ = started(60)
    finally:
        signal.signal(signal.SIGINT, before)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 0


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("seconds", WITHIN)
def test_it_ends_at_once(told, busy, seconds):
    process, port = started(60)
    with contextlib.ExitStack() as open_ones:
        if busy:
            ask(port, "POST", "/record", {"kernel": "naive", "matrix": [[1]]})
            slow = {"kernel": "split", "matrix": [[0] * 2048], "block": 1}
            for _ in range(3):
                threading.Thread(target=lambda: swallow(ask, port, "POST", "/record", slow), daemon=True).start()
            for sent in HOSTILE.values():
                client = open_ones.enter_context(socket.create_connection(("127.0.0.1", port)))
                client.sendall(sent)
            time.sleep(1)
        before = time.monotonic()
        process.send_signal(told)
        _, errors = process.communicate(timeout=30)
        took = time.monotonic() - before
    assert errors == ""
    assert process.returncode == (0 if told == signal.SIGINT else -told)
    assert took < seconds


def swallow(call, *arguments):
    with contextlib.suppress(Exception):
        call(*arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "other machines can reach a server on 0.0.0.0: --allow-host must"),
        (["--host", "0.0.0.0", "--allow-host", "*"], "'*' is not a host name or address"),
    ],
)
def test_an_open_address_needs_names(arguments, said):
    command = [sys.executable, "-m", "fused_softmax", "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
