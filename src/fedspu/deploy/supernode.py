"""A device's SuperNode: ``python -m fedspu.deploy.supernode``, started by us."""


def main() -> None:
    """Run the SuperNode; arguments are those of flower-supernode."""
    from flwr.supernode.cli import flower_supernode

    from fedspu.deploy.quiet import be_quiet, end_with_parent

    be_quiet()
    end_with_parent()
    flower_supernode()


if __name__ == "__main__":
    main()
