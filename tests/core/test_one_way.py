"""A call goes one way: from its arguments to a request, the choice of a backend, autograd and the backend's hook."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from toys import inputs

import kda_core
from kda_core._plugins import registry

CORE = Path(kda_core.__file__).parent


WAY = ["api", "_torch_private", "_plugins", "_signature", "_autograd", "_loaded"]


@pytest.mark.parametrize("backend", ["cpu", None])
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_a_warm_training_forward_goes_one_way(op: str, backend: str | None):
    """Each module is entered once, and at most nine functions stand on the stack between the caller and the hook."""
    hooks, stays, above = registry.named("cpu").plugin.__file__, [], []
    function, arguments = getattr(kda_core, op), [t.requires_grad_() for t in inputs()]

    def follow(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or above:
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(CORE):
            if stays[-1:] != [path.stem]:
                stays.append(path.stem)
        elif str(path) == hooks:
            caller = frame.f_back
            while caller.f_code.co_filename != __file__:
                above.append(caller.f_code.co_name)
                caller = caller.f_back

    for _ in range(2):
        function(*arguments, backend=backend)
    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        function(*arguments, backend=backend)
    finally:
        sys.setprofile(before)
    assert stays == WAY
    assert above[-1] == op
    assert len(above) <= 9
