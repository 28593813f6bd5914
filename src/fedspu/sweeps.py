"""Many runs and one table of them: what ``fedspu compare`` calls."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedspu.errors import DamagedError, SettingsError, StorageError
from fedspu.federation.plan import check_choices
from fedspu.federation.storage.own_files import is_free
from fedspu.federation.storage.saved_index import check_is_run, saved_rounds
from fedspu.federation.storage.saved_run import SavedRun, last_whole
from fedspu.files import write_whole
from fedspu.methods import make_method
from fedspu.reports.tables import compare_rows, markdown
from fedspu.resolve import resolve
from fedspu.runs import Watch, resume, simulate
from fedspu.settings import SAME_BITS, Settings
from fedspu.settings_text import flatten, one_line, parse_override
from fedspu.tasks import find_task


@dataclass(frozen=True)
class Cell:
    """One run of a comparison.

    ``method`` is a name; a reading or options may follow, each after an @:
    ``fjord@original``, ``fedavg@finetune=5``, ``fjord@original@distillation=true``.
    """

    method: str
    alpha: float
    seed: int

    @property
    def name(self) -> str:
        """Its folder's name."""
        alpha = repr(self.alpha).removesuffix(".0")
        method = re.sub(r"[^\w.]+", "-", self.method)
        return f"{method}-alpha-{alpha}-seed-{self.seed}"

    def settings(self) -> dict[str, Any]:
        """What it sets, by dotted name."""
        name, *options = self.method.split("@")
        chosen: dict[str, Any] = {"method.name": name}
        for option in options:
            if option in ("paper", "original"):
                chosen["method.reading"] = option
            elif "=" in option:
                key, value = parse_override(option)
                chosen[f"method.{key}"] = value
            else:
                raise SettingsError(
                    f"{self.method}: expected a reading (paper, original) or "
                    f"option=value after the @, like fedavg@finetune=5; got {option!r}"
                )
        return {**chosen, "data.alpha": self.alpha, "seed": self.seed}


def compare(
    given: Mapping[str, Any],
    methods: Sequence[str],
    alphas: Sequence[float],
    seeds: Sequence[int],
    out: Path,
    begin: Callable[[Cell, bool], Watch | None] = lambda cell, is_done: None,
) -> list[dict[str, Any]]:
    """Play the runs that are missing, one folder each; return the summaries of all.

    ``begin`` is called with each run and whether it is finished already; it returns the
    function that watches the run. Finished runs are read, interrupted ones resumed.
    """
    cells = [Cell(*three) for three in product(methods, alphas, seeds)]
    cells = list(dict.fromkeys(cells))
    settings = {cell: resolve(_given(given, cell, out)) for cell in cells}
    for cell, chosen in settings.items():  # all of them, before the first is played
        check_choices(chosen, make_method(chosen.method), find_task(chosen.task))
        _check_same(out / cell.name, chosen)
    summaries = [_play(settings[cell], cell, out, begin) for cell in cells]
    text = json.dumps(summaries, indent=2) + "\n"
    try:
        table = markdown(compare_rows(summaries))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(
            f"{out}: a summary in it is damaged ({one_line(repr(error))}); "
            "choose another --out"
        ) from None
    try:
        write_whole(out / "comparison.md", table.encode(), durable=True)
        write_whole(out / "comparison.json", text.encode(), durable=True)
    except OSError as error:
        raise StorageError(f"{out}: cannot write ({error})") from error
    return summaries


def _given(given: Mapping[str, Any], cell: Cell, out: Path) -> dict[str, Any]:
    return {
        **dict(flatten(given)),
        **cell.settings(),
        "out": str(out / cell.name),
    }


def _check_same(path: Path, settings: Settings) -> None:
    """Refuse to mix runs of different settings in one comparison."""
    if is_free(path):
        return
    check_is_run(path)
    # All saves, because the last one may turn out to be damaged.
    for t in saved_rounds(path):
        try:
            _check_save(SavedRun(path, t), settings)
        except DamagedError:
            continue


def _check_save(saved: SavedRun, settings: Settings) -> None:
    # A setting that the run's fedspu did not have yet has its default.
    defaults = Settings(model=settings.model).model_dump(mode="json")
    before = {**dict(flatten(defaults)), **dict(flatten(saved.index.settings))}
    wanted = dict(flatten(settings.model_dump(mode="json")))
    for name in sorted((before.keys() | wanted.keys()) - SAME_BITS):
        if name == "train.kernels" and wanted[name] == "auto":
            continue  # the run wrote down which it used
        if before.get(name) != wanted.get(name):
            raise StorageError(
                f"{saved.path} was played with {name} = {before.get(name)}, but "
                f"{wanted.get(name)} is asked for now; choose another --out"
            )


def _play(
    settings: Settings,
    cell: Cell,
    out: Path,
    begin: Callable[[Cell, bool], Watch | None],
) -> dict[str, Any]:
    path = out / cell.name
    summary = None if is_free(path) else last_whole(path, _summary)
    watch = begin(cell, summary is not None)
    if summary is not None:
        return summary
    if is_free(path):
        return simulate(settings, watch=watch).summary
    return resume(
        path,
        watch=watch,
        trust={settings.model, settings.method.name, settings.task},
        workers=settings.workers,
        engine=settings.engine,
        ray_address=settings.ray_address,
    ).summary


def _summary(saved: SavedRun) -> dict[str, Any] | None:
    """The summary of a run; None if it is not finished."""
    return saved.summary() if saved.is_finished else None
