"""What the tests of faults share: the laws by short names, and that one is broken."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import nn

from fedspu.conformance import LAWS, Violation, check
from fedspu.conformance.nets import ConvNet, made_examples
from fedspu.methods.method import Method

MEAN = "an_entry_is_the_mean_of_those_who_trained_it"
IDLE = "nothing_is_learnt_from_nothing"
FEDAVG = "at_full_capacity_it_is_fedavg"
SAME = "arrival_engine_and_resume_make_no_difference"
SEED = "the_seed_decides_what_methods_share"
HELD_OUT = "held_out_examples_are_not_seen"
MERGED = "what_came_is_where_it_belongs"
LEAVES = "only_what_was_trained_leaves_a_client"
BYTES = "bytes_reported_are_bytes_sent"
WHO = "newcomers_have_w0_and_leavers_stay_away"


def assert_caught(
    law: str,
    method: Method | str = "fedspu",
    says: str = "",
    net: Callable[[], nn.Module] = ConvNet,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """That ``check`` reports a violation of this law, in these words."""
    others = [name for name in LAWS if name != law]
    with pytest.raises(Violation) as caught:
        check(method, net, made_examples(), leave_out=others, settings=settings)
    assert caught.value.laws == (law,)
    text = str(caught.value)
    assert text.startswith(f"{law}: ")
    assert f" on {net.__name__} violates the law " in text
    assert "could not be checked" not in text, text
    assert says in text
