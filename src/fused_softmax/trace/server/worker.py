"""Makes recordings in another process, which interprets where this one compiles and can be killed when it is late.

A request is a line of JSON on its input, an answer is a line on its output.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

from fused_softmax.trace.recorder.memory import RecordingError

START_SECONDS = 120.0  # to import torch and Triton and use them once, on a busy machine

_KINDS = {"RecordingError": RecordingError, "ValueError": ValueError, "TypeError": TypeError}


class Late(RecordingError):
    """A recording took too long, and its worker was killed."""


class Worker:
    """A process that makes recordings. It starts at the first request and is kept. Several threads may ask it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start the process, and wait until it has imported its modules."""
        with self._asking:
            self._ready()

    def ask(self, request: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """The requested recording.

        Raises Late after `timeout` seconds. A ValueError, TypeError or RecordingError in the worker is raised here too,
        anything else as a RuntimeError.
        """
        with self._asking:
            process = self._ready()
            try:
                answer = self._answer(process, json.dumps(request).encode() + b"\n", timeout)
            except BaseException:
                self._end()
                raise
        if "recording" in answer:
            return answer["recording"]
        raise _KINDS.get(answer["kind"], RuntimeError)(answer["error"])

    def close(self) -> None:
        """End the process, for good, and wait until it has ended; what it was asked for fails."""
        self.kill()
        with self._asking:
            self._end()

    def kill(self) -> None:
        """Tell the process to end, for good; whoever waits for its answer gets a RecordingError."""
        self._closed = True
        if process := self._process:
            process.kill()

    def _ready(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._end()
            here = {"TRITON_INTERPRET": "1", "FUSED_SOFTMAX_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
            # Neither -m nor its working directory: it must import only what this process would.
            here["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", "from fused_softmax.trace.server.worker import main; main()"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | here, start_new_session=True,
            )  # fmt: skip
            try:
                if self._closed:
                    raise RecordingError("the recording process was ended")
                self._answer(self._process, b"", START_SECONDS)
            except BaseException:
                self._end()
                raise
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]

    def _answer(self, process: "subprocess.Popen[bytes]", line: bytes, timeout: float | None) -> dict[str, Any]:
        """Write a line and read one. At the deadline the process is killed, which ends both."""
        late = threading.Event()
        before = time.monotonic()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout, give_up) if timeout is not None else None
        if timer:
            timer.daemon = True
            timer.start()
        answer = b""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
        finally:
            if timer:
                timer.cancel()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        if late.is_set():
            raise Late(f"took longer than {timeout:g} s and was stopped: use fewer rows or columns, or larger blocks")
        raise RecordingError(f"the recording process ended after {time.monotonic() - before:.1f} s; its error is above")


def main() -> None:
    """The process: it answers requests until its input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a kernel's prints must not look like answers
    from fused_softmax.trace import asked, custom, run

    def recording(request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "launch":
            return custom.record(custom.found(request["where"]), request)
        wanted = asked.asked(*(request.get(name) for name in ("kernel", "matrix", "block", "dtype")))
        return run.kernel(wanted, request.get("title"))

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
        answers.flush()

    for warm in ("naive", "online"):  # pays for torch's and Triton's imports on first use
        run.kernel(asked.asked(warm, [[0.0, 1.0]]))
    say({})
    for line in sys.stdin.buffer:
        try:
            say({"recording": recording(json.loads(line))})
        except Exception as error:
            kind = next(
                (each.__name__ for each in (ValueError, TypeError) if isinstance(error, each)), "RecordingError"
            )
            say({"error": str(error), "kind": kind})
