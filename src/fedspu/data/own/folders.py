"""The user's own files: a folder per class, with images or with sounds in it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedspu.data import bounds
from fedspu.data.cache import Arrays, cache_place, cached
from fedspu.data.dataset import Dataset
from fedspu.data.files import read, shown
from fedspu.data.formats import image, log_mel, sound
from fedspu.data.formats.class_folders import Listing, list_classes


def load_images(folder: Path) -> Dataset:
    """The images of a folder, as bytes; they must be of one size.

    A size may follow the folder, as in FOLDER@64x48: all images are stretched to it.
    """
    folder, size = image.part_size(folder)
    listing = list_classes(folder, image.SUFFIXES, "images")
    recipe = f"{image.RECIPE}, {size}"

    def build() -> Arrays:
        names = [str(file) for file in listing.files]
        images = [
            image.decode(read(file, bounds.IMAGE_FILE), name, size)
            for file, name in zip(listing.files, names, strict=True)
        ]
        return {"x": image.stack(images, names)}

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
        spectra = [
            log_mel.read_log_mel(read(file, bounds.SOUND_FILE), str(file))
            for file in files
        ]
        return {"x": np.stack(spectra)}

    arrays = cached("sounds", log_mel.RECIPE, listing.files, build)
    return replace(
        _dataset(folder, listing, arrays),
        scaling=log_mel.SCALING,
        cache=cache_place("sounds", log_mel.RECIPE, listing.files),
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
