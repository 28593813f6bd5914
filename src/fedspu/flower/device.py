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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fedspu import models
from fedspu.data import load as load_data
from fedspu.data.dataset import Dataset
from fedspu.data.splits import MIN_EXAMPLES
from fedspu.engines.flower.wire import (
    Content,
    Hello,
    Seat,
    fedspu_version,
)
from fedspu.engines.machine import find_device, one_thread
from fedspu.errors import DataError, FedSPUError, ModelError, StorageError
from fedspu.federation.client import Client, Examples
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Answer, Missing
from fedspu.federation.messages import VERSION, unpack_state
from fedspu.federation.plan import Plan, Sample, make_plan
from fedspu.federation.plan_file import describe_plan, restore_plan
from fedspu.files import Mark, lock, sync_folder, write_whole
from fedspu.flower.config import NodeSettings, for_any_number
from fedspu.flower.kept_run import (
    DONE,
    INITIAL,
    LOCK,
    PERSONAL,
    PLAN,
    SETTINGS,
    Done,
    capacities,
    own_data,
    read_run,
)
from fedspu.prepare import choose, with_kernels
from fedspu.settings import Settings
from fedspu.tasks.task import Task

KEPT = 3
"""How many memories a device keeps. A server may go back by one save, see the shelf."""

LOCK_SECONDS = 60.0
"""How long a process of a device waits for another one of the same device."""


class Device:
    """Answers a server's messages; ``given`` are the run's settings, by dotted name."""

    def __init__(self, given: Mapping[str, Any], node: NodeSettings) -> None:
        self.node = node
        self._given = {**for_any_number(given), "data.name": node.data}
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
            check_alike(text, plan, seat)  # before it is kept: it may be mended
            self._write(seat, plan, text)
        else:
            text, initial, kernels = kept
            train = settings.train.model_copy(update={"kernels": kernels})
            settings = settings.model_copy(update={"train": train})
            where = self._folder(seat) or Path()
            plan = restore_plan(where, text, settings, method, task, None, initial)
            check_model(plan)
            check_alike(text, plan, seat)
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


def check_alike(text: str, plan: Plan, seat: Seat) -> None:
    """Refuse a model whose neurons or frozen values are not those of the server's."""
    if digest(text) != seat.table:
        raise OtherModelError(
            "this device's model has other neurons than the server's: it is another "
            "model, or another version of fedspu or PyTorch"
        )
    if frozen_digest(plan) != seat.frozen:
        raise OtherModelError(
            "this device's model has other values than the server's in parameters that "
            "never train (requires_grad=False): use the same file of weights"
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


def frozen_digest(plan: Plan) -> str:
    """A short text that tells values that never train apart; empty without any."""
    if not plan.untrained:
        return ""
    values = save({name: plan.initial[name] for name in plan.untrained})
    return hashlib.sha256(values).hexdigest()[:16]


def dtype_name(tensor: Tensor) -> str:
    """The name of a tensor's type, as in ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")
