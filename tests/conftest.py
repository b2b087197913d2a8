"""Loads the conformance kit's plugin: ``--backend``, the fixture ``kda``, and fast and slow tiers."""

pytest_plugins = ["kda_core.testing.plugin"]
