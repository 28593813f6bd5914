"""Clients in worker processes of this machine, one thread each.

Workers are forked once, so they have the data and the model without copying them.
Messages go through memory that both sides share; a pipe carries their lengths. A turn
depends only on its request and the client's memory, so the number of workers changes
only the time. A worker that dies, or does not answer in time, is replaced, and its
client is asked once more.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from mmap import mmap
from multiprocessing.connection import Connection, wait
from time import monotonic

import torch

from fedspu.data.examples import DividedData
from fedspu.engines.deadline import Deadline
from fedspu.engines.machine import forget_peak, peak_rss_bytes, warm_up
from fedspu.errors import FedSPUError
from fedspu.federation.client import Client
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Answer, Cost, Facts, Missing
from fedspu.federation.messages import (
    Packet,
    Request,
    pack_request,
    pack_state,
    unpack_state,
)
from fedspu.federation.plan import Plan
from fedspu.neurons.table import State


def window(num_workers: int) -> int:
    """How many clients may be in play, counted from the first that has not ended.

    Replies of the clients after it wait in RAM until they can be averaged.
    """
    return 16 + 4 * num_workers


MAX_TRIES = 2

TICK = 0.25
"""Seconds between two looks at deadlines."""


def can_fork() -> bool:
    """Whether this system can start workers."""
    return "fork" in multiprocessing.get_all_start_methods()


@dataclass
class Job:
    """One client's request, for a worker."""

    client: int
    request: Request
    packet: Packet
    length: float  # about how long it takes, in no unit
    tries: int = 0  # how often a worker was lost in it
    waited: float = 0.0  # seconds since a worker was given it


class Worker:
    """A process that plays clients, and the memory shared with it."""

    def __init__(
        self, plan: Plan, examples: DividedData, shelf: Shelf, stage: mmap, room: int
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.down, self.up = mmap(-1, room), mmap(-1, room)
        self.pipe, theirs = context.Pipe()
        self.peak = 0  # bytes of memory, as last reported
        self.process = context.Process(
            target=_serve,
            args=(plan, examples, shelf, theirs, self.pipe, self.down, self.up, stage),
            daemon=True,
        )
        with warnings.catch_warnings():  # Python 3.12 warns of threads at a fork
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()

    def send(self, job: Job, staged: int) -> None:
        """Give it a job; ``staged`` is the number of the state on the stage."""
        self.pipe.send((_write(self.down, job.packet), staged))

    def receive(self) -> Packet | Missing:
        """The result of its job; raises what it raised, or EOFError if it is dead."""
        is_done, result = self.pipe.recv()
        if not is_done:
            raise pickle.loads(result)
        if isinstance(result, Missing):
            return result
        lengths, seconds, self.peak = result
        return _read(self.up, lengths, seconds)

    def end(self) -> None:
        """Kill it, whatever it is doing."""
        with suppress(OSError):
            self.pipe.close()
        self.process.kill()
        self.process.join()


class WorkersEngine:
    """Plays clients in several processes, with the same bits as in one."""

    def __init__(
        self, plan: Plan, examples: DividedData, shelf: Shelf, num_workers: int = 2
    ) -> None:
        self.plan, self.examples, self.shelf = plan, examples, shelf
        self.num_workers = num_workers
        whole = sum(tensor.nbytes for tensor in plan.initial.values())
        self._room = 2 * whole + 2**20  # w0, all values, and positions
        self._stage = mmap(-1, whole + 1)
        self._staged = 0  # how many states have been on the stage
        self._peak = 0
        self._deadline = Deadline(plan.settings.clients.deadline)
        warm_up(plan)
        self._workers: list[Worker] = []
        try:
            for _ in range(num_workers):
                self._workers.append(self._hire())
        except OSError:
            self.close()
            raise

    @property
    def facts(self) -> Facts:
        """How many workers there are, and the most memory that one has held."""
        peak = max((worker.peak for worker in self._workers), default=self._peak)
        return Facts(self.num_workers, peak)

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        """Play the clients' turns, longest first; answers come as they arrive."""
        if broadcast is not None:
            self._show(broadcast)
        turns = _Turns(self.plan, self.examples, requests, self.num_workers)
        for job, up in self._work(turns.next):
            turns.end(job.client)
            if isinstance(up, Missing):
                yield job.client, up
            else:
                yield job.client, Answer(up, Cost.of(job.packet, up), job.tries > 0)

    def close(self) -> None:
        """End the workers."""
        self._peak = self.facts.peak_bytes
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _replace(self, place: int) -> None:
        self._workers[place].end()
        try:
            self._workers[place] = self._hire()
        except OSError as error:  # no memory, or no more processes
            raise FedSPUError(
                f"no new worker can be started ({error.strerror or error}); lower "
                "--workers, or resume later"
            ) from error

    def _hire(self) -> Worker:
        return Worker(self.plan, self.examples, self.shelf, self._stage, self._room)

    def _show(self, state: State) -> None:
        """Put a state where all workers see it."""
        values = pack_state(self.plan, state)
        self._stage[: len(values)] = values
        self._staged += 1

    def _work(
        self, next_job: Callable[[], Job | None]
    ) -> Iterator[tuple[Job, Packet | Missing]]:
        """Let workers do all jobs; yield each with its result, or why there is none."""
        running: dict[int, Job] = {}  # by worker
        try:
            yield from self._doing(next_job, running)
        finally:
            for place in running:  # after an error, their results are not used
                with suppress(FedSPUError):  # the first error is the one to tell
                    self._replace(place)

    def _doing(
        self, next_job: Callable[[], Job | None], running: dict[int, Job]
    ) -> Iterator[tuple[Job, Packet | Missing]]:
        again: list[Job] = []
        done: list[tuple[Job, Packet | Missing]] = []

        def lose(place: int, reason: str) -> None:
            job = running.pop(place)
            self._replace(place)
            job.tries, job.waited = job.tries + 1, 0.0
            if job.tries < MAX_TRIES:
                again.append(job)
            else:
                done.append((job, Missing(reason)))

        while True:
            for place in range(self.num_workers):
                if place not in running:
                    job = again.pop() if again else next_job()
                    if job is None:
                        break
                    running[place] = job
                    with suppress(OSError):  # the worker is dead; noticed below
                        self._workers[place].send(job, self._staged)
            if done:  # only now that workers are busy again
                yield from done
                done = []
                continue
            if not running:
                return
            for place in self._wait(running):
                job = running[place]
                try:
                    found = self._workers[place].receive()
                except (EOFError, OSError):
                    lose(place, DIED)
                    continue
                except BaseException:
                    running.pop(place)  # it has ended, and can be used again
                    raise
                done.append((running.pop(place), found))
                self._deadline.note(job.request, job.length, job.waited)
            for place, job in list(running.items()):
                limit = self._deadline.seconds(job.request, job.length)
                if job.waited > limit:
                    lose(place, f"no answer within {limit:g} s, {MAX_TRIES} times")

    def _wait(self, running: Mapping[int, Job]) -> list[int]:
        """Wait for a moment; the workers that have ended their jobs, or are dead."""
        pipes = {self._workers[place].pipe: place for place in running}
        began = monotonic()
        ready = wait(list(pipes), TICK)
        # If this process was stopped meanwhile, its workers were as well: time that
        # passed unseen does not count.
        passed = min(monotonic() - began, TICK)
        for job in running.values():
            job.waited += passed
        return [pipes[pipe] for pipe in ready]  # type: ignore[index]  # all are ours


DIED = f"its worker died {MAX_TRIES} times; is there enough memory? Try --workers 1"


class _Turns:
    """The turns of a round, and which is to begin next."""

    def __init__(
        self,
        plan: Plan,
        examples: DividedData,
        requests: Mapping[int, Request],
        num_workers: int,
    ) -> None:
        self.plan, self.examples, self.requests = plan, examples, requests
        self.clients = deque(sorted(requests))
        self.window = window(num_workers)
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def next(self) -> Job | None:
        """The longest turn that may begin now; None if there is none."""
        near = islice(self.clients, self.window)
        waiting = [client for client in near if client not in self._begun]
        if not waiting:
            return None
        client = max(waiting, key=self._length)
        self._begun.add(client)
        request = self.requests[client]
        packet = pack_request(self.plan, request)
        return Job(client, request, packet, self._length(client))

    def end(self, client: int) -> None:
        """A client's turn has ended."""
        self._ended.add(client)
        while self.clients and self.clients[0] in self._ended:
            first = self.clients.popleft()
            self._ended.remove(first)
            self._begun.remove(first)

    def _length(self, client: int) -> float:
        """About how long a client's turn takes."""
        p = float(self.plan.capacity(client))
        return self.examples.num_examples(client) * (1 + p)


# In the worker ------------------------------------------------------------------------


def _serve(
    plan: Plan,
    examples: DividedData,
    shelf: Shelf,
    pipe: Connection,
    theirs: Connection,
    down: mmap,
    up: mmap,
    stage: mmap,
) -> None:
    """Do jobs until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles interrupts
    _die_with_parent()
    theirs.close()
    torch.set_num_threads(1)
    forget_peak()
    client = Client(plan, examples, shelf, torch.device("cpu"))
    shown, broadcast = 0, None
    while True:
        try:
            lengths, staged = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if staged != shown:
                shown, broadcast = staged, unpack_state(plan, stage)
            found = client.respond(_read(down, lengths), broadcast)
            if isinstance(found, Missing):
                pipe.send((True, found))
                continue
            seconds = found.up.seconds
            pipe.send((True, (_write(up, found.up), seconds, peak_rss_bytes())))
        except Exception as error:  # whatever it is, the main process raises it
            pipe.send((False, _portable(error)))


def _portable(error: Exception) -> bytes:
    """An error that another process can raise."""
    if isinstance(error, FedSPUError):
        with suppress(Exception):
            packed = pickle.dumps(error)
            pickle.loads(packed)
            return packed
    return pickle.dumps(RuntimeError(f"in a worker:\n{traceback.format_exc()}"))


def _die_with_parent() -> None:
    with suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)


def _write(room: mmap, packet: Packet) -> tuple[int, ...]:
    parts = (packet.header, packet.positions, packet.values, packet.initial)
    room.seek(0)
    for part in parts:
        room.write(part)
    return tuple(map(len, parts))


def _read(room: mmap, lengths: tuple[int, ...], seconds: float = 0.0) -> Packet:
    room.seek(0)
    header, positions, values, initial = (room.read(length) for length in lengths)
    return Packet(header, positions, values, initial, seconds)
