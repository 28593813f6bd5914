"""A crew: workers that do jobs, one at a time each; a lost job is done again.

For all engines whose workers can die: processes of this machine, or of a cluster.
"""

import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from fedspu.data.examples import DividedData
from fedspu.engines.deadline import Deadline
from fedspu.errors import FedSPUError
from fedspu.federation.engine import Missing
from fedspu.federation.messages import Packet, Request, pack_request
from fedspu.federation.plan import Plan

MAX_TRIES = 2

TICK = 0.25
"""Seconds between two looks at deadlines."""


def window(num_workers: int) -> int:
    """How many clients may be in play, counted from the first that has not ended.

    Replies of the clients after it wait in RAM until they can be averaged.
    """
    return 16 + 4 * num_workers


@dataclass
class Job:
    """One client's request, for a worker."""

    client: int
    request: Request
    packet: Packet
    length: float  # about how long it takes, in no unit
    tries: int = 0  # how often a worker was lost in it
    waited: float = 0.0  # seconds since a worker was given it


class Lost(Exception):  # noqa: N818  # it says what happened to the worker
    """A worker was lost in its job."""


class Crew(Protocol):
    """Workers by their place, a number; what ``work`` needs to know about them."""

    def ready(self) -> Iterable[int]:
        """Places whose workers can do jobs, busy or not; at least one."""

    def give(self, place: int, job: Job) -> None:
        """Let a worker do a job. If it is dead, ``receive`` says so."""

    def wait(self, running: Mapping[int, Job]) -> list[int]:
        """Wait for a moment, and add it to what jobs have waited.

        Returns the places whose jobs have ended, or whose workers are dead.
        """

    def receive(self, place: int) -> Packet | Missing:
        """The result of a job; raises what it raised, or ``Lost``."""

    def replace(self, place: int) -> None:
        """End a worker, whatever it is doing, and put a new one in its place."""


def work(
    crew: Crew, next_job: Callable[[int], Job | None], deadline: Deadline, died: str
) -> Iterator[tuple[Job, Packet | Missing]]:
    """Let a crew do all jobs; yield each with its result, or why there is none.

    ``next_job`` gives the next job for a place; ``died`` is the reason if workers were
    lost in a job as often as it may be tried.
    """
    running: dict[int, Job] = {}  # by place
    try:
        yield from _doing(crew, next_job, deadline, died, running)
    finally:
        for place in running:  # after an error, their results are not used
            with suppress(FedSPUError):  # the first error is the one to tell
                crew.replace(place)


def _doing(
    crew: Crew,
    next_job: Callable[[int], Job | None],
    deadline: Deadline,
    died: str,
    running: dict[int, Job],
) -> Iterator[tuple[Job, Packet | Missing]]:
    again: list[Job] = []
    done: list[tuple[Job, Packet | Missing]] = []

    def lose(place: int, reason: str) -> None:
        job = running.pop(place)
        crew.replace(place)
        job.tries, job.waited = job.tries + 1, 0.0
        if job.tries < MAX_TRIES:
            again.append(job)
        else:
            done.append((job, Missing(reason)))

    while True:
        for place in crew.ready():
            if place not in running:
                job = again.pop() if again else next_job(place)
                if job is None:
                    break
                running[place] = job
                crew.give(place, job)
        if done:  # only now that workers are busy again
            yield from done
            done = []
            continue
        if not running:
            return
        for place in crew.wait(running):
            job = running[place]
            try:
                found = crew.receive(place)
            except Lost:
                lose(place, died)
                continue
            except BaseException:
                running.pop(place)  # it has ended, and can be used again
                raise
            done.append((running.pop(place), found))
            deadline.note(job.request, job.length, job.waited)
        for place, job in list(running.items()):
            limit = deadline.seconds(job.request, job.length)
            if job.waited > limit:
                lose(place, f"no answer within {limit:g} s, {MAX_TRIES} times")


class Turns:
    """The turns of a round, and which is to begin next.

    No client begins that is ``window`` or more behind the first that has not ended.
    """

    def __init__(
        self,
        plan: Plan,
        examples: DividedData,
        requests: Mapping[int, Request],
        window: int,
    ) -> None:
        self.plan, self.examples, self.requests = plan, examples, requests
        self.clients = deque(sorted(requests))
        self.window = window
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._ahead: Job | None = None  # made already, for the next who asks

    def next(self, rank: Callable[[int], int] = lambda client: 0) -> Job | None:
        """The longest turn that may begin now; None if there is none.

        ``rank`` comes before length: clients of a higher rank begin first.
        """
        if self._ahead is not None:
            job, self._ahead = self._ahead, None
            return job
        near = islice(self.clients, self.window)
        waiting = [client for client in near if client not in self._begun]
        if not waiting:
            return None
        client = max(waiting, key=lambda client: (rank(client), self._length(client)))
        self._begun.add(client)
        request = self.requests[client]
        packet = pack_request(self.plan, request)
        return Job(client, request, packet, self._length(client))

    def make_ahead(self) -> None:
        """Make the next turn's message now, so that a worker need not wait for it."""
        if self._ahead is None:
            self._ahead = self.next()

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


def portable(error: Exception) -> bytes:
    """An error that another process can raise, after ``pickle.loads``."""
    if isinstance(error, FedSPUError):
        with suppress(Exception):
            packed = pickle.dumps(error)
            pickle.loads(packed)
            return packed
    return pickle.dumps(RuntimeError(f"in a worker:\n{traceback.format_exc()}"))
