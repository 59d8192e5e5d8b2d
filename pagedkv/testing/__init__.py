"""Tools that try a manager, public so that an engine can run them on its own traffic.

- ``CheckedManager``: a manager with the slow ``ReferenceManager`` beside it, compared after every call.
- ``Workload``: random operations that are valid for the manager they are made for; ``random_walk`` runs
  them on a ``CheckedManager`` with a ``ShadowStorage``, with or without failures.
- ``FailureInjector``: makes the k-th call of named functions fail.
- ``ShadowStorage`` knows which token every slot holds, ``ShadowIndex`` what the events say is findable.
- ``check_invariants`` and ``check_nothing_is_held``, for any moment and for the end; ``snapshot`` for
  "nothing has changed".

>>> random_walk(200, seed=1).stats().num_opened > 10
True
"""

from pagedkv.reference_manager import ReferenceManager
from pagedkv.testing.checked import CheckedManager, manager_state
from pagedkv.testing.failures import FAILURE_POINTS, FailureInjector
from pagedkv.testing.shadows import ShadowIndex, ShadowStorage
from pagedkv.testing.states import check_invariants, check_nothing_is_held, snapshot
from pagedkv.testing.walk import TrialEngine, random_walk
from pagedkv.testing.workload import Operation, Workload

__all__ = [
    "FAILURE_POINTS",
    "CheckedManager",
    "FailureInjector",
    "Operation",
    "ReferenceManager",
    "ShadowIndex",
    "ShadowStorage",
    "TrialEngine",
    "Workload",
    "check_invariants",
    "check_nothing_is_held",
    "manager_state",
    "random_walk",
    "snapshot",
]
