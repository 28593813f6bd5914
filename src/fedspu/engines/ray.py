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

import logging
import pickle
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from time import monotonic
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from fedspu.data.examples import DividedData
from fedspu.engines.arrays import (
    Bytes,
    Examples,
    PackedPacket,
    as_array,
    memory_as_array,
    memory_from_array,
    packed,
    unpacked,
)
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
from fedspu.engines.machine import forget_peak, num_cores, peak_rss_bytes, warm_up
from fedspu.engines.shared_folder import Probe
from fedspu.errors import FedSPUError, SettingsError, StorageError
from fedspu.federation.client import Client, needs_memory
from fedspu.federation.client_memory import Name, Shelf, ShelfError
from fedspu.federation.engine import Answer, Cost, Facts, Missing
from fedspu.federation.messages import (
    Packet,
    Request,
    TrainRequest,
    pack_state,
    unpack_state,
)
from fedspu.federation.plan import Plan, first_line
from fedspu.neurons.table import State
from fedspu.partial.chain.native.models import why_not
from fedspu.settings import Settings
from fedspu.training.epochs import make_optimizer

REACH = 5.0
"""Seconds in which something must answer at the cluster's address."""

HEALTHY = 20.0
"""Seconds in which a cluster must say that it is well."""

START = 60.0
"""Seconds in which at least one actor must begin."""

MAX_STARTS = 3
"""How often in a row actors may die before they have begun."""

DIED = (
    f"its Ray worker was lost {MAX_TRIES} times; do the nodes have enough memory? Try "
    "fewer --workers"
)


@dataclass
class Place:
    """An actor, and what is known about it."""

    actor: Any
    coming: Any  # a reference to its sign of life; None once it can do jobs
    probe: Probe | None = None
    is_new: bool = True  # it has not begun yet
    sees_folder: bool = False
    held: frozenset[Name] = frozenset()  # memories in its RAM, if it sees no folder
    job: Job | None = None
    result: Any = None  # a reference to what comes of the job
    peak: int = 0  # bytes of memory, as last reported


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
            self._placed = [_put(plan), _put(Examples.of(examples)), _put(_versions())]
            for _ in range(self.num_workers):
                self._places.append(self._hire())
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
            shown = _put(as_array(pack_state(self.plan, broadcast)))
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
            _end(place)
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
                raise FedSPUError(_why_none_begins())
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
        _end(self._places[place])
        self._places[place] = self._hire()
        for other in self._places:
            if other.coming is None and other.result is None:
                other.coming = other.actor.is_alive.remote()

    # Starting actors ------------------------------------------------------------------

    def _hire(self) -> Place:
        one_thread = {"env_vars": {"OMP_NUM_THREADS": "1"}}
        kind: Any = ray.remote(num_cpus=1, max_restarts=0, runtime_env=one_thread)
        actor = kind(Player).remote()
        probe = Probe.ask(self.shelf)
        return Place(actor, actor.begin.remote(self._placed, probe), probe)

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
                _end(place)
                self._places[coming[sign]] = self._hire()
                continue
            place.coming = None
            if place.is_new:
                self._begin(place, said)

    def _begin(self, place: Place, said: "Begun") -> None:
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
                f"Ray workers die before they begin ({_cause(error)}); install "
                "the same fedspu on all nodes of the cluster, and see their logs"
            )

    def _packed_memory(self, client: int, t: int) -> Bytes:
        try:
            return memory_as_array(self.shelf, client, t)
        except StorageError as error:
            raise ShelfError(str(error)) from error


def _end(place: Place) -> None:
    """Kill an actor, whatever it is doing."""
    if place.probe is not None:
        place.probe.remove()
    with suppress(RayError, RuntimeError):  # it, or the cluster, is gone already
        ray.kill(place.actor)


# The cluster --------------------------------------------------------------------------


def connect(settings: Settings) -> bool:
    """Connect to the cluster, or start one here; whether to leave it again.

    If this process is connected to a cluster already, that one is used.
    """
    address = settings.ray_address
    if ray.is_initialized():
        _refuse_another(address)
        return False
    if address is not None:
        check_reachable(address)
    given: dict[str, Any] = {"address": address}
    if address is None:
        number = settings.workers or num_cores()
        given = {"address": "local", "num_cpus": number, "include_dashboard": False}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own, about its own future
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **given)
    except (RuntimeError, ValueError, OSError, RayError) as error:
        raise FedSPUError(_why_not_connected(address, first_line(error))) from error
    _hush()
    return True


def _hush() -> None:
    """Leave what Ray says about its nodes to its logs: it would print into ours.

    ``log_to_driver=False`` is not enough for messages about lost nodes, and there is no
    public switch for these.
    """
    printing: Any = import_module("ray._private.worker")
    if hasattr(printing, "_worker_logs_enabled"):
        printing._worker_logs_enabled = False


def _why_not_connected(address: str | None, why: str) -> str:
    if address is None:
        return f"engine = 'ray': no Ray cluster can be started here ({why})"
    return (
        f"ray_address = {address!r}: cannot connect ({why}); a node of the cluster "
        "must run on this machine: `ray start --address=HOST:PORT --num-cpus=0`"
    )


def _refuse_another(address: str | None) -> None:
    known = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", known):
        raise SettingsError(
            f"ray_address = {address!r}: this process is connected to the Ray cluster "
            f"at {known}; leave it out, or call ray.shutdown() first"
        )


def check_reachable(address: str) -> None:
    """Refuse an address at which no Ray cluster answers; Ray would wait for minutes."""
    start = (
        "start a cluster with `ray start --head`, or leave the address out, and fedspu "
        "starts one for this run"
    )
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH).close()
        except OSError as error:
            why = error.strerror or str(error)
            raise FedSPUError(
                f"ray_address = {address!r}: nothing answers there ({why}); {start}"
            ) from None
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check"]
    try:
        asked = subprocess.run(
            [*command, "--address", address],
            capture_output=True,
            text=True,
            timeout=HEALTHY,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FedSPUError(
            f"ray_address = {address!r}: no Ray cluster answers there within "
            f"{HEALTHY:g} s; {start}"
        ) from None
    if asked.returncode != 0:
        said = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
        if "Could not find any running Ray instance" in said:
            said = "none runs on this machine"
        raise FedSPUError(
            f"ray_address = {address!r}: no Ray cluster can be used ({said}); {start}"
        )


def num_actors(settings: Settings) -> int:
    """How many actors play clients; warns if fewer than asked for."""
    cpus = _num_cpus(ray.cluster_resources)
    if cpus < 1:
        raise FedSPUError(
            "the Ray cluster has no CPU; start a node with at least one: "
            "`ray start --address=HOST:PORT --num-cpus=1`"
        )
    asked = settings.workers
    if asked is not None and asked > cpus:
        warnings.warn(
            f"workers = {asked}: the Ray cluster has only {cpus} CPUs; using {cpus}",
            stacklevel=5,
        )
    return min(asked or cpus, cpus, settings.clients.per_round)


def _num_cpus(resources: Callable[[], dict[str, float]]) -> int:
    return int(resources().get("CPU", 0))


def _why_none_begins() -> str:
    free = _num_cpus(ray.available_resources)
    why = "all its CPUs are taken" if free < 1 else "its nodes may be lost or busy"
    return (
        f"no worker of the Ray cluster could begin within {START:g} s: {why}; see "
        "`ray status`, and resume later"
    )


def _put(value: Any) -> Any:
    try:
        return ray.put(value)
    except RayError as error:  # its memory for objects is full
        raise FedSPUError(
            f"Ray cannot hold the data ({first_line(error)}); start its nodes with a "
            "larger --object-store-memory"
        ) from error
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise SettingsError(
            "engine = 'ray': what was given in Python cannot be sent to other "
            f"processes ({first_line(error)}); define it in a module"
        ) from error


# In the actor -------------------------------------------------------------------------


@dataclass(frozen=True)
class Begun:
    """What an actor says when it has begun, or why it cannot."""

    answer: str = ""  # to the probe
    error: bytes | None = None


@dataclass(frozen=True)
class Done:
    """What came of a turn."""

    up: PackedPacket | Missing
    memory: Bytes | None = None  # what the client keeps now, if the shelf is not seen
    held: list[Name] = field(default_factory=list)  # what is in RAM
    peak: int = 0
    error: bytes | None = None  # raised there, to be raised here


class Player:
    """Plays clients; one actor is one process with one thread."""

    def begin(self, placed: list[Any], probe: Probe | None) -> Begun:
        """Take the plan and the examples; say whether the shelf's folder is seen."""
        try:
            torch.set_num_threads(1)
            forget_peak()
            plan, examples, versions = ray.get(placed)
            _check_versions(versions)
            answer = probe.answer() if probe else ""
            folder = probe.path.parent if probe and answer else None
            self.shelf = Shelf(folder)
            self.shelf.cache = 1e6 * plan.settings.store.cache
            cpu = torch.device("cpu")
            divided = examples.divided()
            _check_kernels(plan, divided)
            self.client = Client(plan, divided, self.shelf, cpu)
            self.num_shown = 0
            self.broadcast: State = {}
            warm_up(plan)
            # The first optimizer loads seconds' worth of modules, in any method.
            make_optimizer([torch.zeros(1, requires_grad=True)], plan.settings.train)
        except Exception as error:  # whatever it is, the main process raises it
            return Begun(error=_portable(error))
        return Begun(answer)

    def is_alive(self) -> None:
        """Nothing: that it answers is enough."""

    def turn(
        self,
        what: "What",
        down: PackedPacket,
        memory: Bytes | None,
        broadcast: tuple[int, Any],
    ) -> Done:
        """Play a client's turn; ``memory`` is what it keeps, if that is not here."""
        try:
            if memory is not None:
                kept = memory_from_array(memory)
                self.shelf.put(what.client, what.last, kept)
            found = self.client.respond(unpacked(down), self._state(*broadcast))
            if isinstance(found, Missing):
                return Done(found, None, self._held(), peak_rss_bytes())
            new = self._new_memory(what) if what.is_train else None
            return Done(packed(found.up), new, self._held(), peak_rss_bytes())
        except Exception as error:  # whatever it is, the main process raises it
            return Done(Missing("it raised"), None, self._held(), error=portable(error))

    def _state(self, number: int, shown: Any) -> State | None:
        """What was sent to all; read once, however many clients need it."""
        if shown is None:
            return None
        if number != self.num_shown:
            values = ray.get(shown).tobytes()
            self.broadcast = unpack_state(self.client.plan, values)
            self.num_shown = number
        return self.broadcast

    def _new_memory(self, what: "What") -> Bytes | None:
        """What a client keeps after its turn, unless it is in the shelf's folder."""
        if self.shelf.folder is not None:
            return None
        for client, t in self.shelf.names():
            if client == what.client and t != what.round:
                self.shelf.drop(client, t)  # the main process has it
        return memory_as_array(self.shelf, what.client, what.round)

    def _held(self) -> list[Name]:
        return [] if self.shelf.folder is not None else self.shelf.names()


@dataclass(frozen=True)
class What:
    """What a request asks for, known without reading it."""

    client: int
    last: int
    round: int
    is_train: bool


def _portable(error: Exception) -> bytes:
    """Why an actor cannot begin, as an error to be raised elsewhere."""
    if isinstance(error, FedSPUError):
        return portable(error)
    return portable(
        FedSPUError(
            f"a Ray worker on {socket.gethostname()} cannot begin "
            f"({_cause(error)}); install the same code on all nodes of the cluster"
        )
    )


def _cause(error: BaseException) -> str:
    """The last line that names an error: Ray puts tracebacks into its messages."""
    lines = [line.strip() for line in str(error).splitlines()]
    named = [line for line in lines if "Error: " in line]
    return named[-1] if named else f"{type(error).__name__}: {first_line(error)}"


def _versions() -> dict[str, str]:
    return {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "PyTorch": torch.__version__,
        "fedspu": version("fedspu"),
    }


def _check_versions(wanted: Mapping[str, str]) -> None:
    """Refuse a node whose results could have other bits."""
    here = _versions()
    for name, number in wanted.items():
        if here[name] != number:
            raise FedSPUError(
                f"the Ray node {socket.gethostname()} has {name} {here[name]}, but "
                f"this machine has {number}; install the same on all nodes"
            )


def _check_kernels(plan: Plan, examples: DividedData) -> None:
    """Refuse a node that cannot run what all clients must use."""
    if plan.settings.train.kernels != "native":
        return
    reason = why_not(plan.build().train(), tuple(examples.data.x.shape[1:]))
    if reason:
        raise FedSPUError(
            f"the Ray node {socket.gethostname()} cannot run compiled code: {reason}; "
            "use train.kernels = 'torch'"
        )
