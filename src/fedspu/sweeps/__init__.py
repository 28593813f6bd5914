"""Many runs and one table of them: what ``fedspu compare`` calls."""
