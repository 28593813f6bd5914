"""The suite that ships with the package, run as it is."""

from fedspu.conformance.test_conformance import test_a_method_obeys_the_law

__all__ = ["test_a_method_obeys_the_law"]
