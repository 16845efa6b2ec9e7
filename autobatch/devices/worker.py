"""A workload open in a process of its own: kept warm, replaced when it dies, killed with its group at a time limit.

The parent never imports torch or the user's code. Orders and outcomes are records, sent over a pair of sockets; what
the user's code prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from autobatch.errors import AutobatchError, DeviceError, UserCodeError
from autobatch.records import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from autobatch.records import Outcome, Visit, WorkloadFacts

OPEN_LIMIT_SECONDS = 300.0
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a worker is to open."""

    device: str
    reference: str
    budget_bytes: int
    seed: int


# ------------------------------------------------------------------ the parent's side


@contextmanager
def worker_session(order: Order, *, visit_limit_seconds: float) -> Iterator[WorkerSession]:
    """Open a workload in a worker process; the process and all it started end with the context."""
    session = WorkerSession(order, visit_limit_seconds=visit_limit_seconds)
    try:
        session.start()
        yield session
    finally:
        session.kill()


class WorkerSession:
    """Implements Session by asking a worker process, and replaces it when it is lost."""

    def __init__(self, order: Order, *, visit_limit_seconds: float) -> None:
        self._order = order
        self._visit_limit_seconds = visit_limit_seconds
        self._losses: dict[Visit, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start a worker and have it open the workload.

        Raises what opening raised there, and DeviceError when the worker is lost over it.
        """
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 -- our own module, in our own interpreter
                [sys.executable, "-P", "-m", "autobatch.devices.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=2,
            )
        answer = self._ask(self._order, OPEN_LIMIT_SECONDS)
        if isinstance(answer, _Lost):
            raise DeviceError(
                f"{self._order.reference} was to be opened in a worker process; it {answer.how}; "
                "see what it printed above"
            )
        self.facts: WorkloadFacts = answer

    def visit(self, visit: Visit, /) -> Outcome:
        """Run the visit in the worker; a worker that dies or hangs makes it a Rejection, and is replaced.

        Raises DeviceError when the same visit loses a worker twice at a micro-batch of one or two.
        """
        start = perf_counter()
        answer = self._ask(visit, self._visit_limit_seconds)
        if not isinstance(answer, _Lost):
            outcome: Outcome = answer
            return outcome
        seconds = perf_counter() - start
        self._losses[visit] = self._losses.get(visit, 0) + 1
        if max(visit.micro_batches) <= 1 or self._losses[visit] > 1:
            raise DeviceError(
                f"a micro-batch of {max(visit.micro_batches)} was asked of the worker; it {answer.how}; "
                "run the training step by itself to see why"
            )
        self.start()
        return Rejection(kind=answer.kind, message=f"the worker {answer.how}", seconds=seconds)

    def _ask(self, question: Order | Visit, limit_seconds: float) -> Any:
        try:
            self._connection.send(question)
            if not self._connection.poll(limit_seconds):
                self.kill()
                return _Lost("hang", f"gave no word for {limit_seconds:.0f} s and was killed")
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            return self._dead()
        if isinstance(answer, AutobatchError):
            raise answer
        return answer

    def _dead(self) -> _Lost:
        assert self._process is not None
        code = self._process.wait()
        self.kill()
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return _Lost("host memory", "was killed (SIGKILL): the machine or its cgroup ran out of memory")
        if code < 0:
            return _Lost("crash", f"died of {signal.Signals(-code).name}")
        return _Lost("crash", f"exited with code {code}")

    def kill(self) -> None:
        """End the worker and every process in its group."""
        self._connection.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@dataclass(frozen=True, slots=True)
class _Lost:
    """How a worker was lost."""

    kind: Any
    how: str


# ------------------------------------------------------------------ the worker's side


def serve(connection: Connection) -> None:
    """Open what the first message orders, then answer visits until the parent is gone."""
    from autobatch.devices.cpu import CpuBackend
    from autobatch.devices.session import opened
    from autobatch.workload import load_workload

    with contextlib.suppress(EOFError, ConnectionError), _errors_sent(connection):
        order: Order = connection.recv()
        workload = load_workload(order.reference, device_kind=order.device)
        backend = CpuBackend(order.budget_bytes)
        with opened(workload, backend, seed=order.seed, reference=order.reference) as session:
            connection.send(session.facts)
            while True:
                connection.send(session.visit(connection.recv()))


@contextmanager
def _errors_sent(connection: Connection) -> Iterator[None]:
    """The edge of the process: whatever is raised is the parent's to show."""
    try:
        yield
    except (EOFError, ConnectionError):
        raise
    except AutobatchError as error:
        connection.send(error)
    except Exception as error:  # noqa: BLE001 -- the user's code can raise anything
        connection.send(user_code_error(error))


def user_code_error(error: Exception) -> UserCodeError:
    """An exception of the user's code as it is sent and shown: its traceback, from the first frame of theirs."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_ours(frames):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return UserCodeError(f"the workload's own code raised {type(error).__name__}: {error}", text)


def _is_ours(frames: TracebackType) -> bool:
    path = Path(frames.tb_frame.f_code.co_filename)
    return path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "workloads")


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
