"""Image files as pixels, read by Pillow (the extra ``images``)."""

import re
from io import BytesIO
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from fedspu.data import bounds
from fedspu.data.files import reason, shown
from fedspu.errors import DataError, how_to_install

RECIPE = "images, 1"
"""To be changed whenever ``decode`` gives other pixels: caches depend on it."""

SUFFIXES = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
)

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The formats of these files; Pillow knows more, and starts a program for one."""

Pixels = NDArray[np.uint8]
Size = tuple[int, int]


def part_size(folder: Path) -> tuple[Path, Size | None]:
    """The folder and the size in FOLDER@64x48; no size if none is given."""
    given = re.fullmatch(r"(.+)@([1-9]\d*)x([1-9]\d*)", str(folder), re.DOTALL)
    if given is None:
        return folder, None
    return Path(given[1]), (int(given[2]), int(given[3]))


def decode(content: bytes, name: str, size: Size | None = None) -> Pixels:
    """The image in the file ``name``: (1, height, width) if grey, else (3, ...).

    It is turned upright if the camera recorded how it was held, transparency is
    dropped, and with ``size`` it is stretched to that width and height.
    """
    library = _library()
    if size is not None and size[0] * size[1] > bounds.IMAGE_PIXELS:
        raise DataError(
            f"{size[0]}x{size[1]} is the size asked for; expected at most "
            f"{bounds.IMAGE_PIXELS:,} pixels"
        )
    try:
        with library.Image.open(BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > bounds.IMAGE_PIXELS:
                raise ValueError(
                    f"{image.width}x{image.height} pixels could be a decompression "
                    f"bomb; at most {bounds.IMAGE_PIXELS:,} are read"
                )
            kind, depth = image.format, image.mode
            num_frames = getattr(image, "n_frames", 1)
            upright = library.ImageOps.exif_transpose(image)
            mode = "L" if depth in ("1", "L", "LA") else "RGB"
            plain = upright.convert(mode)
    # Damage raises nearly anything, depending on the format and the place.
    except Exception as error:
        raise DataError(
            f"{shown(name)} cannot be read ({_reason(error)}); expected a whole image "
            "file; replace or remove it"
        ) from None
    if depth.startswith(("I", "F")):
        raise DataError(
            f"{shown(name)} has pixels of more than 8 bits ({depth}); expected 8 bits "
            "per channel; convert it"
        )
    if num_frames > 1 and kind != "MPO":  # MPO: a photograph with a preview
        raise DataError(
            f"{shown(name)} holds {num_frames} images; expected one; save each of them "
            "as a file"
        )
    if size is not None:
        plain = plain.resize(size, library.Image.Resampling.BILINEAR)
    pixels = np.asarray(plain)
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def stack(images: list[Pixels], names: list[str]) -> Pixels:
    """Images of one size as one array; grey ones become RGB if any other is."""
    for image, name in zip(images, names, strict=True):
        if image.shape[1:] != images[0].shape[1:]:
            raise DataError(
                f"{shown(names[0])} is {_size(images[0])}, {shown(name)} is "
                f"{_size(image)} pixels; expected images of one size; resize them, or "
                f"put a size after the folder, as in FOLDER@{_size(images[0])}"
            )
    num_channels = max(len(image) for image in images)
    size = len(images) * num_channels * images[0][0].size
    if size > bounds.half_of_memory():
        raise DataError(
            f"{len(images):,} images like {shown(names[0])} take {size:,} bytes; "
            f"expected at most {bounds.half_of_memory():,}, half of this machine's "
            "memory; put a smaller size after the folder, as in FOLDER@64x64"
        )
    return np.stack([np.repeat(i, num_channels // len(i), axis=0) for i in images])


def _size(image: Pixels) -> str:
    return f"{image.shape[2]}x{image.shape[1]}"


def _reason(error: Exception) -> str:
    if type(error).__name__ == "UnidentifiedImageError":
        return "no known image format"  # Pillow's own words show a memory address
    return reason(error)


def _library() -> ModuleType:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        raise DataError(
            "reading images needs the Pillow library; install it with: "
            f"{how_to_install('images')}"
        ) from None
    return PIL
