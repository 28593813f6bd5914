"""The user's own files: a folder per class, with images or with sounds in it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedspu.data import logmel, pictures, sound, speech
from fedspu.data.cache import Arrays, cache_place, cached
from fedspu.data.dataset import Dataset
from fedspu.data.listing import Listing, list_classes, read, shown


def load_images(folder: Path) -> Dataset:
    """The images of a folder, as bytes; they must be of one size.

    Behind the folder may stand a size, as in FOLDER@64x48: all are stretched to it.
    """
    folder, size = pictures.part_size(folder)
    listing = list_classes(folder, pictures.SUFFIXES, "images")
    recipe = f"{pictures.RECIPE}, {size}"

    def build() -> Arrays:
        names = [str(file) for file in listing.files]
        images = [
            pictures.decode(read(file), name, size)
            for file, name in zip(listing.files, names, strict=True)
        ]
        return {"x": pictures.stack(images, names)}

    arrays = cached("images", recipe, listing.files, build)
    return replace(
        _dataset(folder, listing, arrays),
        cache=cache_place("images", recipe, listing.files),
    )


def load_sounds(folder: Path) -> Dataset:
    """The sounds of a folder as spectrograms of bytes, as in ``speech``."""
    listing = list_classes(folder, sound.FORMATS, "WAV or FLAC files")

    def build() -> Arrays:
        files = listing.files
        spectra = [logmel.read_log_mel(read(file), str(file)) for file in files]
        return {"x": np.stack(spectra)}

    arrays = cached("sounds", logmel.RECIPE, listing.files, build)
    return replace(
        _dataset(folder, listing, arrays),
        defaults=speech.DEFAULTS,
        scaling=logmel.SCALING,
        cache=cache_place("sounds", logmel.RECIPE, listing.files),
    )


def _dataset(folder: Path, listing: Listing, arrays: Arrays) -> Dataset:
    return Dataset(
        name=shown(folder),
        x=torch.from_numpy(arrays["x"]),
        y=torch.from_numpy(listing.labels),
        num_classes=len(listing.classes),
        classes=listing.classes,
        sources=listing.files,
        notes=listing.notes,
    )
