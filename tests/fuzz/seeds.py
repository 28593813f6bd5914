"""Writes the valid inputs of every target: ``python -m tests.fuzz.seeds``."""

import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import torch as tensors_file

from fedspu import Settings, models
from fedspu.federation.messages import (
    JudgeReply,
    JudgeRequest,
    TrainReply,
    TrainRequest,
    pack_reply,
    pack_request,
)
from fedspu.federation.storage.saved_index import (
    INITIAL,
    PLAN,
    RECORDS,
    SETTINGS,
    VERSION,
    Index,
    JournalLine,
    dump_index,
)
from fedspu.federation.values import Values
from fedspu.files import Mark
from fedspu.neurons.blocks import extract
from fedspu.neurons.mapping import map_neurons
from fedspu.neurons.slim import slim_model
from tests.data import files
from tests.data.clips import sound_file, tone
from tests.fuzz.targets import bytes_of, plan, train_request

CORPUS = Path(__file__).parent / "corpus"


def wire() -> Iterator[bytes]:
    offered = train_request()
    assert offered.offer is not None
    active = offered.offer.active
    payload = extract(plan().initial, plan().travelling(active))
    asked = TrainRequest(1, 0, 0, offered.offer, payload, plan().initial)
    yield b"q" + bytes_of(pack_request(plan(), asked))
    judged = JudgeRequest(1, 0, 0, "global")
    yield b"q" + bytes_of(pack_request(plan(), judged))
    trained = TrainReply(1, 0, active, payload, 9, 0.5, None, False)
    yield b"r" + bytes_of(pack_reply(plan(), offered, trained))
    scored = JudgeReply(1, 0, 9, 0.5, 0.9, 0.8)
    yield b"j" + bytes_of(pack_reply(plan(), judged, scored))


def settings() -> Iterator[bytes]:
    yield Settings(model="mlp").to_toml().encode()
    yield b'rounds = 3\ntask = "regression"\n[method]\nname = "ditto"\npull = 0.5\n'
    yield b"clients.number = 4\nclients.per_round = 2\nclients.capacities = [0.5, 1]\n"
    yield b"=train.lr=0.05"
    yield b"=clients.capacities=[.2, .4]"


def npz() -> Iterator[bytes]:
    pixels = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    labels = np.array([0, 1, 2, 1])
    for save in (np.savez, np.savez_compressed):
        archive = io.BytesIO()
        save(archive, x=pixels, y=labels, client=np.array(["a", "b", "a", "b"]))
        yield archive.getvalue()
    tokens = np.array([[3, 1, 4], [1, 5, 9]], dtype=">u2")
    floats = np.asfortranarray(np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3))
    for x, y in ((pixels, labels), (tokens, tokens), (floats, floats[:, 0])):
        yield b"x" + b"\nnext\n".join(_npy(array) for array in (x, y))


def _npy(array: NDArray[Any]) -> bytes:
    opened = io.BytesIO()
    np.save(opened, array)
    return opened.getvalue()


def idx() -> Iterator[bytes]:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    for content in (files.idx(array), gzip.compress(files.idx(array), mtime=0)):
        yield b"3" + content
    yield b"1" + files.idx(array.reshape(-1)[:6])


def cifar_binary() -> Iterator[bytes]:
    yield files.records([6]).tobytes()


def cifar_pickle() -> Iterator[bytes]:
    yield files.python2_batch([6])
    yield files.python3_batch([6])


def tar() -> Iterator[bytes]:
    opened = io.BytesIO()
    with tarfile.open(fileobj=opened, mode="w", format=tarfile.USTAR_FORMAT) as made:
        for name in ("a/one.bin", "a/two.wav", "a/readme.txt"):
            member = tarfile.TarInfo(name)
            member.size = 20
            made.addfile(member, io.BytesIO(bytes(range(20))))
    plain = opened.getvalue()[: 8 * 512]
    yield b"p" + plain
    yield b"f" + plain
    yield b"p" + gzip.compress(plain, mtime=0)


def sound() -> Iterator[bytes]:
    short = tone(440)[:200]
    yield sound_file(short)
    yield sound_file(short, format="FLAC")


def image() -> Iterator[bytes]:
    from PIL import Image

    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    for kind in ("PNG", "BMP", "GIF", "JPEG", "TIFF", "WEBP", "PPM"):
        opened = io.BytesIO()
        Image.fromarray(pixels).save(opened, format=kind)
        yield opened.getvalue()


def exported() -> Iterator[bytes]:
    """A whole model, a slim one, and the facts of the slim one."""
    facts = {"fedspu": "0.1.0", "model": "digits", "num_outputs": "3"}
    facts |= {"input_shape": "1,8,8", "input_dtype": "float32"}
    model = models.build("digits", 3)
    yield tensors_file.save(model.state_dict(), facts)
    neurons = map_neurons(model, torch.zeros(2, 1, 8, 8))
    kept = {group.name: [0, 1] for group in neurons.groups}
    active = {name: torch.tensor(indices) for name, indices in kept.items()}
    facts["kept"] = json.dumps(kept)
    yield tensors_file.save(slim_model(model, neurons, active).state_dict(), facts)
    yield b"f" + json.dumps(facts).encode()


def index() -> Iterator[bytes]:
    mark = Mark.of(b"hello")
    found = Index(
        version=VERSION,
        round=3,
        settings={"seed": 0, "train": {"lr": 0.1}},
        data="(6, 1, 4, 4) torch.float32 0123456789abcdef",
        files=dict.fromkeys((SETTINGS, PLAN, INITIAL), mark),
        records=dict.fromkeys(RECORDS, mark),
        global_state=mark,
        extra=None,
        global_score=Values(0.5, 0.25),
    )
    content = dump_index(found)
    yield content
    yield b"f" + found.model_dump_json().encode()


def journal() -> Iterator[bytes]:
    lines = [
        JournalLine(
            round=t,
            memories={t: Mark.of(b"hello")},
            num_examples={t: 9},
            stopped=[t],
            scores={t: Values(0.5, 0.25)},
            kept={t: {"fc": [0, 2]}},
        )
        for t in range(2)
    ]
    yield b"".join(line.model_dump_json().encode() + b"\n" for line in lines)


SEEDS = {
    made.__name__: made
    for made in (wire, settings, npz, idx, cifar_binary, cifar_pickle, tar, sound)
} | {"image": image, "exported": exported, "index": index, "journal": journal}


def main() -> None:
    torch.manual_seed(0)
    for target, seeds in SEEDS.items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for number, content in enumerate(seeds()):
            (folder / f"valid-{number}").write_bytes(content)


if __name__ == "__main__":
    main()
