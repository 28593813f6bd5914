"""Clients on a Ray cluster: one actor for each CPU, one thread each.

The plan and the examples are placed in the cluster once. In each turn a request goes to
an actor and a reply comes back; a broadcast is placed once for each exchange.

Where memories are: an actor that sees the shelf's folder (it is on this machine, or the
file system is shared) uses the folder. Both sides write a file with random content and
read the other's, so neither a folder of the same name nor another user's is taken for
it. An actor that does not see the folder keeps the memories it made in RAM, as far as
``store.cache`` goes, and sends each with its reply; it is on the shelf here before the
reply is used. So a lost node loses nothing. A client is played by the actor that has
its memory if that is free; any other is sent the memory first.

An actor that is lost, or does not answer in time, is started anew wherever there is
room, and its client is asked once more. Actors that did nothing at that time must show
that they are alive before they are used again.
"""

import pickle
from collections.abc import Iterator, Mapping
from time import monotonic

import ray
from ray.exceptions import RayError, RayTaskError

from fedspu.data.examples import DividedData
from fedspu.engines.crew import MAX_TRIES, TICK, Job, Lost, Turns, window, work
from fedspu.engines.deadline import Deadline
from fedspu.engines.ray.arrays import (
    Bytes,
    Examples,
    as_array,
    memory_as_array,
    memory_from_array,
    packed,
    unpacked,
)
from fedspu.engines.ray.cluster import START, connect, num_actors, put, why_none_begins
from fedspu.engines.ray.nodes import cause, versions
from fedspu.engines.ray.places import Place, end, hire
from fedspu.engines.ray.players import Begun, Done, What
from fedspu.errors import FedSPUError, StorageError
from fedspu.federation.client import needs_memory
from fedspu.federation.client_memory import Shelf, ShelfError
from fedspu.federation.engine import Answer, Cost, Facts, Missing
from fedspu.federation.messages import Packet, Request, TrainRequest, pack_state
from fedspu.federation.plan import Plan
from fedspu.neurons.table import State

MAX_STARTS = 3
"""How often in a row actors may die before they have begun."""

DIED = (
    f"its Ray worker was lost {MAX_TRIES} times; do the nodes have enough memory? Try "
    "fewer --workers"
)


class RayEngine:
    """Plays clients on a Ray cluster, with the same bits as in one process."""

    def __init__(self, plan: Plan, examples: DividedData, shelf: Shelf) -> None:
        self.plan, self.examples, self.shelf = plan, examples, shelf
        self._deadline = Deadline(plan.settings.clients.deadline)
        self._places: list[Place] = []
        self._peak = 0
        self._num_shown, self._shown = 0, None  # states that all actors were sent
        self._failed_starts = 0
        self._is_ours = connect(plan.settings)
        try:
            self.num_workers = num_actors(plan.settings)
            self._placed = [put(plan), put(Examples.of(examples)), put(versions())]
            for _ in range(self.num_workers):
                self._places.append(hire(self._placed, self.shelf))
            self.ready()
        except BaseException:
            self.close()
            raise

    @property
    def facts(self) -> Facts:
        """How many actors there are, and the most memory that one has held."""
        peak = max((place.peak for place in self._places), default=self._peak)
        return Facts(self.num_workers, peak)

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        """Play the clients' turns, longest first; answers come as they arrive."""
        shown = None
        if broadcast is not None:
            self._num_shown += 1
            shown = put(as_array(pack_state(self.plan, broadcast)))
        self._shown = shown
        turns = Turns(self.plan, self.examples, requests, window(self.num_workers))

        def next_job(place: int) -> Job | None:
            homes = self._homes()
            here = {-1: 1, place: 2}  # at home nowhere, or here; 0: somewhere else
            return turns.next(lambda client: here.get(homes.get(client, -1), 0))

        for job, up in work(self, next_job, self._deadline, DIED):
            turns.end(job.client)
            if isinstance(up, Missing):
                yield job.client, up
            else:
                yield job.client, Answer(up, Cost.of(job.packet, up), job.tries > 0)

    def close(self) -> None:
        """End the actors, and the cluster if it is our own."""
        self._peak = self.facts.peak_bytes if self._places else self._peak
        for place in self._places:
            end(place)
        self._places, self._placed, self._shown = [], [], None
        if self._is_ours:
            self._is_ours = False
            ray.shutdown()

    def _homes(self) -> dict[int, int]:
        """The place that holds each client's memory in RAM, where one does."""
        places = enumerate(self._places)
        return {client: place for place, p in places for client, _ in p.held}

    # As a crew ------------------------------------------------------------------------

    def ready(self) -> list[int]:
        """The places of actors that have begun; waits until there is one."""
        began = monotonic()
        while True:
            self._welcome()
            found = [i for i, place in enumerate(self._places) if place.coming is None]
            if found:
                return found
            if monotonic() - began > START:
                raise FedSPUError(why_none_begins())
            ray.wait([place.coming for place in self._places], timeout=1.0)

    def give(self, place: int, job: Job) -> None:
        """Let an actor do a job; it is sent its client's memory if it has none."""
        at = self._places[place]
        request, memory = job.request, None
        name = (request.client, request.last)
        is_there = at.sees_folder or request.last == 0 or name in at.held
        if not is_there and needs_memory(self.plan, request):
            memory = self._packed_memory(*name)
        is_train = isinstance(request, TrainRequest)
        what = What(request.client, request.last, request.round, is_train)
        broadcast = (self._num_shown, self._shown)
        at.job = job
        at.result = at.actor.turn.remote(what, packed(job.packet), memory, broadcast)

    def wait(self, running: Mapping[int, Job]) -> list[int]:
        """Wait for a moment; the places of actors that have ended, or are lost."""
        results = {self._places[place].result: place for place in running}
        began = monotonic()
        ended, _ = ray.wait(list(results), timeout=TICK)
        if ended:  # there may be more by now
            ended, _ = ray.wait(list(results), num_returns=len(results), timeout=0)
        # If this process was stopped meanwhile, that time does not count.
        passed = min(monotonic() - began, TICK)
        for job in running.values():
            job.waited += passed
        return [results[result] for result in ended]

    def receive(self, place: int) -> Packet | Missing:
        """The result of an actor's job; what its client keeps is on the shelf then."""
        at = self._places[place]
        job, at.job = at.job, None
        try:
            done: Done = ray.get(at.result)
        except RayTaskError:  # a mistake in this file, and no lost node
            raise
        except RayError:
            raise Lost from None
        finally:
            at.result = None
        if done.error is not None:
            raise pickle.loads(done.error)
        at.held, at.peak = frozenset(done.held), done.peak
        if done.memory is not None and job is not None:
            memory = memory_from_array(done.memory)
            self.shelf.put(job.client, job.request.round, memory)
        if isinstance(done.up, Missing):
            return done.up
        return unpacked(done.up)

    def replace(self, place: int) -> None:
        """End an actor and start another; its node may be lost with others on it."""
        end(self._places[place])
        self._places[place] = hire(self._placed, self.shelf)
        for other in self._places:
            if other.coming is None and other.result is None:
                other.coming = other.actor.is_alive.remote()

    # Starting actors ------------------------------------------------------------------

    def _welcome(self) -> None:
        """Take note of actors that have begun; replace those that died before."""
        coming = {p.coming: i for i, p in enumerate(self._places) if p.coming}
        if not coming:
            return
        arrived, _ = ray.wait(list(coming), num_returns=len(coming), timeout=0)
        for sign in arrived:
            place = self._places[coming[sign]]
            try:
                said = ray.get(sign)
            except RayError as error:
                self._note_failed_start(place, error)
                end(place)
                self._places[coming[sign]] = hire(self._placed, self.shelf)
                continue
            place.coming = None
            if place.is_new:
                self._begin(place, said)

    def _begin(self, place: Place, said: Begun) -> None:
        if said.error is not None:
            raise pickle.loads(said.error)
        place.is_new, self._failed_starts = False, 0
        if place.probe is not None:
            place.sees_folder = place.probe.is_answered(said.answer)
            place.probe.remove()

    def _note_failed_start(self, place: Place, error: RayError) -> None:
        if not place.is_new:  # it had begun before
            return
        self._failed_starts += 1
        if self._failed_starts >= MAX_STARTS:
            raise FedSPUError(
                f"Ray workers die before they begin ({cause(error)}); install "
                "the same fedspu on all nodes of the cluster, and see their logs"
            )

    def _packed_memory(self, client: int, t: int) -> Bytes:
        try:
            return memory_as_array(self.shelf, client, t)
        except StorageError as error:
            raise ShelfError(str(error)) from error
