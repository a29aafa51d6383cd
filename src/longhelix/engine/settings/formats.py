"""The number formats of an engine, as its options and its checkpoint choose them."""

from longhelix.compute.machine.devices import multiplies_integers
from longhelix.engine.options import EngineOptions
from longhelix.engine.places import Places
from longhelix.errors import UserError
from longhelix.spec import DTYPES, WEIGHT_DTYPES, ModelSpec
from longhelix.spec.quantised_modules import Quantisation
from longhelix.values import one_of

_FLOAT8_CAPABILITY = (8, 9)  # the first compute capability of GPUs that multiply and convert FP8


def base_dtypes(spec: ModelSpec, options: EngineOptions) -> tuple[str, str, str]:
    """Return the dtypes of activations, of weights that the checkpoint does not pack, and of KV."""
    dtype = options.dtype or one_of("dtype", spec.checkpoint.dtype, DTYPES)
    quantised = [name for name in WEIGHT_DTYPES if name not in DTYPES]
    if spec.checkpoint.quantisation is not None:
        if options.weight_dtype in quantised:
            raise UserError(
                f"the checkpoint's weights are already quantised ({spec.checkpoint.quantisation.formats}): leave "
                "out weight_dtype"
            )
        quantised = []
    in_bytes = options.activation_dtype == "int8" and bool(quantised)
    default = "int8" if in_bytes else dtype
    weight_dtype = one_of("weight_dtype", options.weight_dtype or default, (dtype, *quantised))
    if in_bytes and weight_dtype != "int8":
        raise UserError(
            f"activation_dtype int8 needs int8 weights, but weight_dtype is {weight_dtype}: leave one of them out"
        )
    return dtype, weight_dtype, options.kv_dtype or dtype


def rounding_inputs(spec: ModelSpec, dtype: str, stored: Quantisation | None) -> ModelSpec:
    """Return the spec of a model whose products round their inputs to `dtype`, as weights of the checkpoint are.

    stored: How the checkpoint is quantised. The spec of a GGUF file may have its weights expanded.
    """
    quantisation = spec.checkpoint.quantisation
    if quantisation is None and dtype == "int8":
        return spec  # weights are quantised while they load
    if stored is None:
        raise UserError(
            f"activation_dtype {dtype} needs a checkpoint with {dtype} weights, but this one is not quantised: leave "
            "out activation_dtype"
        )
    rounding = None if quantisation is None else quantisation.rounding_inputs(dtype)
    if rounding is None:
        raise UserError(
            f"activation_dtype {dtype} needs {dtype} weights, but those of the checkpoint are quantised otherwise "
            f"({stored.formats}): leave out activation_dtype"
        )
    return spec.quantised_by(rounding)


def attention_dtype(options: EngineOptions, kv_dtype: str, device: str) -> str | None:
    """Return the dtype to which attention rounds its inputs. None: it does not round them. Raises UserError."""
    if options.attention_dtype is None:
        return None
    if kv_dtype not in ("int8", "int4"):
        raise UserError(
            f"attention_dtype int8 needs a quantised KV cache, but kv_dtype is {kv_dtype}: set kv_dtype to int8 or "
            "int4, or leave attention_dtype out"
        )
    if device != "cpu" or not multiplies_integers():
        raise UserError(
            "attention_dtype int8 needs the native kernels on a CPU with AVX-512 VNNI, VBMI and BF16, which this "
            "machine does not have: leave attention_dtype out"
        )
    return options.attention_dtype


def check_float8(options: EngineOptions, kv_dtype: str, device: str, places: Places) -> None:
    """Reject arithmetic in FP8, and FP8 that only hardware converts, on devices without it."""
    if options.activation_dtype == "fp8" and device == "cpu":
        raise UserError(
            "activation_dtype fp8 runs only on GPUs, but the device is cpu: set device to cuda, or leave "
            "activation_dtype out"
        )
    setting = "activation_dtype" if options.activation_dtype == "fp8" else "kv_dtype" if kv_dtype == "fp8" else None
    least = places.least_capability
    if device == "cpu" or setting is None or least is None or least >= _FLOAT8_CAPABILITY:
        return
    needed, found = (".".join(map(str, each)) for each in (_FLOAT8_CAPABILITY, least))
    raise UserError(
        f"{setting} fp8 needs GPUs of compute capability {needed} or later, but a rank has one of {found}: leave "
        f"{setting} out"
    )
