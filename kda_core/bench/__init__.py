"""The benchmark behind ``kda bench``; needs the extra ``bench``. ``import kda_core`` does not load it."""
