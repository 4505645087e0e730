"""Runs the ONNX model of an exported predictor with torch, on a GPU that ONNX Runtime does not support.

Shapes, and tensors computed from shapes, stay on the CPU: reading them back from a GPU would cost time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor
from torch.nn import functional

Attributes = Mapping[str, Any]


class OnnxOnTorch:
    """A float32 model from a file, with the `run` of an ONNX Runtime session.

    Raises NotImplementedError for a model with an unknown operator.
    """

    def __init__(self, path: Path, device: str) -> None:
        graph = onnx.load(str(path)).graph
        unknown = {node.op_type for node in graph.node} - {*OPERATORS, "Constant"}
        if unknown:
            raise NotImplementedError(f"{path} has unknown operators: {', '.join(sorted(unknown))}")
        self._device = device
        self._constants = {
            weights.name: self._constant(numpy_helper.to_array(weights)) for weights in graph.initializer
        }
        self._output = graph.output[0].name
        self._nodes: list[tuple[str, list[str], str, Attributes]] = []
        for node in graph.node:
            attributes = {field.name: onnx.helper.get_attribute_value(field) for field in node.attribute}
            if node.op_type == "Constant":
                self._constants[node.output[0]] = self._constant(numpy_helper.to_array(attributes["value"]))
            else:
                self._nodes.append((node.op_type, list(node.input), node.output[0], attributes))

    def run(self, outputs: None, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return a list with the first output. inputs : by name"""
        values = dict(self._constants)
        values.update({name: torch.from_numpy(array).to(self._device) for name, array in inputs.items()})
        with torch.inference_mode():
            for kind, names, output, attributes in self._nodes:
                operands = self._placed([values[name] for name in names], HOST.get(kind, ()))
                values[output] = OPERATORS[kind](attributes, *operands)
        return [values[self._output].cpu().numpy()]

    def _constant(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.array(array))
        return tensor.to(self._device) if tensor.is_floating_point() else tensor

    def _placed(self, operands: list[Tensor], host: tuple[int, ...]) -> list[Tensor]:
        """Move all operands to the GPU if one is there. Operands at `host` are shapes or axes: they go to the CPU."""
        free = [operand for place, operand in enumerate(operands) if place not in host]
        if all(operand.device.type == "cpu" for operand in free):
            return operands
        return [operand.cpu() if place in host else operand.to(self._device) for place, operand in enumerate(operands)]


def _slice(_: Attributes, data: Tensor, starts: Tensor, ends: Tensor, axes: Tensor, steps: Tensor) -> Tensor:
    parts = [slice(None)] * data.dim()
    for axis, start, end, step in zip(axes.tolist(), starts.tolist(), ends.tolist(), steps.tolist(), strict=True):
        parts[axis] = slice(start, end, step)
    return data[tuple(parts)]


def _gather(attributes: Attributes, data: Tensor, indices: Tensor) -> Tensor:
    axis = attributes.get("axis", 0)
    picked = data.index_select(axis, indices.flatten() % data.shape[axis])
    return picked.reshape([*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]])


def _unsqueeze(_: Attributes, data: Tensor, axes: Tensor) -> Tensor:
    for axis in sorted(axes.tolist()):
        data = data.unsqueeze(axis)
    return data


def _reshape(_: Attributes, data: Tensor, shape: Tensor) -> Tensor:
    return data.reshape([data.shape[place] if size == 0 else size for place, size in enumerate(shape.tolist())])


def _expand(_: Attributes, data: Tensor, shape: Tensor) -> Tensor:
    return data.expand(torch.broadcast_shapes(data.shape, tuple(shape.tolist())))


def _filled(attributes: Attributes, shape: Tensor) -> Tensor:
    value = torch.from_numpy(np.array(numpy_helper.to_array(attributes["value"])))
    return value.reshape([]).expand(shape.tolist()).clone()


def _layer_norm(attributes: Attributes, data: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(data, scale.shape, scale, bias, attributes["epsilon"])


def _gemm(attributes: Attributes, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a, b = a.T if attributes.get("transA") else a, b.T if attributes.get("transB") else b
    return attributes.get("alpha", 1.0) * (a @ b) + attributes.get("beta", 1.0) * c


def _cast(attributes: Attributes, data: Tensor) -> Tensor:
    return data.to(torch.from_numpy(np.zeros(1, onnx.helper.tensor_dtype_to_np_dtype(attributes["to"]))).dtype)


def _sum(attributes: Attributes, data: Tensor, axes: Tensor) -> Tensor:
    return data.sum(dim=axes.tolist(), keepdim=bool(attributes.get("keepdims", 1)))


OPERATORS: Mapping[str, Callable[..., Tensor]] = {
    "Add": lambda _, a, b: a + b,
    "And": lambda _, a, b: a & b,
    "Cast": _cast,
    "Concat": lambda attributes, *parts: torch.cat(parts, dim=attributes["axis"]),
    "ConstantOfShape": _filled,
    "CumSum": lambda _, data, axis: data.cumsum(int(axis)),
    "Div": lambda _, a, b: a / b if a.is_floating_point() else a // b,
    "Equal": lambda _, a, b: a == b,
    "Erf": lambda _, data: data.erf(),
    "Exp": lambda _, data: data.exp(),
    "Expand": _expand,
    "Flatten": lambda attributes, data: data.reshape(int(np.prod(data.shape[: attributes["axis"]])), -1),
    "Gather": _gather,
    "GatherElements": lambda attributes, data, indices: data.gather(attributes["axis"], indices),
    "Gemm": _gemm,
    "GreaterOrEqual": lambda _, a, b: a >= b,
    "LayerNormalization": _layer_norm,
    "MatMul": lambda _, a, b: a @ b,
    "Mul": lambda _, a, b: a * b,
    "Range": lambda _, start, end, step: torch.arange(int(start), int(end), int(step)),
    "ReduceSum": _sum,
    "Reshape": _reshape,
    "Shape": lambda _, data: torch.tensor(data.shape),
    "Slice": _slice,
    "Softmax": lambda attributes, data: data.softmax(attributes["axis"]),
    "Softplus": lambda _, data: functional.softplus(data),
    "Sub": lambda _, a, b: a - b,
    "Tanh": lambda _, data: data.tanh(),
    "Transpose": lambda attributes, data: data.permute(attributes["perm"]),
    "Unsqueeze": _unsqueeze,
    "Where": lambda _, condition, a, b: torch.where(condition, a, b),
}
HOST = {
    **{"ConstantOfShape": (0,), "CumSum": (1,), "Expand": (1,), "Range": (0, 1, 2), "ReduceSum": (1,)},
    **{"Reshape": (1,), "Slice": (1, 2, 3, 4), "Unsqueeze": (1,)},
}
"""Operands that are read on the CPU, by the operator."""
