"""What of a run folder is whole, what is not, and what can still be used."""

from dataclasses import dataclass, field
from pathlib import Path

from fedspu.errors import DamagedError, SettingsError, StorageError
from fedspu.federation.plan_file import check_settings
from fedspu.federation.storage.own_files import LOCK
from fedspu.federation.storage.saved_index import (
    SETTINGS,
    check_is_run,
    saved_rounds,
)
from fedspu.federation.storage.saved_run import SavedRun
from fedspu.files import lock
from fedspu.settings_text import read_toml


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
    is_finished: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether nothing at all is damaged."""
        return not self.settings and all(save.is_whole for save in self.saves)

    @property
    def advice(self) -> str:
        """What can be done now."""
        whole = [save.round for save in self.saves if save.is_whole]
        resume = f"`fedspu run --resume {self.path}`"
        if self.settings:
            return f"Undo the change, or delete {SETTINGS}; then {resume} goes on."
        if whole and self.is_finished and whole[0] == self.saves[0].round:
            return "The run is finished, and its models can be used."
        if whole:
            return f"{resume} goes on from round {whole[0]}."
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
        held = lock(path / LOCK)
        if held is None:
            raise StorageError(
                f"{path} is being written by another run; check it when that has ended"
            )
        held.close()
    except OSError:  # it cannot be written, so nobody is writing it
        pass
    saves = [_check_save(path, t) for t in saved_rounds(path)]
    settings, is_finished = "", False
    for save in saves:
        try:
            found = SavedRun(path, save.round)
        except DamagedError:
            continue
        settings, is_finished = _check_settings(found), found.is_finished
        break
    return CheckedRun(path, saves, settings, is_finished)


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
    file = saved.path / SETTINGS
    try:
        check_settings(saved.path, saved.index.settings, read_toml(file))
    except (SettingsError, StorageError) as problem:
        return str(problem)
    return ""
