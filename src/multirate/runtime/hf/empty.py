"""A model of transformers without its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from multirate.torch_modes import building


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The causal LM of `config`: its buffers as `dtype` has them, its parameters on the meta
    device. Changes no setting of torch or of a class, so that other threads may build and load
    models meanwhile.
    """
    with building(dtype, empty_on_meta=True):
        # a dtype would be made the default of the whole process
        model: Any = AutoModelForCausalLM.from_config(config, dtype=None)
    for one in {id(each): each for each in (config, model.config)}.values():
        one.dtype = dtype
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    return model
