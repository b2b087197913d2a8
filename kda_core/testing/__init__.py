"""Conformance kit: tells any backend's author when the backend is right.

    pytest -p kda_core.testing.plugin --pyargs kda_core.testing.suite --backend=mychip

``cases`` and ``budgets`` (named cases, derived tolerances) and ``verify`` need nothing but torch; ``plugin``, ``marks``
and ``suite`` need the extra ``testing``.
"""
