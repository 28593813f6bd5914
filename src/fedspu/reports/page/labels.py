"""Which client has which classes, as shades."""

from fedspu.reports.page.chart import (
    Axis,
    Chart,
    Heatmap,
    Mark,
    Section,
    Series,
    Table,
    thinned,
)
from fedspu.reports.page.facts import Labels

MOST_CLIENTS = 60
MOST_CLASSES = 40
MOST_DOTS = 200


def labels(found: Labels | str, most_cells: int) -> Section:
    """A shade for each client and class; or why it is not known."""
    title = "Who has which labels"
    if isinstance(found, str):
        return Section(title, found, ())
    counts = found.counts
    num_clients, num_classes = counts.counts.shape
    columns = thinned(num_classes, MOST_CLASSES)
    shown = thinned(num_clients, max(2, min(MOST_CLIENTS, most_cells // len(columns))))
    names = found.names or tuple(map(str, range(num_classes)))
    heads = tuple(names[i] for i in columns)
    about = (
        f"The darker, the larger a class's share of a client's examples; seed "
        f"{found.seed}. The median client has {_median(counts.num_classes.tolist())} "
        f"of {num_classes} classes and {_median(counts.sizes.tolist()):,} examples."
    )
    if len(shown) < num_clients:
        about += f" {len(shown)} of {num_clients:,} clients, evenly spaced."
    if len(columns) < num_classes:
        about += f" {len(columns)} of {num_classes:,} classes, evenly spaced."
    picture = Heatmap(
        "labels",
        "Labels of each client",
        about,
        "client",
        "class",
        tuple(str(k) for k in shown),
        heads,
        tuple(
            tuple(
                float(counts.counts[k, c] / max(1, int(counts.sizes[k])))
                for c in columns
            )
            for k in shown
        ),
    )
    variety = Chart(
        name="sizes",
        title="Size and variety",
        about="A dot is a client: how many examples it has, of how many classes.",
        x=Axis("examples", lambda v: f"{v:,.0f}", from_zero=True),
        y=Axis("classes", lambda v: f"{v:g}", from_zero=True),
        series=(
            Series(
                "clients",
                0,
                tuple(
                    Mark(
                        int(counts.sizes[k]),
                        int(counts.num_classes[k]),
                        f"client {k}: {counts.sizes[k]:,} examples of "
                        f"{counts.num_classes[k]} classes",
                    )
                    for k in thinned(
                        num_clients, max(2, min(MOST_DOTS, most_cells // 20))
                    )
                ),
            ),
        ),
        has_labels=False,
    )
    table = Table(
        ("client", *heads, "all"),
        tuple(
            (
                str(k),
                *(str(counts.counts[k, c]) for c in columns),
                str(counts.sizes[k]),
            )
            for k in shown
        ),
        "Examples of each class: training, validation and test together.",
    )
    return Section(title, about, (picture, variety), table)


def _median(values: list[int]) -> int:
    return sorted(values)[len(values) // 2]
