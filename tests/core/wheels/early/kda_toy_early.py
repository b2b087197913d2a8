"""A backend for a later kda-core: it imports a name that this one lacks."""

from kda_core.capabilities import Foresight  # noqa: F401
