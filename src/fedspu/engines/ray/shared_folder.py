"""Whether another process sees the same folder, and can write to it for us."""

import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedspu.federation.client_memory import Shelf
from fedspu.files import write_whole


@dataclass(frozen=True)
class Probe:
    """A file in the shelf's folder; whoever sees the folder can answer beside it."""

    path: Path
    content: str

    @staticmethod
    def ask(shelf: Shelf) -> "Probe | None":
        """A new probe, written; None if nobody else can see the shelf."""
        if shelf.folder is None:
            return None
        path = shelf.folder.absolute() / f"probe-{secrets.token_hex(8)}"
        probe = Probe(path, secrets.token_hex(16))
        with suppress(OSError):  # then nobody can answer
            write_whole(path, probe.content.encode(), private=True)
        return probe

    @property
    def answer_path(self) -> Path:
        """Where the answer is written."""
        return self.path.with_name(f"{self.path.name}-answer")

    def answer(self) -> str:
        """Write an answer, and return it; empty if the folder is not seen here."""
        try:
            if self.path.read_text() != self.content:
                return ""
            answer = secrets.token_hex(16)
            write_whole(self.answer_path, answer.encode(), private=True)
        except OSError:
            return ""
        return answer

    def is_answered(self, answer: str) -> bool:
        """Whether what the other side says it has written is here."""
        try:
            return bool(answer) and self.answer_path.read_text() == answer
        except OSError:
            return False

    def remove(self) -> None:
        """Remove both files."""
        for path in (self.path, self.answer_path):
            with suppress(OSError):
                path.unlink(missing_ok=True)
