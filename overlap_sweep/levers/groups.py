"""Levers of NCCL's process groups: options that a group is made with. `scopes` says which groups a value is for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from overlap_sweep.levers import Value, typed
from overlap_sweep.levers.process import NotApplicable, NotHere
from overlap_sweep.nccl.settings import MOST_CTAS
from overlap_sweep.scopes import parts_of, value_for


def _options_with(field: str, value: Value, arguments: Mapping[str, Any]) -> object:
    """Returns `pg_options` with the value, on top of those that the script gives. NotHere for groups that the value is
    not for."""
    import torch.distributed as dist

    description, ranks = arguments.get("group_desc", "default_pg") or "", _ranks(arguments)
    if not _uses_nccl(arguments):
        raise NotHere("this training has made no process group of NCCL")
    number = value_for(str(value), description, ranks)
    if number is None:
        scopes = " or ".join(scope for scope, _ in parts_of(str(value)))
        last = f"{description or 'without description'} of ranks {', '.join(map(str, ranks))}"
        raise NotHere(f"no process group of NCCL has the description or ranks {scopes}; the last one was {last}")
    fresh = dist.ProcessGroupNCCL.Options()
    options = _copy(arguments["pg_options"] or _inherited(arguments) or fresh)
    owner, default = (options.config, fresh.config) if hasattr(fresh.config, field) else (options, fresh)
    if not hasattr(default, field):
        raise NotApplicable(f"this PyTorch's ProcessGroupNCCL.Options have no {field}")
    wanted = type(getattr(default, field))(typed(number))
    given = getattr(owner, field)
    if arguments["pg_options"] is not None and given not in (getattr(default, field), wanted):
        raise NotApplicable(f"the script gives {field}={given} in pg_options")
    setattr(owner, field, wanted)
    if field == "min_ctas" and options.config.max_ctas == fresh.config.max_ctas:
        options.config.max_ctas = max(MOST_CTAS, wanted)
    return options


max_ctas = partial(_options_with, "max_ctas")
min_ctas = partial(_options_with, "min_ctas")
cga_cluster_size = partial(_options_with, "cga_cluster_size")
cta_policy = partial(_options_with, "cta_policy")
high_priority = partial(_options_with, "is_high_priority_stream")


def _ranks(arguments: Mapping[str, Any]) -> list[int]:
    """Returns the ranks of the group that is made; those of init_process_group are all."""
    import torch.distributed as dist

    if "split_ranks" in arguments:
        own = dist.get_rank()
        return next((group for group in arguments["split_ranks"] if own in group), [])
    if given := arguments.get("ranks"):
        return [*given]
    if dist.is_initialized():
        return [*range(dist.get_world_size())]
    size: int = arguments["world_size"]
    return [*range(size if size > 0 else int(os.environ.get("WORLD_SIZE", "0")))]


def _uses_nccl(arguments: Mapping[str, Any]) -> bool:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return False
    backend = arguments.get("backend")
    if backend is None and dist.is_initialized():
        # Not get_backend, which does not know it where the script has left it to PyTorch.
        backend = dist.get_backend_config(arguments.get("parent_pg"))
    return backend is None or "nccl" in str(backend).lower()


def _inherited(arguments: Mapping[str, Any]) -> Any:
    """Returns the options of the group that is split, which its parts have by default; None if none is."""
    import torch
    import torch.distributed as dist

    if "split_ranks" not in arguments:
        return None
    parent: Any = arguments["parent_pg"] or dist.group.WORLD
    return parent._get_backend(torch.device("cuda")).options


def _copy(options: Any) -> Any:
    """Returns equal options: the script may give these to other groups, too, and older PyTorch cannot copy them."""
    import torch.distributed as dist

    copied: Any = dist.ProcessGroupNCCL.Options()
    copied.is_high_priority_stream = options.is_high_priority_stream
    for name in dir(options.config):
        value = getattr(options.config, name)
        if isinstance(value, int | str) and not name.startswith("_"):
            setattr(copied.config, name, value)
    return copied
