"""A device: one client on its own machine, with its own data and its own disk.

Flower starts a new process for every message, so all that a device knows is in its
folder, one for each run that it took part in::

    settings.toml, plan.json, initial.safetensors   the run, as this device sees it
    personal/                                       its last three memories

What it keeps never leaves it.
"""

import errno
import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedspu import models
from fedspu.data import load as load_data
from fedspu.data.dataset import Dataset
from fedspu.data.examples import strata
from fedspu.data.splits import MIN_EXAMPLES, Split, split
from fedspu.engines.flower.wire import (
    Content,
    Hello,
    Seat,
    Strict,
    fedspu_version,
)
from fedspu.engines.machine import find_device, one_thread
from fedspu.errors import DataError, FedSPUError, ModelError, StorageError
from fedspu.federation.client import Client, Examples
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Answer, Missing
from fedspu.federation.messages import VERSION, unpack_state
from fedspu.federation.plan import Plan, Sample, first_line, make_plan
from fedspu.federation.plan_file import describe_plan, restore_plan
from fedspu.files import Mark, lock, read_file, sync_folder, write_whole
from fedspu.flower.config import NodeSettings
from fedspu.imports import is_place
from fedspu.methods.method import Memory
from fedspu.neurons.choose import as_fraction
from fedspu.neurons.slim import slim_state
from fedspu.prepare import choose, with_kernels
from fedspu.random_streams import stream
from fedspu.settings import Settings
from fedspu.settings_text import MOST_BYTES, flatten, parse_toml
from fedspu.tasks.task import Task

KEPT = 3
"""How many memories a device keeps. A server may go back by one save, see the shelf."""

LOCK_SECONDS = 60.0
"""How long a process of a device waits for another one of the same device."""


@dataclass(frozen=True)
class OwnData:
    """The examples of one client; there are no others here."""

    data: Dataset
    parts: Split

    def part(self, client: int, name: str) -> tuple[Tensor, Tensor]:
        """The device's own ``train``, ``val`` or ``test`` examples."""
        return self.data.take(torch.from_numpy(getattr(self.parts, name)))


class Device:
    """Answers a server's messages; ``given`` are the run's settings, by dotted name."""

    def __init__(self, given: Mapping[str, Any], node: NodeSettings) -> None:
        self.node = node
        self._given = {**given, "data.name": node.data}
        self._given.pop("data.dir", None)

    # Before the first round -----------------------------------------------------------

    def hello(self) -> Hello:
        """What the server must know of this device."""
        _, _, task = self._choose()
        data = self._data(task)
        self._check(data)
        return self._hello(task, data)

    def _hello(self, task: Task, data: Dataset) -> Hello:
        x, y = data.take(slice(1))
        return Hello(
            name=self.node.name,
            capacity=self.node.capacity,
            version=fedspu_version(),
            protocol=VERSION,
            task=task.name,
            x_shape=tuple(x.shape[1:]),
            x_dtype=dtype_name(x),
            y_shape=tuple(y.shape[1:]),
            y_dtype=dtype_name(y),
            num_outputs=data.num_outputs,
            num_examples=len(data.y),
        )

    def _choose(self) -> tuple[Settings, Any, Task]:
        return choose(self._given, None, None, None, None)

    def _data(self, task: Task) -> Dataset:
        return load_data(self.node.data, None, task)

    def _check(self, data: Dataset) -> None:
        """Refuse too few examples, and a folder that cannot be written."""
        if len(data.y) < MIN_EXAMPLES:
            raise DataError(
                f"{data.name}: {len(data.y)} examples; expected at least "
                f"{MIN_EXAMPLES}, to train, validate and test"
            )
        if self.node.folder is not None:
            try:
                self.node.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_whole(self.node.folder / "can-be-written", b"", private=True)
            except OSError as error:
                raise cannot_write(self.node.folder, error) from None

    # A message ------------------------------------------------------------------------

    def respond(self, content: Content) -> Answer | Missing:
        """The answer to a request, or why there is none."""
        seat = content.seat
        if seat is None:
            raise FedSPUError("a request without a seat; is the server another fedspu?")
        settings, method, task = self._choose()
        data = self._data(task)
        self._check(data)
        self._check_like(seat, self._hello(task, data))
        with self._alone(seat), one_thread():
            try:
                plan = self._plan(seat, settings, method, task, data)
            except ModelError as error:
                raise OtherModelError(
                    f"this device's model cannot be used: {error}"
                ) from error
            shelf = self._shelf(seat)
            examples = self._examples(plan, seat, data)
            client = Client(plan, examples, shelf, find_device(plan.settings.device))
            state = None
            if content.state is not None:
                state = unpack_state(plan, content.state)
            answer = client.respond(content.packet, state)
            _forget_old(shelf, seat.client)
        return answer

    def _check_like(self, seat: Seat, own: Hello) -> None:
        """Refuse a run that this device was not in as it is now."""
        differs = seat.like.differs(own)
        if not differs and own.capacity != seat.capacity:
            differs = f"its capacity is {own.capacity:g}, in this run {seat.capacity:g}"
        if differs:
            raise OtherDeviceError(f"{differs}; undo that, or wait for a new run")

    def _examples(self, plan: Plan, seat: Seat, data: Dataset) -> Examples:
        return own_data(plan, seat.client, data)

    # The plan -------------------------------------------------------------------------

    def _plan(
        self, seat: Seat, settings: Settings, method: Any, task: Task, data: Dataset
    ) -> Plan:
        settings = seated(settings, seat)
        kept = self._read(seat)
        if kept is None:
            sample = Sample(data.name, *data.take(slice(2)), seat.num_outputs)
            build = partial(models.build, settings.model, seat.num_outputs)
            plan = make_plan(settings, method, task, build, sample)
            plan = replace(plan, settings=with_kernels(plan, sample))
            text = describe_plan(plan, sample)
            self._write(seat, plan, text)
        else:
            text, initial, kernels = kept
            train = settings.train.model_copy(update={"kernels": kernels})
            settings = settings.model_copy(update={"train": train})
            where = self._folder(seat) or Path()
            plan = restore_plan(where, text, settings, method, task, None, initial)
            check_model(plan)
        check_table(text, seat)
        return replace(plan, capacities=capacities(seat))

    def _read(self, seat: Seat) -> tuple[str, dict[str, Tensor], str] | None:
        """The plan of this run that the device has kept."""
        folder = self._folder(seat)
        if folder is None or not (folder / DONE).exists():
            return None
        text, initial, found = read_run(folder)
        return text, initial, found.kernels

    def _write(self, seat: Seat, plan: Plan, text: str) -> None:
        folder = self._folder(seat)
        if folder is None:
            return
        content = {
            SETTINGS: plan.settings.to_toml().encode(),
            PLAN: text.encode(),
            INITIAL: save(plan.initial),
        }
        done = Done(
            seat=seat,
            kernels=plan.settings.train.kernels,
            files={name: Mark.of(bytes_) for name, bytes_ in content.items()},
        )
        content[DONE] = done.model_dump_json().encode()
        try:
            for name, bytes_ in content.items():
                write_whole(folder / name, bytes_, durable=True, private=True)
            sync_folder(folder)
        except OSError as error:
            raise cannot_write(folder, error) from None

    # Its folder -----------------------------------------------------------------------

    def _folder(self, seat: Seat) -> Path | None:
        return None if self.node.folder is None else self.node.folder / seat.run

    def _shelf(self, seat: Seat) -> Shelf:
        folder = self._folder(seat)
        if folder is None:
            raise StorageError(
                "node config: folder is not given; expected where the device keeps its "
                "personal model"
            )
        try:
            (folder / PERSONAL).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from None
        return Shelf(folder / PERSONAL, durable=True)

    def _alone(self, seat: Seat) -> AbstractContextManager[Any]:
        """Wait for another process of this device, which its SuperNode has lost."""
        folder = self._folder(seat)
        if folder is None:
            return nullcontext()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            held = lock(folder / LOCK, seconds=LOCK_SECONDS)
        except OSError as error:
            raise cannot_write(folder, error) from None
        if held is None:
            raise StorageError(f"{folder} is used by another process of this device")
        return held


SETTINGS, PLAN, INITIAL = "settings.toml", "plan.json", "initial.safetensors"
DONE, PERSONAL, LOCK = "done.json", "personal", ".lock"


class Done(Strict):
    """What is written last: who the device was at first, and what trains its model.

    ``files`` has a mark of every other file of the run, but not of its models.
    """

    seat: Seat
    kernels: Literal["auto", "native", "torch"]
    files: dict[str, Mark] = Field(default_factory=dict)  # older ones have none


def read_run(folder: Path) -> tuple[str, dict[str, Tensor], Done]:
    """What a device has kept of a run: the plan's text, w0, and who it is."""
    try:
        done = Done.model_validate_json(read_file(folder / DONE))
        content = {name: read_file(folder / name) for name in (PLAN, INITIAL)}
        for name, found in content.items():
            if done.files.get(name, Mark.of(found)) != Mark.of(found):
                raise ValueError(f"{name} is not what was written")
        return content[PLAN].decode(), load(content[INITIAL]), done
    except (ValueError, SafetensorError) as error:  # also of pydantic and of decode
        raise StorageError(
            f"{folder} is damaged ({first_line(error)}); remove {DONE} in it, and it "
            "is made anew"
        ) from None


class KeptRun:
    """A run as a device has kept it, for use on the device without any server."""

    def __init__(self, folder: Path, node: NodeSettings) -> None:
        self.folder, self.node = folder, node
        self._text, self._initial, self._done = read_run(folder)
        seat = self._done.seat
        self.client, self.num_outputs = seat.client, seat.num_outputs
        given = parse_toml(self._settings(), str(folder / SETTINGS))
        self._given = {**dict(flatten(given)), "data.name": node.data}
        self._shelf = Shelf(folder / PERSONAL)
        rounds = [t for client, t in self._shelf.names() if client == self.client]
        if not rounds:
            raise StorageError(f"{folder}: there is no model of this device here")
        self.round = max(rounds)

    def _settings(self) -> bytes:
        """The run's settings.toml; refuses one that was edited since."""
        content = read_file(self.folder / SETTINGS, MOST_BYTES)
        mark = self._done.files.get(SETTINGS)
        if mark is not None and mark != Mark.of(content):
            raise StorageError(
                f"{self.folder / SETTINGS} was edited or damaged since the run began; "
                "undo that"
            )
        return content

    @property
    def names_code(self) -> list[str]:
        """The settings that name code outside of fedspu."""
        names = ("model", "method.name", "task")
        places = (str(self._given.get(name)) for name in names)
        return [place for place in places if is_place(place)]

    def plan(self) -> Plan:
        """The run's plan, with kernels that can be used anywhere."""
        given = {**self._given, "train.kernels": "auto"}
        settings, method, task = choose(given, None, None, None, None)
        text, initial = self._text, self._initial
        plan = restore_plan(self.folder, text, settings, method, task, None, initial)
        return replace(plan, capacities=capacities(self._done.seat))

    def memory(self, plan: Plan) -> Memory:
        """What the device kept last; refuses a model that is not one of this plan."""
        memory, own = self._shelf.get(self.client, self.round), plan.initial
        if memory.own is not None and memory.own.active is not None:
            own = slim_state(own, plan.neurons, memory.own.active)
        forms = {name: (t.shape, t.dtype) for name, t in own.items()}
        kept = memory.own.state if memory.own is not None else {}
        if forms != {name: (t.shape, t.dtype) for name, t in kept.items()}:
            file = self._shelf.path(self.client, self.round)
            raise StorageError(f"{file}: is not a whole model of this run")
        return memory

    def examples(self, plan: Plan) -> OwnData:
        """The device's own examples, divided as in the run."""
        data = load_data(self.node.data, None, plan.task)
        return own_data(plan, self.client, data)


def own_data(plan: Plan, client: int, data: Dataset) -> OwnData:
    """A device's examples, divided into its three parts."""
    labels = strata(data, plan.task)
    rng = stream(plan.settings.seed, "split", client=client)
    kind = plan.settings.data.split
    return OwnData(data, split(np.arange(len(labels)), labels, kind, rng))


def _forget_old(shelf: Shelf, client: int) -> None:
    rounds = sorted(t for k, t in shelf.names() if k == client)
    for t in rounds[:-KEPT]:
        shelf.drop(client, t)


def cannot_write(folder: Path, error: OSError) -> StorageError:
    """A folder cannot be written, and why."""
    if error.errno == errno.ENOSPC:
        why = "the disk is full: free some space, and this device takes part again"
    else:
        why = error.strerror or str(error)
    return StorageError(f"{folder}: cannot write ({why})")


# What both sides compute --------------------------------------------------------------


def seated(settings: Settings, seat: Seat) -> Settings:
    """The settings with as many clients as the run has now."""
    clients = settings.clients.model_copy(
        update={
            "number": seat.num_clients,
            "per_round": min(settings.clients.per_round, seat.num_clients),
            "capacities": seat.capacities,
        }
    )
    return settings.model_copy(update={"clients": clients})


def capacities(seat: Seat) -> tuple[Any, ...]:
    """Every client's p: the device's own, and the others' in no order."""
    own = as_fraction(seat.capacity)
    others = [p for p in map(as_fraction, seat.capacities) if p != own]
    number = seat.num_clients - 1
    filled = [*others, *[own] * number][:number]
    return (*filled[: seat.client], own, *filled[seat.client :])


def check_table(text: str, seat: Seat) -> None:
    """Refuse a model whose neurons are not those of the server's model."""
    if digest(text) != seat.table:
        raise OtherModelError(
            "this device's model has other neurons than the server's: it is another "
            "model, or another version of fedspu or PyTorch"
        )


def check_model(plan: Plan) -> None:
    """Refuse a model that is no longer the one with which this run began."""
    built = {name: w.shape for name, w in plan.build().state_dict().items()}
    if any(built.get(name) != w.shape for name, w in plan.initial.items()):
        raise OtherModelError(
            "this device builds another model than at its first turn in this run: undo "
            "that change, or wait for a new run"
        )


class OtherDeviceError(FedSPUError):
    """The device is no longer what it was in this run; shows no example."""


class OtherModelError(FedSPUError):
    """Server and device do not have the same model."""


def digest(plan_text: str) -> str:
    """A short text that tells tables of neurons apart."""
    found = json.loads(plan_text)
    tables = {name: found.get(name) for name in ("neurons", "own_neurons")}
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:16]


def dtype_name(tensor: Tensor) -> str:
    """The name of a tensor's type, as in ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")
