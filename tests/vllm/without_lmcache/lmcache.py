"""In front of LMCache on the module path: an engine under test must not need it."""

raise ImportError("LMCache is not installed (for this test)")
