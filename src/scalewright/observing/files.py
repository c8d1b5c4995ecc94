"""Records as plain data and back: JSON, with tensors in base64. No pickle, and nothing in a file is believed unchecked.

Tensors are zlib-compressed bytes in a table of their own, by a digest of what they hold: what layers that share an
input have in common is written once. Sums are fractions in text, so that they are read back to the last bit.
"""

from __future__ import annotations

import math
import re
import zlib
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from fractions import Fraction
from hashlib import sha256
from typing import Annotated, Any, Literal

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeInt, StringConstraints, ValidationError
from torch import Tensor

from scalewright.errors import ObservationsError, ScalewrightError
from scalewright.modifiers.schemes import scheme_named
from scalewright.numerics.histogram import NUM_CODES
from scalewright.numerics.moments import Moments
from scalewright.observers import Observer
from scalewright.observing.records import InputRecord, LayerRecord, StrengthRecord, WeightChoice, WeightRecord

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
_OBSERVED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LARGEST = 1 << 28  # bytes of one tensor: ten times what any record has

Sum = Annotated[str, StringConstraints(pattern=r"^-?[0-9]{1,2000}(/[1-9][0-9]{0,2000})?$")]


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _StoredTensor(_Checked):
    dtype: Literal["float32", "float64", "int64"]
    shape: list[NonNegativeInt]
    data: str


class _StoredObserver(_Checked):
    num_observed: NonNegativeInt
    observed_dtype: Literal["float32", "bfloat16", "float16"] | None
    statistics: dict[str, str]


class _StoredStrength(_Checked):
    num_tokens: NonNegativeInt
    counts: str
    signal: Sum
    noise: Sum | None


class _StoredInput(_Checked):
    num_tokens: NonNegativeInt
    lo: str | None
    hi: str | None
    num_values: NonNegativeInt
    sums: list[Sum]
    strengths: dict[str, _StoredStrength]


class _StoredChoice(_Checked):
    db: FiniteFloat | None
    share: FiniteFloat


class _StoredWeight(_Checked):
    shape: list[NonNegativeInt]
    dtype: str
    lo: FiniteFloat
    hi: FiniteFloat
    kurtosis: FiniteFloat | None
    absmax: str
    choices: dict[str, _StoredChoice]


class _StoredLayer(_Checked):
    input: _StoredInput
    observers: dict[str, _StoredObserver]
    weight: _StoredWeight


class _Stored(_Checked):
    layers: dict[str, _StoredLayer]
    tensors: dict[str, _StoredTensor]


# ---- to plain data ---------------------------------------------------------------------------------------------------


def packed(records: Mapping[str, LayerRecord]) -> dict[str, Any]:
    """Records as plain data."""
    tensors: dict[str, _StoredTensor] = {}
    layers = {
        name: _StoredLayer(
            input=_pack_input(record.input, tensors),
            observers={each: _pack_observer(observer, tensors) for each, observer in record.observers.items()},
            weight=_pack_weight(record.weight, tensors),
        )
        for name, record in records.items()
    }
    return _Stored(layers=layers, tensors=tensors).model_dump()


def _pack_input(record: InputRecord, tensors: dict[str, _StoredTensor]) -> _StoredInput:
    lo, hi = (None if each is None else _put(each, tensors) for each in (record.lo_H, record.hi_H))
    return _StoredInput(
        num_tokens=record.num_tokens,
        lo=lo,
        hi=hi,
        num_values=record.moments.count,
        sums=[str(each) for each in record.moments.sums],
        strengths={
            str(k): _StoredStrength(
                num_tokens=each.num_tokens,
                counts=_put(each.counts_C, tensors),
                signal=str(each.signal),
                noise=None if each.noise is None else str(each.noise),
            )
            for k, each in record.strengths.items()
        },
    )


def _pack_observer(observer: Observer, tensors: dict[str, _StoredTensor]) -> _StoredObserver:
    observer.settle()
    statistics = {name: getattr(observer, name) for name in observer.merge_rules}
    seen = observer._observed_dtype
    dtype = next((name for name, each in _OBSERVED.items() if each == seen), "float32")
    return _StoredObserver.model_validate(
        {
            "num_observed": observer.num_observed,
            "observed_dtype": None if seen is None else dtype,
            "statistics": {name: _put(each, tensors) for name, each in statistics.items() if each is not None},
        }
    )


def _pack_weight(record: WeightRecord, tensors: dict[str, _StoredTensor]) -> _StoredWeight:
    return _StoredWeight(
        shape=list(record.shape),
        dtype=record.dtype,
        lo=record.lo,
        hi=record.hi,
        kurtosis=record.kurtosis,
        absmax=_put(record.absmax_H, tensors),
        choices={
            name: _StoredChoice(db=each.db if math.isfinite(each.db) else None, share=each.share)
            for name, each in record.choices.items()
        },
    )


def _put(tensor: Tensor, tensors: dict[str, _StoredTensor]) -> str:
    """The key of a tensor in the table, which has it now."""
    tensor = tensor.detach().cpu().contiguous()
    raw = tensor.numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    key = sha256(f"{dtype} {list(tensor.shape)} ".encode() + raw).hexdigest()[:24]
    if key not in tensors:
        data = b64encode(zlib.compress(raw, 6)).decode()
        tensors[key] = _StoredTensor.model_validate({"dtype": dtype, "shape": list(tensor.shape), "data": data})
    return key


# ---- and back --------------------------------------------------------------------------------------------------------


def unpacked(data: Any, *, scheme: str) -> dict[str, LayerRecord]:
    """The records that plain data stands for, or ObservationsError."""
    try:
        stored = _Stored.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ObservationsError(f"{'.'.join(map(str, first['loc'])) or 'records'}: {first['msg']}.") from None
    args = scheme_named(scheme).input_activations
    table = _Table(stored.tensors)
    return {name: _unpack_layer(name, layer, args, table) for name, layer in stored.layers.items()}


class _Table:
    """Tensors by their keys; each is decoded once."""

    def __init__(self, stored: Mapping[str, _StoredTensor]) -> None:
        self._stored = stored
        self._known: dict[str, Tensor] = {}

    def get(self, key: str, dtype: torch.dtype, shape: tuple[int, ...], what: str) -> Tensor:
        """The tensor, which must be of that dtype and shape, finite, and no negative count."""
        if key not in self._stored:
            raise ObservationsError(f"{what} is not in the file.")
        if key not in self._known:
            self._known[key] = _decode(self._stored[key], what)
        found = self._known[key]
        if found.dtype != dtype or tuple(found.shape) != shape:
            raise ObservationsError(
                f"{what} is {found.dtype} of shape {tuple(found.shape)}, and should be {dtype} of shape {shape}."
            )
        is_sound = bool((found >= 0).all()) if dtype == torch.int64 else bool(torch.isfinite(found).all())
        if not is_sound:
            raise ObservationsError(f"{what} has NaN, Inf or negative counts in it.")
        return found


def _decode(stored: _StoredTensor, what: str) -> Tensor:
    dtype = _DTYPES[stored.dtype]
    size = math.prod(stored.shape) * dtype.itemsize
    if size > _LARGEST:
        raise ObservationsError(f"{what} would take {size} bytes, and {_LARGEST} are the most that is read.")
    try:
        reader = zlib.decompressobj()
        raw = reader.decompress(b64decode(stored.data, validate=True), size + 1)  # never more than it says
    except (zlib.error, Base64Error, ValueError):
        raise ObservationsError(f"{what} cannot be decoded.") from None
    if len(raw) != size:
        raise ObservationsError(f"{what} has not the {size} bytes that its shape takes.")
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(stored.shape) if raw else torch.empty(0, dtype=dtype)


def _unpack_layer(name: str, layer: _StoredLayer, args: QuantizationArgs | None, table: _Table) -> LayerRecord:
    width = (layer.weight.shape[-1] if layer.weight.shape else 0,)
    try:
        observers = {
            each: _unpack_observer(each, stored, args, width[0], table) for each, stored in layer.observers.items()
        }
        seen, weight = _unpack_input(layer.input, width, table), _unpack_weight(layer.weight, width, table)
    except ScalewrightError as error:
        raise ObservationsError(f"{name}: {error}") from None
    for observer in observers.values():
        observer.label = f"{name}.input"
    return LayerRecord(seen, observers, weight)


def _unpack_weight(weight: _StoredWeight, width: tuple[int, ...], table: _Table) -> WeightRecord:
    return WeightRecord(
        tuple(weight.shape),
        weight.dtype,
        weight.lo,
        weight.hi,
        weight.kurtosis,
        table.get(weight.absmax, torch.float32, width, "absmax of the weight"),
        {
            each: WeightChoice(math.inf if choice.db is None else choice.db, choice.share)
            for each, choice in weight.choices.items()
        },
    )


def _unpack_input(stored: _StoredInput, width: tuple[int, ...], table: _Table) -> InputRecord:
    if len(stored.sums) != len(Moments().sums) or stored.num_values != stored.num_tokens * width[0]:
        raise ObservationsError(
            f"{stored.num_tokens} tokens of {width[0]} channels have {stored.num_values} values and "
            f"{len(stored.sums)} sums of powers."
        )
    if stored.num_tokens == 0:
        return InputRecord()
    if stored.lo is None or stored.hi is None:
        raise ObservationsError("there are tokens, and no range.")
    strengths = {_class(k): _unpack_strength(each, width[0], table) for k, each in stored.strengths.items()}
    num_tokens = sum(each.num_tokens for each in strengths.values())
    if num_tokens != stored.num_tokens:
        raise ObservationsError(f"{stored.num_tokens} tokens were seen, and {num_tokens} have a strength.")
    return InputRecord(
        stored.num_tokens,
        table.get(stored.lo, torch.float32, width, "least values of the input"),
        table.get(stored.hi, torch.float32, width, "largest values of the input"),
        Moments(stored.num_values, tuple(Fraction(each) for each in stored.sums)),
        strengths,
    )


def _unpack_strength(stored: _StoredStrength, width: int, table: _Table) -> StrengthRecord:
    counts_C = table.get(stored.counts, torch.int64, (NUM_CODES,), "counts of the input")
    num_values = stored.num_tokens * width
    if int(counts_C.sum()) != num_values:
        raise ObservationsError(f"{num_values} values were seen, and {int(counts_C.sum())} are counted.")
    noise = None if stored.noise is None else Fraction(stored.noise)
    return StrengthRecord(stored.num_tokens, counts_C, Fraction(stored.signal), noise)


def _class(text: str) -> int:
    if re.fullmatch(r"-?[0-9]{1,4}", text) is None:
        raise ObservationsError(f"'{text}' is no class of strength.")
    return int(text)


def _unpack_observer(
    name: str, stored: _StoredObserver, args: QuantizationArgs | None, width: int, table: _Table
) -> Observer:
    """An observer with the statistics of the file, which must look like those of one that has seen something."""
    if args is None:
        raise ObservationsError(f"observer '{name}' watched its input, which the scheme leaves alone.")
    observer: Observer = Observer.load_from_registry(name, base_name="input", args=args)
    if not stored.statistics:
        return observer
    observer(torch.zeros(1, width))
    expected = {each: getattr(observer, each) for each in observer.merge_rules}
    expected = {each: like for each, like in expected.items() if like is not None}
    observer.reset()
    if stored.statistics.keys() != expected.keys():
        raise ObservationsError(
            f"observer '{name}' has the statistics {', '.join(stored.statistics)}, "
            f"and should have {', '.join(expected)}."
        )
    found = {
        each: table.get(stored.statistics[each], like.dtype, tuple(like.shape), f"{name}.{each}")
        for each, like in expected.items()
    }
    for each, value in observer.derived(found).items():
        if not torch.allclose(value, found[each], rtol=1e-6, atol=0):
            raise ObservationsError(f"{name}.{each} is not what follows from the other statistics.")
    for each, value in found.items():
        setattr(observer, each, value)
    observer.num_observed = stored.num_observed
    observer._observed_dtype = None if stored.observed_dtype is None else _OBSERVED[stored.observed_dtype]
    observer.statistics_replaced(unchanged=False)
    return observer
