"""Every decoder of bytes from outside, as a function that only a bug makes fail.

A target takes any bytes. It returns if they were read, or refused by the one error
class of their kind in one line; anything else is a finding. Where a checksum would
refuse nearly every change, the target also has a form that puts the right one in.
"""

import io
import json
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load, save

from fedspu.data.dataset import with_targets
from fedspu.data.formats import idx, image, sound, tar
from fedspu.data.formats.zip import DAMAGED
from fedspu.data.own import arrays
from fedspu.data.sets import cifar10
from fedspu.errors import (
    DataError,
    FedSPUError,
    ModelError,
    SettingsError,
    StorageError,
)
from fedspu.exports.as_safetensors import load_exported
from fedspu.federation.checks import read_reply, read_request
from fedspu.federation.messages import (
    JudgeRequest,
    Packet,
    Request,
    TrainRequest,
)
from fedspu.federation.plan import Plan
from fedspu.federation.storage.saved_index import (
    dump_index,
    load_index,
    load_journal,
)
from fedspu.methods.method import Offer
from fedspu.neurons.choose import choose_random
from fedspu.random_streams import generator
from fedspu.resolve import resolve
from fedspu.settings_text import flatten, parse_override, parse_toml
from fedspu.tasks import find_task
from tests.oracles.federation import mlp, plan_for

CORPUS = Path(__file__).parent / "corpus"

Target = Callable[[bytes], None]


REFUSED: list[str] = []
"""Why the last input was refused; empty if it was read."""


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Take these errors for an answer, if they say it in one line."""
    REFUSED.clear()
    try:
        yield
    except kinds as error:
        REFUSED.append(str(error))
        if isinstance(error, FedSPUError) and len(REFUSED[0].splitlines()) != 1:
            raise AssertionError(f"not one line: {error}") from error


# Messages ----------------------------------------------------------------------------


@cache
def plan() -> Plan:
    return plan_for(mlp)


@cache
def train_request() -> TrainRequest:
    active = choose_random(plan().neurons, plan().capacity(0), generator(bytes(16)))
    return TrainRequest(1, 0, 0, Offer(active), {}, None)


def packet_of(content: bytes) -> Packet:
    """A packet from the lengths of its first three parts, then the parts."""
    header, positions, initial = struct.unpack_from("<BHH", content.ljust(5, b"\0"))
    rest, parts = content[5:], []
    for length in (header, positions, initial):
        parts.append(rest[:length])
        rest = rest[length:]
    return Packet(parts[0], parts[1], rest, parts[2])


def bytes_of(packet: Packet) -> bytes:
    lengths = len(packet.header), len(packet.positions), len(packet.initial)
    head = struct.pack("<BHH", *lengths)
    return head + packet.header + packet.positions + packet.initial + packet.values


def wire(content: bytes) -> None:
    packet = packet_of(content[1:])
    requests: tuple[Request, ...] = (
        train_request(),
        JudgeRequest(1, 0, 0, "personal"),
    )
    with refusing(ModelError):
        if content[:1] == b"q":
            read_request(plan(), packet)
            return
        read_reply(plan(), requests[content[:1] == b"j"], packet)


# Settings ----------------------------------------------------------------------------


def settings(content: bytes) -> None:
    with refusing(SettingsError, ModelError):  # the second: no such model
        if content[:1] == b"=":  # one value of the command line
            name, value = parse_override(content[1:].decode(errors="replace"))
            given: dict[str, Any] = {name: value}
        else:
            given = parse_toml(content, "a.toml")
        flat = dict(flatten(given))
        # Such a value is the place of the user's own code: nothing is wrong with it.
        if not any(":" in str(flat.get(name)) for name in ("task", "method.name")):
            resolve({"model": "mlp", **flat}).to_toml()


# Data --------------------------------------------------------------------------------


def npz(content: bytes) -> None:
    if content[:1] == b"x":  # an array, and its targets, in a new archive
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as made:
            first, _, second = content[1:].partition(b"\nnext\n")
            made.writestr("x.npy", first)
            made.writestr("y.npy", second)
        content = archive.getvalue()
    with refusing(DataError):
        dataset = arrays.decode(io.BytesIO(content), "a.npz")
        for task in ("classification", "regression", "language-model", "segmentation"):
            with suppress(DataError):  # each task takes targets of its own form
                learned = find_task(task)
                found = with_targets(dataset, learned)
                if learned.strata is not None:
                    learned.strata(found.y)


def idx_file(content: bytes) -> None:
    axes = 1 if content[:1] == b"1" else 3
    content = content[1:]
    is_packed = content[:2] == b"\x1f\x8b"
    with refusing(DataError, *DAMAGED):  # which idx.read turns into a DataError
        name = Path("a.gz" if is_packed else "a")
        idx.decode(io.BytesIO(content), len(content), name, axes)


def cifar_binary(content: bytes) -> None:
    with refusing(DataError):
        cifar10.decode(content, PurePosixPath("data_batch_1.bin"), 1)


def cifar_pickle(content: bytes) -> None:
    with refusing(DataError):
        cifar10.decode(content, PurePosixPath("data_batch_1"), 1)


def tar_file(content: bytes) -> None:
    kind, content = content[:1], content[1:]
    if kind == b"f":
        content = _with_checksums(content)
    is_packed = content[:2] == b"\x1f\x8b"

    def wanted(path: PurePosixPath) -> int:
        return 4096 if path.suffix in (".bin", ".wav") else 0

    with refusing(DataError):
        opened = io.BytesIO(content)
        for _ in tar.members(opened, "a.tar.gz", 2**20, wanted, is_packed):
            pass


def _with_checksums(content: bytes) -> bytes:
    """Every block as a header with the right checksum."""
    blocks = []
    for start in range(0, len(content), tar.BLOCK):
        block = content[start : start + tar.BLOCK]
        if any(block):
            total = sum(block[:148]) + sum(block[156:]) + 8 * 32
            block = block[:148] + b"%06o\0 " % total + block[156:]
        blocks.append(block)
    return b"".join(blocks)


def sound_file(content: bytes) -> None:
    name = "a.flac" if content[:4] == b"fLaC" else "a.wav"
    with refusing(DataError):
        sound.decode(content, name, 1.0)


def image_file(content: bytes) -> None:
    with refusing(DataError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about some damage
        image.decode(content, "a.png", (4, 4))


# Exported models ---------------------------------------------------------------------


def exported(content: bytes) -> None:
    if content[:1] == b"f":  # facts of the slim model in valid-1, as JSON
        try:
            facts = {str(n): str(v) for n, v in json.loads(content[1:]).items()}
        except (ValueError, AttributeError, RecursionError):
            return
        content = save(load((CORPUS / "exported" / "valid-1").read_bytes()), facts)
    with refusing(FedSPUError), TemporaryDirectory() as folder:
        file = Path(folder) / "a.safetensors"
        file.write_bytes(content)
        load_exported(file)


# The run folder ----------------------------------------------------------------------


def index(content: bytes) -> None:
    if content[:1] == b"f":  # an index without its hash
        text = content[1:]
        digest = sha256(text).hexdigest().encode()
        content = b'{"index": ' + text + b', "sha256": "' + digest + b'"}\n'
    with refusing(StorageError):
        found = load_index(content, "a.json")
        assert load_index(dump_index(found), "a.json") == found


def journal(content: bytes) -> None:
    with refusing(StorageError):
        load_journal(content, "a.jsonl")


TARGETS: dict[str, Target] = {
    "wire": wire,
    "settings": settings,
    "npz": npz,
    "idx": idx_file,
    "cifar_binary": cifar_binary,
    "cifar_pickle": cifar_pickle,
    "tar": tar_file,
    "sound": sound_file,
    "image": image_file,
    "exported": exported,
    "index": index,
    "journal": journal,
}

torch.set_num_threads(1)
