"""A memory of measurements that many jobs share: each kept under what was measured and on what machine.

A SQLite file; on a network file system, where SQLite is not safe with several writers, a file per job beside it.
"""

from __future__ import annotations

from overlap_sweep.store.measurement import Measurement
from overlap_sweep.store.opening import Store, StoreReading, open_store, read_store

__all__ = ["Measurement", "Store", "StoreReading", "open_store", "read_store"]
