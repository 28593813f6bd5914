"""What of a run folder is whole, what is not, and what can still be used."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from fedspu.errors import DamagedError, StorageError
from fedspu.federation.plan_file import read_settings
from fedspu.federation.storage.finding import check_is_run
from fedspu.federation.storage.own_files import LOCK
from fedspu.federation.storage.saved_index import (
    RECORDS,
    SUMMARY,
    saved_rounds,
)
from fedspu.federation.storage.saved_run import SavedRun
from fedspu.files import lock


@dataclass(frozen=True)
class CheckedSave:
    """One save: what is damaged in it, and which clients' models are lost."""

    round: int
    damage: list[str] = field(default_factory=list)
    lost_clients: dict[int, str] = field(default_factory=dict)
    num_clients: int = 0  # that took part so far

    @property
    def is_whole(self) -> bool:
        """Whether the run can be resumed from it."""
        return not self.damage and not self.lost_clients


@dataclass(frozen=True)
class CheckedRun:
    """A run folder: its saves, the last first, and what is wrong with its settings."""

    path: Path
    saves: list[CheckedSave]
    settings: str = ""
    in_the_way: str = ""
    is_finished: bool = False
    names_code: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether nothing at all is damaged."""
        is_clear = not self.settings and not self.in_the_way
        return is_clear and all(save.is_whole for save in self.saves)

    @property
    def advice(self) -> str:
        """What can be done now."""
        whole = [save.round for save in self.saves if save.is_whole]
        trust = " --trust" if self.names_code else ""
        resume = f"`fedspu run --resume {self.path}{trust}`"
        if whole and (self.settings or self.in_the_way):
            return f"Fix that first; then {resume} resumes after round {whole[0]}."
        if whole and self.is_finished and whole[0] == self.saves[0].round:
            return "The run is finished, and its models can be used."
        if whole:
            return f"{resume} resumes after round {whole[0]}."
        usable = [save for save in self.saves if not save.damage]
        if not usable:
            return "Nothing of the checkpoint can be used; records may be readable."
        best = usable[0]
        left = best.num_clients - len(best.lost_clients)
        return (
            f"The run cannot be resumed, but the models of {left} of "
            f"{best.num_clients} clients can be loaded with fedspu.load_personal."
        )


def check_run(path: Path) -> CheckedRun:
    """Read and check every file of a run folder; nothing is changed."""
    check_is_run(path)
    try:
        if (path / LOCK).exists():
            held = lock(path / LOCK)
            if held is None:
                raise StorageError(
                    f"{path} is being written by another run; check it when that has "
                    "ended"
                )
            held.close()
    except OSError:  # it cannot be written, so nobody is writing it
        pass
    saves = [_check_save(path, t) for t in saved_rounds(path)]
    settings, is_finished, names_code = "", False, False
    for save in saves:
        try:
            found = SavedRun(path, save.round)
        except DamagedError:
            continue
        settings, is_finished = _check_settings(found), found.is_finished
        names_code = bool(found.names_code)
        break
    return CheckedRun(path, saves, settings, _in_the_way(path), is_finished, names_code)


def _check_save(path: Path, t: int) -> CheckedSave:
    try:
        saved = SavedRun(path, t)
    except DamagedError as problem:
        return CheckedSave(t, [str(problem)])
    damage = list(dict.fromkeys(map(str, saved.problems_of_the_server())))
    lost = {k: str(why) for k, why in saved.problems_of_clients().items()}
    try:
        num_clients = len(saved.memories)
    except DamagedError:
        num_clients = 0
    return CheckedSave(t, damage, lost, num_clients)


def _check_settings(saved: SavedRun) -> str:
    try:
        read_settings(saved)
    except StorageError as problem:
        return str(problem)
    return ""


def _in_the_way(path: Path) -> str:
    """Why a folder that is whole can still not be resumed; empty if it can."""
    file = path / LOCK
    if os.path.lexists(file) and (file.is_symlink() or not file.is_file()):
        return f"{file} is not an ordinary file; remove it"
    for name in RECORDS:
        if (path / name).exists() and (path / name).stat().st_nlink > 1:
            return f"{path / name} has other names (hard links); copy it instead"
    if (path / SUMMARY).is_dir():
        return f"{path / SUMMARY} is a folder; remove it"
    if not os.access(path, os.W_OK):
        return f"{path} cannot be written; copy it, or change its mode"
    return ""
