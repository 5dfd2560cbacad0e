"""The experts of a GGUF file, one at a time and as they are in it."""

from __future__ import annotations

from multirate.errors import UserError
from multirate.loading.gguf.config import architecture_of, read_config
from multirate.loading.gguf.file import GgufFile
from multirate.loading.gguf.weights import EXPERTS, not_run, weight_in_file
from multirate.runtime.native.formats import BF16, WeightFormat, format_named
from multirate.runtime.quantised import FLOATS, QuantisedWeight


class GgufExperts:
    """Which layers of a file have experts, how many, and each one's matrices. formats: what the
    kernel multiplies a layer's gate, up and down in: the file's own, or bf16 where it has floats or
    `expand` is set.

    Raises UserError for a file without experts, or with some in a format that the kernel does not
    run or in other shapes than the first.
    """

    def __init__(self, file: GgufFile, expand: bool = False) -> None:
        self._file, self._expand = file, expand
        architecture_of(file)
        config = read_config(file)
        self.layers = [
            layer
            for layer in range(config.num_hidden_layers)
            if any(name in file.tensors for name in _names(layer))
        ]
        if not self.layers:
            raise UserError(
                f"{file.path} has no experts to pack; accepted: mixture-of-experts models whose "
                "tensors are named blk.N.ffn_{gate,up,down}_exps.weight"
            )
        self.top_k = int(config.num_experts_per_tok)
        shapes = [tuple(self._shape(name) for name in _names(layer)) for layer in self.layers]
        self.num_experts, self.intermediate, self.hidden = shapes[0][0]
        up = (self.num_experts, self.intermediate, self.hidden)
        wanted = (up, up, (self.num_experts, self.hidden, self.intermediate))
        for layer, found in zip(self.layers, shapes, strict=True):
            if found != wanted:
                raise UserError(
                    f"{file.path}: the experts of layer {layer} have the shapes {found}; accepted: "
                    f"{wanted}"
                )
        self.formats = tuple(
            (self._format(gate), self._format(up), self._format(down))
            for gate, up, down in map(_names, self.layers)
        )

    def parts(self, layer: int, expert: int) -> list[QuantisedWeight]:
        """One expert's gate, up and down."""
        wholes = [weight_in_file(self._file, name) for name in _names(layer)]
        counts = [len(whole) // self.num_experts for whole in wholes]
        return [
            whole[expert * count : (expert + 1) * count]
            for whole, count in zip(wholes, counts, strict=True)
        ]

    def _shape(self, name: str) -> tuple[int, ...]:
        tensor = self._file.tensors.get(name)
        if tensor is None or len(tensor.shape) != 3:
            found = "no" if tensor is None else f"not three dimensions in {tensor.shape} of"
            raise UserError(f"{self._file.path} has {found} tensor {name}")
        return tensor.shape

    def _format(self, name: str) -> WeightFormat:
        tensor = self._file.tensors[name]
        if self._expand or tensor.kind.name in FLOATS:
            return BF16
        found = format_named(tensor.kind.name)
        if found is None:
            raise UserError(not_run(self._file, tensor))
        return found


def _names(layer: int) -> list[str]:
    """The tensors of a layer's gates, ups and downs."""
    return [f"blk.{layer}.{name}" for names in EXPERTS.values() for name in names]
