"""Clients in worker processes of this machine, one thread each.

Workers are forked once, so they have the data and the model without copying them.
Messages go through memory that both sides share; a pipe carries their lengths. A turn
depends only on its request and the client's memory, so the number of workers changes
only the time. A worker that dies, or does not answer in time, is replaced, and its
client is asked once more.
"""

import multiprocessing
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import suppress
from mmap import mmap
from multiprocessing.connection import Connection, wait
from time import monotonic

import torch

from fedspu.data.examples import DividedData
from fedspu.engines.crew import (
    MAX_TRIES,
    TICK,
    Job,
    Lost,
    Turns,
    portable,
    window,
    work,
)
from fedspu.engines.deadline import Deadline
from fedspu.engines.machine import (
    FreedMemory,
    forget_peak,
    peak_rss_bytes,
    warm_up,
)
from fedspu.errors import FedSPUError
from fedspu.federation.client import Client
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Answer, Cost, Facts, Missing
from fedspu.federation.messages import (
    NO_TIME,
    Packet,
    Request,
    Seconds,
    pack_state,
    unpack_state,
)
from fedspu.federation.plan import Plan
from fedspu.lifetimes import (
    end_with_parent,
    leave_interrupts_to_parent,
    starting_a_process,
)
from fedspu.neurons.table import State


def can_fork() -> bool:
    """Whether this system can start workers."""
    return "fork" in multiprocessing.get_all_start_methods()


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
            args=(
                *(plan, examples, shelf, theirs, self.pipe),
                *(self.down, self.up, stage, os.getpid()),
            ),
            daemon=True,
        )
        with starting_a_process():
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
        lengths, took, self.peak = result
        return _read(self.up, lengths, took)

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
        self._turns = Turns(plan, examples, {}, 0)  # those of the round being played
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
        turns = Turns(self.plan, self.examples, requests, window(self.num_workers))
        self._turns = turns
        jobs = work(self, lambda place: turns.next(), self._deadline, DIED)
        for job, up in jobs:
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

    def _hire(self) -> Worker:
        return Worker(self.plan, self.examples, self.shelf, self._stage, self._room)

    def _show(self, state: State) -> None:
        """Put a state where all workers see it."""
        values = pack_state(self.plan, state)
        self._stage[: len(values)] = values
        self._staged += 1

    # As a crew ------------------------------------------------------------------------

    def ready(self) -> range:
        """The places of all workers."""
        return range(self.num_workers)

    def give(self, place: int, job: Job) -> None:
        """Let a worker do a job."""
        with suppress(OSError):  # it is dead; noticed in ``receive``
            self._workers[place].send(job, self._staged)

    def receive(self, place: int) -> Packet | Missing:
        """The result of a worker's job."""
        try:
            return self._workers[place].receive()
        except (EOFError, OSError):
            raise Lost from None

    def replace(self, place: int) -> None:
        """End a worker and put a new one in its place."""
        if not self._workers:  # the engine was closed meanwhile
            return
        self._workers[place].end()
        try:
            self._workers[place] = self._hire()
        except OSError as error:  # no memory, or no more processes
            raise FedSPUError(
                f"no new worker can be started ({error.strerror or error}); lower "
                "--workers, or resume later"
            ) from error

    def wait(self, running: Mapping[int, Job]) -> list[int]:
        """Wait for a moment; the places of workers that have ended, or are dead."""
        pipes = {self._workers[place].pipe: place for place in running}
        if not wait(list(pipes), 0):  # all are busy, so there is time
            self._turns.make_ahead()
        began = monotonic()
        ready = wait(list(pipes), TICK)
        # If this process was stopped meanwhile, its workers were as well: time that
        # passed unseen does not count.
        passed = min(monotonic() - began, TICK)
        for job in running.values():
            job.waited += passed
        return [pipes[pipe] for pipe in ready]  # type: ignore[index]  # all are ours


DIED = f"its worker died {MAX_TRIES} times; is there enough memory? Try --workers 1"


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
    parent: int,
) -> None:
    """Do jobs until the pipe is closed."""
    leave_interrupts_to_parent()
    end_with_parent(parent)
    theirs.close()
    torch.set_num_threads(1)
    forget_peak()
    client = Client(plan, examples, shelf, torch.device("cpu"))
    shown, broadcast = 0, None
    freed = FreedMemory()
    while True:
        freed.give_back()
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
            took = found.up.took
            pipe.send((True, (_write(up, found.up), took, peak_rss_bytes())))
        except Exception as error:  # whatever it is, the main process raises it
            pipe.send((False, portable(error)))


def _write(room: mmap, packet: Packet) -> tuple[int, ...]:
    parts = (packet.header, packet.positions, packet.values, packet.initial)
    room.seek(0)
    for part in parts:
        room.write(part)
    return tuple(map(len, parts))


def _read(room: mmap, lengths: tuple[int, ...], took: Seconds = NO_TIME) -> Packet:
    room.seek(0)
    header, positions, values, initial = (room.read(length) for length in lengths)
    return Packet(header, positions, values, initial, took)
