"""Makes recordings in another process, which interprets where this one compiles and can be killed when it is late."""

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from fused_softmax.trace.recorder.memory import RecordingError

START_SECONDS = 120.0  # to import torch and Triton and use them once, on a busy machine


class Late(RecordingError):
    """A recording took too long, and its worker was killed."""


class Worker:
    """A process that makes recordings. It starts at the first request and is kept. Several threads may ask it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asking, self._starting = threading.Lock(), threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start the process. The first request waits until it has imported its modules."""
        here = {"TRITON_INTERPRET": "1", "FUSED_SOFTMAX_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        # Neither -m nor its working directory: it must import only what this process would.
        here["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with self._starting:
            if self._closed:
                raise RecordingError("the recording process was ended")
            self._pipe, theirs = Pipe()
            self._ready = False
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", f"from {__name__} import main; main({theirs.fileno()})"],
                    stdin=subprocess.DEVNULL, stdout=2, env=os.environ | here, start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )  # fmt: skip

    def ask(self, make: Callable[..., dict[str, Any]], *arguments: Any, timeout: float | None = None) -> dict[str, Any]:
        """The recording that a function of a module makes of these arguments.

        Raises Late after `timeout` seconds. A ValueError or TypeError in the worker is raised here too, anything else
        as a RecordingError.
        """
        packed = io.BytesIO()
        torch.save((make, arguments), packed)  # tensors that share memory still share it
        with self._asking:
            if self._process is None or self._process.poll() is not None:
                self.start()
            try:
                if not self._ready:
                    self._ready = self._answer(START_SECONDS)
                self._pipe.send_bytes(packed.getvalue())
                answer = self._answer(timeout)
            except BaseException as error:
                self._kill()
                self._pipe.close()
                if isinstance(error, EOFError | ConnectionError):
                    raise RecordingError("the recording process has ended; its error went to standard error") from None
                if isinstance(error, Late):
                    self.start()  # so that the next request need not wait
                raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process, for good; whoever waits for its answer gets a RecordingError."""
        with self._starting:
            self._closed = True
        self._kill()

    def _kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    def _answer(self, timeout: float | None) -> Any:
        if not self._pipe.poll(timeout):
            raise Late(
                f"the recording took longer than {timeout:g} s and was stopped: use fewer rows or columns, or larger "
                "blocks"
            )
        return self._pipe.recv()


def main(number: int) -> None:
    """The process: it answers what comes through a pipe until nobody holds the other end."""
    from fused_softmax.trace import asked, run

    for warm in ("naive", "online"):  # pays for torch's and Triton's imports on first use
        run.kernel(asked.asked(warm, [[0.0, 1.0]]))
    pipe: Connection[Any, Any] = Connection(number)
    pipe.send(True)
    with suppress(EOFError):
        while request := pipe.recv_bytes():
            pipe.send(_answered(request))


def _answered(request: bytes) -> dict[str, Any] | Exception:
    try:
        make, arguments = torch.load(io.BytesIO(request), weights_only=False)
        return make(*arguments)
    except Exception as error:
        kinds = (each for each in (ValueError, TypeError) if isinstance(error, each))
        return next(kinds, RecordingError)(str(error))
