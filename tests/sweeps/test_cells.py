"""Which runs a comparison has, what they set, and what their folders are called."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspu.errors import SettingsError
from fedspu.sweeps.cells import (
    LONGEST_NAME,
    Cell,
    make_sweep,
    method_settings,
    parse_axis,
    parse_methods,
)


def test_every_method_meets_every_value_and_seed_case_by_case() -> None:
    axes = {"data.alpha": [0.1, 1.0], "train.lr": [0.1]}
    cells = list(make_sweep(["fedspu", "local"], [0, 1], axes).cells())
    assert [(c.method, dict(c.case)["data.alpha"], c.seed) for c in cells] == [
        (method, alpha, seed)
        for alpha in (0.1, 1.0)
        for method in ("fedspu", "local")
        for seed in (0, 1)
    ]


def test_what_is_set_for_one_method_takes_precedence() -> None:
    cell = Cell("fedavg@finetune=5@train.lr=0.5", (("train.lr", 0.1),), 3)
    assert cell.settings() == {
        "method.name": "fedavg",
        "method.finetune": 5,
        "train.lr": 0.5,
        "seed": 3,
    }


def test_a_short_form_stands_for_its_setting() -> None:
    assert method_settings("fedspu@early_stopping=true") == {
        "method.name": "fedspu",
        "early_stopping.on": True,
    }


def test_commas_in_brackets_belong_to_a_value() -> None:
    text = "fedspu@clients.capacities=[0.2,1], local"
    assert parse_methods(text) == ["fedspu@clients.capacities=[0.2,1]", "local"]
    axis = parse_axis("clients.capacities=[0.2,1],[1]", "--vary")
    assert axis == ("clients.capacities", [[0.2, 1], [1]])
    sweep = make_sweep(["fedspu"], [0], dict([axis]))
    assert len({cell.name for cell in sweep.cells()}) == 2


values = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(10**9), 10**9),
    st.booleans(),
    st.text(min_size=1, max_size=200),
    st.lists(st.floats(0, 1), min_size=1, max_size=30).map(tuple),
)
cells = st.builds(
    Cell,
    st.one_of(
        st.sampled_from(["fedspu", "ditto@pull=-1", "ditto@pull=1", "my.lab:one"]),
        st.text(min_size=1, max_size=150),
    ),
    st.tuples(st.tuples(st.just("data.alpha"), values)),
    st.integers(0, 10**6),
)


@given(cells, cells)
def test_two_runs_never_share_a_folder(one: Cell, other: Cell) -> None:
    def whole(cell: Cell) -> str:
        return repr((cell.method, cell.case, cell.seed))

    for cell in (one, other):
        assert 0 < len(cell.name) <= LONGEST_NAME
        assert "/" not in cell.name
        assert not cell.name.startswith("..")
    same = one.method == other.method and one.seed == other.seed
    if same and str(one.case) == str(other.case):
        assert one.name == other.name
    elif one.name == other.name:
        # Only values that are written alike, such as 1 and 1.0.
        assert whole(one).replace(".0", "") == whole(other).replace(".0", "")


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"train.lr": "0.1"}, "expected a list of values"),
        ({"train.lr": []}, "at least one value"),
        ({"out": ["a"]}, "use one folder for all"),
    ],
)
def test_axes_that_are_none_are_refused(axes: dict[str, list[str]], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        make_sweep(["fedspu"], [0], axes)


@pytest.mark.parametrize("name", ["train.lr", "early_stopping.on", "early_stopping"])
def test_what_is_set_for_one_method_cannot_vary_for_all(name: str) -> None:
    """Else a case would be called by a value that it was not played with."""
    own = "fedspu@early_stopping.on=true@train.lr=0.1"
    with pytest.raises(SettingsError, match=rf"^{own}: {name}.* and it varies for all"):
        make_sweep(["local", own], [0], {name: [1, 2]})


@pytest.mark.parametrize("seeds", [["1"], [1.5], [True]])
def test_a_seed_is_a_whole_number(seeds: list[int]) -> None:
    with pytest.raises(SettingsError, match="seeds: expected whole numbers"):
        make_sweep(["fedspu"], seeds, {})
