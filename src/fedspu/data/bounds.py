"""The most that a reader of data takes from a file, all in one place.

Every reader compares sizes with these before it takes memory, and refuses what is
larger with a DataError. ``docs/security.md`` has them as a table.
"""

import os

MIB = 2**20
GIB = 2**30

DEFLATE = 1032
"""Deflate (zip, gzip) makes nothing more than this many times smaller."""

# Published data sets.
IDX_EXAMPLES = 1_000_000  # EMNIST has 697,932 in one file
CIFAR_ARCHIVE = GIB  # unpacked; the official ones have 184 and 186 MB
PICKLE_BYTES = 6_400  # for each image; Python 3 writes up to two for each of 3,072
PICKLE_STEPS = 10  # for each image; about four are usual
PICKLE_REST = 2_000  # steps and bytes besides
SPEECH_ARCHIVE = 16 * GIB  # unpacked; the official one has 3.8 GB
MEMBERS = 200_000  # of an archive; the official one of speech has 105,900
DIRECTORY = MIB  # the list of what is in a zip archive
EXTENSION = 64 * 2**10  # the notes of a tar archive about one member

# The user's own files.
SOUND_FILE = 64 * MIB
SOUND_CHANNELS = 16
IMAGE_FILE = 64 * MIB
IMAGE_PIXELS = 2**26
CACHE_CONTENTS = MIB
HEADER = 10_000  # of an array in an .npz file

# What comes out.
CELLS = 20_000_000  # clients times classes, where a table has a cell for each


def half_of_memory() -> int:
    """Half of this machine's memory: the most for the examples of one data set."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):  # unknown on this system
        return 8 * GIB
