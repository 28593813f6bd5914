"""What a file says about its model, so that it can be used later."""

Facts = dict[str, str]
"""What a model is, by name; every format has a place for such texts."""
