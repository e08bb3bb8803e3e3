"""Joins the weights of several products of one input. No other code makes joined weights.

A module's parameters become views of the joined weight, so no weight is stored twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvant.errors import EngineFault
from kvant.models.fused.linear import (
    Apart,
    DenseLinear,
    JoinedLater,
    Linear,
    Multiply,
    NarrowProduct,
    plain,
)
from kvant.models.invariant.linear import TiledLinear
from kvant.weights.codecs import can_join, rows_of
from kvant.weights.codecs import join as join_weights
from kvant.weights.linear import NarrowLinear


def join(products: Sequence[Any], multiply: Multiply, name: str) -> Linear:
    """Returns one product for several linear layers of the same input, with their rows in order.

    Mutates the layers: their parameters become views, unless multiply is `plain`. name: of their module, for
    EngineFault, which it raises for weights in a format of transformers, and if only some unquantised layers
    have a bias.
    """
    if any(isinstance(product, NarrowLinear) for product in products):
        return _join_narrow(products, multiply, name)
    check_numbers(products, name)
    if len(products) == 1:
        return DenseLinear(products[0].weight, products[0].bias, multiply)
    biases = [product.bias for product in products if product.bias is not None]
    if biases and len(biases) != len(products):
        raise EngineFault(f"{name} has biases on some of its joined products only")
    bias = _joined(biases) if biases else None
    weights = [product.weight for product in products]
    if multiply is plain:
        return JoinedLater(tuple(weight.detach() for weight in weights), bias)
    return DenseLinear(_joined(weights), bias, multiply)


def _join_narrow(products: Sequence[Any], multiply: Multiply, name: str) -> Linear:
    """Implements `join` if some weights are narrow.

    Neighbours of different formats stay separate products.
    """
    alike = isinstance(multiply, TiledLinear)
    narrow = [product for product in products if isinstance(product, NarrowLinear)]
    biases = [product.bias for product in products if product.bias is not None]
    joinable = len(narrow) == len(products) and can_join([one.narrow for one in narrow])
    joinable = joinable and _round_alike(narrow)
    if len(products) > 1 and (not joinable or len(biases) not in (0, len(products))):
        return Apart(tuple(join(part, multiply, name) for part in _neighbours(products)))
    weights = [one.narrow for one in narrow]
    whole = join_weights(weights)
    start = 0
    for one in narrow if len(narrow) > 1 else ():
        one.put(rows_of(whole, start, one.out_features))
        start += one.out_features
    bias = None
    if biases:
        bias = _joined(biases) if len(biases) > 1 else biases[0]
    first = narrow[0]
    return NarrowProduct(whole, bias, alike, first.rounds, first.input_scale, first.fast_sums)


def _round_alike(products: Sequence[NarrowLinear]) -> bool:
    """Whether all products round their input by the same scale, or none of them has a scale."""
    first, *others = (product.input_scale for product in products)
    if first is None:
        return all(one is None for one in others)
    return all(one is not None and torch.equal(one, first) for one in others)


def _neighbours(products: Sequence[Any]) -> list[list[Any]]:
    """Groups neighbouring layers that can be joined; keeps their order."""
    found: list[list[Any]] = []
    for product in products:
        last = found[-1] if found else []
        with_this = [*last, product]
        narrow = [one for one in with_this if isinstance(one, NarrowLinear)]
        fits = len(narrow) == len(with_this) and can_join([one.narrow for one in narrow])
        biased = {one.bias is None for one in with_this}
        if last and fits and len(biased) == 1 and _round_alike(narrow):
            last.append(product)
        else:
            found.append([product])
    return found


def check_numbers(products: Sequence[Any], name: str) -> None:
    """Raises EngineFault if a layer is not an unquantised `nn.Linear`."""
    if any(type(product) is not nn.Linear for product in products):
        raise EngineFault(
            f"{name} is planned for Kvant's own decoder, but its weights are in a format of transformers"
        )


def turn(parameter: Any) -> Tensor:
    """Returns experts' weights [E, in, out] as [E, out, in]; the parameter becomes a view of them."""
    turned: Tensor = parameter.data.transpose(1, 2).contiguous()
    parameter.data = turned.transpose(1, 2)
    return turned


def _joined(parameters: Sequence[Any]) -> Tensor:
    whole = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = whole[start : start + parameter.shape[0]]
        start += parameter.shape[0]
    return whole
