"""Model inputs, tensors and datums: what a training call is made of.

Nothing here imports torch; a torch tensor is recognised by its own ``detach``/``numpy`` methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import InvalidDatum, InvalidRequest

if TYPE_CHECKING:
    import torch

DType = Literal["int64", "float32"]
TensorLike: TypeAlias = "TensorData | npt.NDArray[Any] | torch.Tensor | Sequence[Any]"
TokensLike: TypeAlias = "ModelInput | npt.NDArray[Any] | torch.Tensor | Sequence[int]"

INT_INPUTS = frozenset({"target_tokens"})
"""Loss inputs that hold token ids; every other input is float32."""


def as_array(value: Any) -> npt.NDArray[Any]:
    """A numpy array of a list, an array, a torch tensor (any device) or a `TensorData`."""
    if isinstance(value, TensorData):
        return value.data
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = tensor.float()
        return tensor.numpy()
    return np.asarray(value)


def as_tokens(value: Any, what: str = "tokens") -> npt.NDArray[np.int32]:
    """Token ids as a 1-D int32 array; anything that is not a whole number is refused."""
    if isinstance(value, ModelInput):
        return value.tokens
    if isinstance(value, (str, bytes)):
        raise InvalidRequest(f"{what}: expected token ids, got a string; encode it with the tokenizer first")
    try:
        array = as_array(value)
    except ValueError as error:
        raise InvalidRequest(f"{what}: expected a flat sequence of token ids, got a ragged one ({error})") from None
    if array.size == 0:
        return np.zeros(0, dtype=np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(
            f"{what}: expected a flat sequence of token ids (integers), got {array.dtype} of shape {array.shape}"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > np.iinfo(np.int32).max:
        raise InvalidRequest(f"{what}: token id {low if low < 0 else high} is not a valid token id")
    return np.ascontiguousarray(array, dtype=np.int32)


def _check_fits_int64(array: npt.NDArray[Any]) -> None:
    """Raise where int64 would change a value: fractions, NaN, infinity, 2**63 and above."""
    if array.dtype.kind == "f":
        whole = np.isfinite(array) & (array == np.trunc(array)) & (np.abs(array) < 2.0**63)
        if not whole.all():
            first = array[~whole].flat[0]
            raise InvalidRequest(f"TensorData: dtype int64 cannot hold {first}: expected whole numbers")
    elif array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise InvalidRequest(f"TensorData: dtype int64 cannot hold {int(array.max())}")


class TensorData:
    """A dense int64 or float32 array that travels between client and service.

    Args:
        data: A list, numpy array or torch tensor; any shape.
        dtype: ``"int64"`` or ``"float32"``; default: int64 for integers and booleans, else float32.
        shape: Optional shape for flat ``data`` (as Tinker's ``TensorData`` has it).

    Raises:
        InvalidRequest: ragged or non-numeric data, or integers that int64 would change.
    """

    __slots__ = ("data",)
    data: npt.NDArray[Any]

    def __init__(self, data: Any, dtype: DType | None = None, shape: Sequence[int] | None = None) -> None:
        try:
            array = as_array(data)
        except ValueError as error:
            raise InvalidRequest(f"TensorData: not a rectangular array: {error}") from None
        if array.dtype.kind not in "biuf":
            if array.size:
                raise InvalidRequest(f"TensorData: expected numbers, got {array.dtype}")
            array = array.astype(np.float32)
        if dtype is None:
            dtype = "float32" if array.dtype.kind == "f" else "int64"
        if dtype not in ("int64", "float32"):
            raise InvalidRequest(f"TensorData: dtype must be 'int64' or 'float32', got {dtype!r}")
        if dtype == "int64":
            _check_fits_int64(array)
        array = np.asarray(array, dtype=np.dtype(dtype), order="C")
        if shape is not None:
            if int(np.prod(tuple(shape))) != array.size:
                raise InvalidRequest(f"TensorData: {array.size} values do not fill shape {tuple(shape)}")
            array = array.reshape(tuple(shape))
        self.data = array

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any]) -> TensorData:
        return cls(array)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        return cls(tensor)

    @property
    def dtype(self) -> DType:
        return "int64" if self.data.dtype.kind == "i" else "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def to_numpy(self) -> npt.NDArray[Any]:
        """The array itself, read-only where it came over the wire."""
        return self.data

    def to_torch(self) -> torch.Tensor:
        import torch

        return torch.tensor(self.data)

    def tolist(self) -> list[Any]:
        return self.data.tolist()

    def __len__(self) -> int:
        return len(self.data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.data, dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorData) and bool(
            self.data.dtype == other.data.dtype and np.array_equal(self.data, other.data, equal_nan=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        flat = self.data.reshape(-1)
        head = ", ".join(f"{value:.4g}" for value in flat[:4].tolist())
        return f"TensorData({self.dtype}{list(self.shape)}: {head}{', ...' if flat.size > 4 else ''})"


@dataclass(frozen=True, slots=True)
class EncodedTextChunk:
    """A run of token ids (the one kind of chunk: this service is text only)."""

    tokens: Sequence[int]
    type: ClassVar[str] = "encoded_text"


class ModelInput:
    """A sequence of token ids.

    Args:
        chunks: Runs of tokens, concatenated; or use `from_ints`.
    """

    __slots__ = ("tokens",)
    tokens: npt.NDArray[np.int32]

    def __init__(self, chunks: Iterable[EncodedTextChunk] = ()) -> None:
        parts = [as_tokens(chunk.tokens, "ModelInput") for chunk in chunks]
        self.tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    @classmethod
    def from_ints(cls, tokens: TokensLike) -> ModelInput:
        """From a list, numpy array or torch tensor of token ids."""
        made = cls.__new__(cls)
        made.tokens = as_tokens(tokens, "ModelInput")
        return made

    @classmethod
    def empty(cls) -> ModelInput:
        return cls()

    def to_ints(self) -> list[int]:
        return self.tokens.tolist()

    @property
    def chunks(self) -> list[EncodedTextChunk]:
        return [EncodedTextChunk(self.to_ints())] if self.length else []

    @property
    def length(self) -> int:
        return int(self.tokens.size)

    def append(self, chunk: EncodedTextChunk) -> ModelInput:
        """A new input with the chunk's tokens added at its end."""
        return ModelInput.from_ints(np.concatenate([self.tokens, as_tokens(chunk.tokens)]))

    def append_int(self, token: int) -> ModelInput:
        return self.append(EncodedTextChunk([token]))

    def __len__(self) -> int:
        return self.length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelInput) and np.array_equal(self.tokens, other.tokens)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        head = ", ".join(map(str, self.tokens[:6].tolist()))
        return f"ModelInput({self.length} tokens: {head}{', ...' if self.length > 6 else ''})"


class Datum:
    """One training sequence: its input tokens and, per position, what the loss needs.

    Position ``i`` of ``model_input`` predicts ``target_tokens[i]``; every per-token loss input
    therefore has exactly ``len(model_input)`` entries along its first axis.

    Args:
        model_input: Token ids (N,).
        loss_fn_inputs: Arrays by name: ``target_tokens`` int64 (N,) or (N, K), and float32
            ``weights`` (N,) or (N, K), ``logprobs``, ``advantages``, ``sequence_ratio_mask`` (N,).
            Scalars per datum: ``temperature``. Lists, numpy arrays and torch tensors are taken.

    Raises:
        InvalidDatum: an input is not numeric or is ragged; names the key.
    """

    __slots__ = ("loss_fn_inputs", "model_input")
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]

    def __init__(self, model_input: TokensLike, loss_fn_inputs: Mapping[str, TensorLike | float]) -> None:
        self.model_input = model_input if isinstance(model_input, ModelInput) else ModelInput.from_ints(model_input)
        self.loss_fn_inputs = {}
        for key, value in loss_fn_inputs.items():
            dtype: DType = "int64" if key in INT_INPUTS else "float32"
            try:
                self.loss_fn_inputs[key] = TensorData(value, dtype=dtype)
            except InvalidRequest as error:
                raise InvalidDatum(f"loss_fn_inputs[{key!r}]: {error.message}", details={"key": key}) from None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Datum)
            and self.model_input == other.model_input
            and self.loss_fn_inputs == other.loss_fn_inputs
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Datum({self.model_input.length} tokens, {', '.join(self.loss_fn_inputs) or 'no inputs'})"
