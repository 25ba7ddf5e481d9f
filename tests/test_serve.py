"""The server as a browser and an attacker meet it: a real one, on a port of its own."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jsonschema
import pytest
from serving import ask, refused, started

from fused_softmax import trace
from fused_softmax.trace.server import serve

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def port():
    process, port = started(30)
    ask(port, "POST", "/record", {"kernel": "naive", "matrix": [[1]]})  # the worker has imported what it needs
    yield port
    process.terminate()
    assert "Traceback" not in process.communicate(timeout=30)[1]


def test_the_page(port):
    status, headers, body = ask(port, "GET", "/")
    assert (status, body) == (200, b"<title>the page</title>")
    assert "connect-src 'self'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


def test_what_can_be_asked(port):
    status, _, body = ask(port, "GET", "/kernels")
    found = json.loads(body)
    assert status == 200
    assert [kernel["name"] for kernel in found["kernels"]] == list(trace.kernels())
    assert found["limits"] == {"elements": 4096, "block": 4096, "bytes": 2**18, "seconds": 30}


@pytest.mark.parametrize("name", ["naive", "online", "split", "backward"])
def test_a_recording(port, name):
    matrix = [[1, 2.5, "-inf", 4], ["nan", 0, 0, 1e-30]]
    status, _, body = ask(port, "POST", "/record", {"kernel": name, "matrix": matrix, "block": 2, "dtype": "float16"})
    assert status == 200, body
    recording = json.loads(body)
    jsonschema.validate(recording, trace.schema())
    assert recording["options"]["dtype"] == "float16"
    assert [row["status"] for row in recording["rows"]] == ["ok", "nan"]


GOOD = {"kernel": "online", "matrix": [[1.0, 2.0]]}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "not JSON"),
        (b"kernel=online", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[1]", 400, "must be an object"),
        (b"[" * 100_000, 400, "nested too deeply"),
        (b'{"kernel": "online", "matrix": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "nested too deeply"),
        (b'{"kernel": "online", "matrix": [[NaN]]}', 400, 'NaN is not JSON; write "nan"'),
        (b'{"kernel": "online", "matrix": [[-Infinity]]}', 400, 'write "-inf"'),
        (b'{"kernel": "online", "matrix": [[1e400]]}', 400, "1e400 is too large"),
        (b'{"kernel": "online", "matrix": [[' + b"9" * 400 + b"]]}", 400, "an integer too large for any float"),
        (b'{"kernel": "online", "matrix": [[' + b"9" * 10_000 + b"]]}", 400, "an integer with too many digits"),
        ({"kernel": "online"}, 400, "matrix is missing"),
        ({"matrix": [[1]]}, 400, "kernel is missing"),
        (GOOD | {"kernel": "../../etc/passwd"}, 400, "unknown kernel"),
        (GOOD | {"kernel": {"do": "launch"}}, 400, "unknown kernel"),
        (GOOD | {"kernel": None}, 400, "unknown kernel None"),
        (GOOD | {"file": "/etc/passwd"}, 400, "unknown field 'file'"),
        (GOOD | {"do": "launch"}, 400, "unknown field 'do'"),
        (GOOD | {"matrix": "/etc/passwd"}, 400, "must be a list of rows of numbers, got text"),
        (GOOD | {"matrix": {"__reduce__": "os.system"}}, 400, "got an object"),
        (GOOD | {"matrix": [[1, 2], [3]]}, 400, "row 0 has 2 columns, row 1 has 1"),
        (GOOD | {"matrix": [[]]}, 400, "at least one row and one column"),
        (GOOD | {"matrix": [[[1]]]}, 400, "row 0, column 0: must be a number, got a list"),
        (GOOD | {"matrix": [["1; import os"]]}, 400, "row 0, column 0: '1; import os' is not a number"),
        (GOOD | {"matrix": [[None, True]]}, 400, "row 0, column 0: must be a number, got nothing"),
        (GOOD | {"matrix": [[1e39]]}, 400, "the largest float32"),
        (GOOD | {"matrix": [[0] * 5000]}, 400, "1 x 5000 = 5000 elements"),
        (GOOD | {"block": -4}, 400, "block must be a power of two from 1 to 4096, got -4"),
        (GOOD | {"block": 10**30}, 400, "block must be a power of two"),
        (GOOD | {"block": 2.0}, 400, "got 2.0"),
        (GOOD | {"dtype": "object"}, 400, "dtype must be one of"),
        (GOOD | {"kernel": "split", "dtype": "float64"}, 400, "split takes float32, float16, bfloat16"),
        (GOOD | {"kernel": "attention"}, 400, "query, key and value side by side"),
        (GOOD | {"kernel": "hybrid-tiled", "block": 4}, 422, "2 columns are not longer than 4"),
        (
            {"kernel": "naive", "matrix": [[1] * 1000] * 1000},
            413,
            "a request must say its Content-Length, of at most 262144 bytes",
        ),
    ],
    ids=lambda value: None if not isinstance(value, str) else value[:30],
)
def test_what_is_refused(port, body, status, message):
    refused(port, body, status, message)


def test_a_body_without_an_end_is_cut_off(port):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as endless:
        endless.sendall(
            b"POST /record HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not select.select([endless], [], [], 0)[0]:
                sent += endless.send(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        assert endless.recv(100).startswith(b"HTTP/1.1 413")
    assert sent < 50 * serve.MOST_BYTES
    assert ask(port, "GET", "/")[0] == 200


def test_a_body_that_does_not_come(port):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
        slow.sendall(
            b"POST /record HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_a_length_that_lies_is_refused_unread(port):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as liar:
        liar.sendall(
            b"POST /record HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999999999\r\n\r\n{"
        )
        assert liar.recv(100).startswith(b"HTTP/1.1 413")


def test_what_is_left_of_a_body_is_no_request(port):
    body = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"  # as another site's form can have it
    with socket.create_connection(("127.0.0.1", port), timeout=20) as form:
        form.sendall(b"POST / HTTP/1.1\r\nHost: evil.example\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        answers = b"".join(iter(lambda: form.recv(4096), b""))
    assert answers.startswith(b"HTTP/1.1 403")
    assert answers.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"Host": "evil.example"}, 403, "this server is not 'evil.example'"),
        ({"Host": "127.0.0.1.evil.example:80"}, 403, "this server is not"),
        ({"Host": "localhost.evil.example"}, 403, "this server is not"),
        ({"Host": "evil.example:80@localhost"}, 403, "must be a host name or address"),
        ({"Origin": "http://evil.example"}, 403, "other sites' pages"),
        ({"Origin": "null"}, 403, "other sites' pages"),
        ({"Content-Type": "text/plain"}, 415, "Content-Type: application/json"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "Content-Type: application/json"),
    ],
)
def test_other_names_and_other_sites(port, headers, status, message):
    refused(port, GOOD, status, message, headers=headers)


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:8765", "[::1]:80", "LOCALHOST"])
def test_loopback_by_all_its_names(port, host):
    assert ask(port, "GET", "/", headers={"Host": host})[0] == 200


def test_the_page_itself_may_ask(port):
    assert ask(port, "POST", "/record", GOOD, {"Origin": f"http://127.0.0.1:{port}"})[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/record", 405),
        ("GET", "/../etc/passwd", 404),
        ("GET", "/%2e%2e/schema.json", 404),
        ("DELETE", "/", 405),
    ],
)
def test_there_is_nothing_else(port, method, path, status):
    found, _, body = ask(port, method, path)
    assert found == status
    assert json.loads(body)["error"]


def test_many_at_once_are_answered_or_told_to_wait(port):
    body = {"kernel": "hybrid-tiled", "matrix": [[1.0] * 32] * 2, "block": 2}
    answers = []

    def one():
        answers.append(ask(port, "POST", "/record", body))

    threads = [threading.Thread(target=one) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 3
    assert all(headers["retry-after"] == "3" for status, headers, _ in answers if status == 503)


def test_a_recording_that_takes_long_is_ended_and_the_server_goes_on():
    process, port = started(1)
    try:
        ask(port, "POST", "/record", GOOD)
        slow = {"kernel": "split", "matrix": [[0] * 1024], "block": 1}
        before = time.monotonic()
        refused(port, slow, 422, r"the recording took longer than 1 s and was stopped")
        assert time.monotonic() - before < 10
        assert ask(port, "POST", "/record", {"kernel": "naive", "matrix": [[1]]})[0] == 200
    finally:
        process.terminate()
        assert "Traceback" not in process.communicate(timeout=30)[1]


TRITONS = [None, *sorted(ROOT.glob(".triton-*"))]


@pytest.mark.parametrize("triton", TRITONS, ids=lambda path: path.name[1:] if path else "installed")
def test_ctrl_c_is_one_line_with_every_triton_that_is_here(triton):
    paths = [str(path) for path in (triton, ROOT / "src") if path]
    process = subprocess.Popen(
        [sys.executable, "-m", "fused_softmax", "serve", "--port", "0"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert select.select([process.stdout], [], [], 120)[0], "the server says where it is"
    port = int(process.stdout.readline().rpartition(":")[2])
    status, _, body = ask(port, "GET", "/")
    assert status == 200
    assert ask(port, "POST", "/record", GOOD)[0] == 200
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "stopped\n")
    assert process.returncode == 0
    held = re.search(r'<script id="server" type="application/json">(.*?)</script>', body.decode())[1]
    assert json.loads(held) == json.loads(json.dumps(serve.known()))


def test_workers_end_with_their_server():
    process, port = started(5)
    ask(port, "POST", "/record", GOOD)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    assert children
    process.kill()  # with no time to tell them
    process.communicate(timeout=30)
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{child}/cmdline") and _alive(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
