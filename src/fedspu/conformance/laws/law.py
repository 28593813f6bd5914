"""What a law is, and how it reports what it found."""

from collections.abc import Callable
from functools import wraps

from fedspu.conformance.cases import Case
from fedspu.conformance.recording import Recording

Law = Callable[[Case], None]


class Violation(AssertionError):  # noqa: N818  # not an error: a finding
    """One or several laws that a method does not obey; ``laws`` are their names."""

    def __init__(self, text: str, laws: tuple[str, ...]) -> None:
        super().__init__(text)
        self.laws = laws


class Broken(Exception):  # noqa: N818  # as above
    """What a law found wrong; ``law`` turns it into a Violation."""


LAWS: dict[str, Law] = {}
"""Every law by its name, in order."""


def law(function: Law) -> Law:
    """Make a function a law, which reports its own name, the method and the model."""
    says = " ".join((function.__doc__ or "").split("\n\n")[0].split())

    @wraps(function)
    def tried(case: Case) -> None:
        broken = f"{function.__name__}: {case} violates the law {says!r}"
        try:
            function(case)
        except Broken as found:
            raise Violation(f"{broken}: {found}", (function.__name__,)) from None
        except Exception as error:  # a faulty method may raise anything
            raise Violation(
                f"{broken}: the law could not be checked: {in_words(error)}",
                (function.__name__,),
            ) from error

    LAWS[function.__name__] = tried
    return tried


def played_to_its_end(run: Recording) -> Recording:
    """The run; raises the error that ended it early, if there was one."""
    if run.error is not None:
        raise run.error
    return run


def in_words(error: BaseException) -> str:
    """An error's type and message."""
    return f"{type(error).__name__}: {error}"
