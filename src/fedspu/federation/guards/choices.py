"""Which guards fit which settings and methods."""

from fedspu.errors import SettingsError
from fedspu.methods.method import Method
from fedspu.neurons.average import average_by_clients, average_by_examples
from fedspu.settings import Settings


def check_guard(settings: Settings, method: Method) -> None:
    """Refuse a guard that would do nothing, or whose epsilon would be wrong."""
    guard = settings.guard
    if guard.rule == "none" and not guard.noise:
        return
    if not method.exchanges:
        name = "noise" if guard.noise else "rule"
        raise SettingsError(
            f"guard.{name} = {getattr(guard, name)}: clients of {method.name} send "
            "nothing, so there is nothing to guard; leave it out"
        )
    if guard.noise and (why := why_not_private(settings, method)):
        raise SettingsError(
            f"guard.noise = {guard.noise}: {why}, so its epsilon is unknown; leave "
            "guard.noise out"
        )


def why_not_private(settings: Settings, method: Method) -> str | None:
    """Why noise on the sum would not make a run private; None if it does."""
    if settings.early_stopping.on:
        return "with early_stopping.on, who takes part depends on clients' data"
    if method.is_choice:
        return f"clients of {method.name} choose their neurons by their data"
    if method.server is not None:
        return f"the server of {method.name} remembers replies without noise"
    if method.combine not in (average_by_examples, average_by_clients):
        return f"{method.name} combines updates in its own way"
    return None
