"""Algorithmic correctness: the conformance kit, bound to this repository.

``pytest tests/kit/test_kda.py --backend=NAME`` runs it on one backend; without ``--backend``, on every installed one
that this machine can run.
"""

from kda_core.testing.suite.test_addressing import *  # noqa: F403
from kda_core.testing.suite.test_backward import *  # noqa: F403
from kda_core.testing.suite.test_context_parallel import *  # noqa: F403
from kda_core.testing.suite.test_determinism import *  # noqa: F403
from kda_core.testing.suite.test_extremes import *  # noqa: F403
from kda_core.testing.suite.test_forward import *  # noqa: F403
from kda_core.testing.suite.test_gates import *  # noqa: F403
from kda_core.testing.suite.test_graphs import *  # noqa: F403
from kda_core.testing.suite.test_inputs import *  # noqa: F403
from kda_core.testing.suite.test_layer import *  # noqa: F403
from kda_core.testing.suite.test_options import *  # noqa: F403
from kda_core.testing.suite.test_packing import *  # noqa: F403
from kda_core.testing.suite.test_paged_pool import *  # noqa: F403
from kda_core.testing.suite.test_pool_options import *  # noqa: F403
from kda_core.testing.suite.test_random import *  # noqa: F403
from kda_core.testing.suite.test_records import *  # noqa: F403
from kda_core.testing.suite.test_recurrent import *  # noqa: F403
from kda_core.testing.suite.test_rejections import *  # noqa: F403
from kda_core.testing.suite.test_state import *  # noqa: F403
