"""Clients in worker processes of this machine, one thread each.

Workers are forked once, so that data and model are there without a copy. Messages go
through memory that both sides share; what says where they lie, through a pipe. A turn
depends on nothing but its request and the client's memory, so the number of workers
changes nothing but the time. A worker that dies is replaced, and its client asked once
more.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from mmap import mmap
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fedspu.engines.machine import forget_peak, peak_rss_bytes
from fedspu.engines.turns import Turn, play_turn, warm_up
from fedspu.errors import FedSPUError
from fedspu.federation.client import Which, judge
from fedspu.federation.memory import Entry, Memories, Shelf
from fedspu.federation.messages import (
    Packet,
    Request,
    pack_request,
    pack_state,
    unpack_reply,
    unpack_state,
)
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Answer
from fedspu.federation.server import Federation
from fedspu.federation.workbench import Workspace
from fedspu.methods.method import Offer
from fedspu.neurons.table import State
from fedspu.training import Score


def window(num_workers: int) -> int:
    """How many clients ahead of the first turn that has not ended another may begin.

    What is ahead of it waits in RAM to be averaged.
    """
    return 16 + 4 * num_workers


MAX_TRIES = 2


def can_fork() -> bool:
    """Whether this system can start workers."""
    return "fork" in multiprocessing.get_all_start_methods()


@dataclass
class Job:
    """One client's turn or judgement, for a worker."""

    client: int
    message: tuple[Any, ...]
    packet: Packet | None = None  # goes with it, through shared memory
    tries: int = 0  # that its workers did not live through


@dataclass(frozen=True)
class Done:
    """What became of a job; ``result`` is None if its workers died."""

    job: Job
    result: Any


class Worker:
    """A process that plays clients, and the memory shared with it."""

    def __init__(self, plan: Plan, shelf: Shelf, stage: mmap, room: int) -> None:
        context = multiprocessing.get_context("fork")
        self.down, self.up = mmap(-1, room), mmap(-1, room)
        self.pipe, theirs = context.Pipe()
        self.peak = 0  # bytes of memory, as it said last
        self.process = context.Process(
            target=_serve,
            args=(plan, shelf, theirs, self.pipe, self.down, self.up, stage),
            daemon=True,
        )
        with warnings.catch_warnings():  # Python 3.12: a fork of a process with threads
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()

    def send(self, job: Job) -> None:
        """Give it a job."""
        lengths = None if job.packet is None else _write(self.down, job.packet)
        self.pipe.send((*job.message, lengths))

    def receive(self) -> Any:
        """What came of its job; raises what it raised, EOFError if it is dead."""
        kind, result = self.pipe.recv()
        if kind == "error":
            raise pickle.loads(result)
        if kind == "turn":
            lengths, entry, seconds, self.peak = result
            return Turn(_read(self.up, lengths), entry, seconds)
        return result

    def end(self) -> None:
        """End it, whatever it does."""
        with suppress(OSError):
            self.pipe.close()
        self.process.kill()
        self.process.join()


class WorkersEngine:
    """Plays clients on several processes, to the same bits as on one."""

    def __init__(
        self, plan: Plan, memories: Memories | None = None, num_workers: int = 2
    ) -> None:
        self.plan, self.num_workers = plan, num_workers
        self.memories = Memories() if memories is None else memories
        whole = sum(tensor.nbytes for tensor in plan.initial.values())
        self._room = 2 * whole + 2**20  # w0, all values, and positions
        self._stage = mmap(-1, whole + 1)
        self._staged = 0  # how many states have been on the stage
        self.peak = 0  # the most memory that a worker has held, once they have ended
        warm_up(plan)
        self._workers: list[Worker] = []
        try:
            for _ in range(num_workers):
                self._workers.append(self._hire())
        except OSError:
            self.close()
            raise

    def exchange(self, requests: Mapping[int, Request]) -> Iterator[tuple[int, Answer]]:
        """Play the clients' turns, longest first; answers come as they are there."""
        turns = _Turns(self.plan, self.memories, requests, self.num_workers)
        changed: dict[int, Entry] = {}
        for done in self._work(turns.next):
            client, turn = done.job.client, done.result
            offer = turns.end(client)
            if turn is not None:
                changed[client] = turn.entry
                reply = unpack_reply(self.plan, turn.up, client, offer)
                cost = turn.cost(done.job.packet)
                yield client, Answer(reply, cost, done.job.tries > 0)
        self.memories.update(changed)

    def judge(
        self, clients: Iterable[int], federation: Federation, which: Which
    ) -> dict[int, Score]:
        """Score each client's personal model, or the global one, on its test part."""
        clients = list(clients)
        staged = self._show(federation.global_state)
        jobs = iter(
            Job(
                k,
                (
                    *("judge", federation.round, k),
                    *(self.memories.entries.get(k), which, staged),
                ),
            )
            for k in clients
        )
        scores = {}
        for done in self._work(lambda: next(jobs, None)):
            if done.result is None:
                raise FedSPUError(
                    f"client {done.job.client} could not be judged: its worker died "
                    f"{MAX_TRIES} times; is there enough memory? Try --workers 1"
                )
            scores[done.job.client] = done.result
        return {client: scores[client] for client in clients}

    def close(self) -> None:
        """End the workers."""
        self.peak = max((worker.peak for worker in self._workers), default=self.peak)
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _replace(self, place: int) -> None:
        self._workers[place].end()
        self._workers[place] = self._hire()

    def _hire(self) -> Worker:
        return Worker(self.plan, self.memories.shelf, self._stage, self._room)

    def _show(self, state: State) -> int:
        """Put a state where all workers see it; the number of this showing."""
        values = pack_state(self.plan, state)
        self._stage[: len(values)] = values
        self._staged += 1
        return self._staged

    def _work(self, next_job: Callable[[], Job | None]) -> Iterator[Done]:
        """Let workers do jobs until there are no more, each as it is done."""
        running: dict[int, Job] = {}  # by worker
        try:
            yield from self._doing(next_job, running)
        finally:
            for place in running:  # an error: nobody waits for what they do
                self._replace(place)

    def _doing(
        self, next_job: Callable[[], Job | None], running: dict[int, Job]
    ) -> Iterator[Done]:
        again: list[Job] = []
        done: list[Done] = []
        while True:
            for place in range(self.num_workers):
                if place not in running:
                    job = again.pop() if again else next_job()
                    if job is None:
                        break
                    running[place] = job
                    with suppress(OSError):  # it is dead: found out below
                        self._workers[place].send(job)
            if done:  # only now, so that no worker waits for what is done with it
                yield from done
                done = []
                continue
            if not running:
                return
            pipes = {self._workers[place].pipe: place for place in running}
            for pipe in wait(list(pipes)):
                place = pipes[pipe]  # type: ignore[index]  # of ours, each a connection
                job = running.pop(place)
                try:
                    done.append(Done(job, self._workers[place].receive()))
                except (EOFError, OSError):
                    self._replace(place)
                    job.tries += 1
                    if job.tries < MAX_TRIES:
                        again.append(job)
                    else:
                        done.append(Done(job, None))


class _Turns:
    """The turns of a round, and which is to begin next."""

    def __init__(
        self,
        plan: Plan,
        memories: Memories,
        requests: Mapping[int, Request],
        num_workers: int,
    ) -> None:
        self.plan, self.memories, self.requests = plan, memories, requests
        self.clients = deque(sorted(requests))
        self.window = window(num_workers)
        self._offers: dict[int, Offer | None] = {}  # of turns that have begun
        self._ended: set[int] = set()

    def next(self) -> Job | None:
        """The longest turn that may begin: not too far ahead of the first to end."""
        begun = self._offers.keys() | self._ended
        near = islice(self.clients, self.window)
        waiting = [client for client in near if client not in begun]
        if not waiting:
            return None
        client = max(waiting, key=self._length)
        request = self.requests[client]
        self._offers[client] = request.offer
        entry = self.memories.entries.get(client)
        return Job(client, ("turn", entry), pack_request(self.plan, request))

    def end(self, client: int) -> Offer | None:
        """A client's turn has ended; what it was offered."""
        self._ended.add(client)
        while self.clients and self.clients[0] in self._ended:
            self._ended.remove(self.clients.popleft())
        return self._offers.pop(client)

    def _length(self, client: int) -> float:
        """About how long a client's turn takes."""
        p = float(self.plan.capacity(client))
        return self.plan.num_examples(client) * (1 + p)


# In the worker ------------------------------------------------------------------------


def _serve(
    plan: Plan,
    shelf: Shelf,
    pipe: Connection,
    theirs: Connection,
    down: mmap,
    up: mmap,
    stage: mmap,
) -> None:
    """Do jobs until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the main one's
    _die_with_parent()
    theirs.close()
    torch.set_num_threads(1)
    forget_peak()
    workspace = Workspace(plan)
    shown: tuple[int, State] = (0, {})
    while True:
        try:
            kind, *message, lengths = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if kind == "turn":
                packet = _read(down, lengths)
                turn = play_turn(plan, workspace, shelf, packet, *message)
                lengths = _write(up, turn.up)
                took = (turn.entry, turn.seconds, peak_rss_bytes())
                pipe.send((kind, (lengths, *took)))
            else:
                t, client, entry, which, staged = message
                if staged != shown[0]:
                    shown = staged, unpack_state(plan, stage)
                memory = None if entry is None else shelf.get(entry)
                score = judge(plan, workspace, t, client, memory, shown[1], which)
                pipe.send((kind, score))
        except Exception as error:  # whatever it is, the main process raises it
            pipe.send(("error", _portable(error)))


def _portable(error: Exception) -> bytes:
    """An error that another process can raise."""
    if isinstance(error, FedSPUError):
        with suppress(Exception):
            packed = pickle.dumps(error)
            pickle.loads(packed)
            return packed
    return pickle.dumps(RuntimeError(f"in a worker:\n{traceback.format_exc()}"))


def _die_with_parent() -> None:
    with suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)


def _write(room: mmap, packet: Packet) -> tuple[int, ...]:
    parts = (packet.header, packet.positions, packet.values, packet.initial)
    room.seek(0)
    for part in parts:
        room.write(part)
    return tuple(map(len, parts))


def _read(room: mmap, lengths: tuple[int, ...]) -> Packet:
    room.seek(0)
    return Packet(*(room.read(length) for length in lengths))
