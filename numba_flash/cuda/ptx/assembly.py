"""How an instruction becomes a function of a kernel.

A Numba intrinsic is a function that writes LLVM code for its call; here that code is one block of inline PTX, in which
``$0, $1, ...`` are the result and the arguments, as the constraints say: "r" a 32-bit register, "l" one of 64 bits, "f"
a float, "d" a double.

A kernel of float64 inputs computes in float64, all others in float32. What is written once for both takes its type from
its arguments: ``type(x)(0)`` is a zero like x, and an `instruction` may have a text for each.
"""

import inspect

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature as numba_signature

float32, float64, int32, int64, uint32, uint64 = (types.float32, types.float64, types.int32, types.int64, types.uint32,
                                                  types.uint64)
REALS = float32, float64
CONSTRAINTS = {float32: "f", float64: "d", int32: "r", uint32: "r", uint64: "l"}
LLVM_TYPES = {float32: ir.FloatType(), float64: ir.DoubleType(), int32: ir.IntType(32), uint32: ir.IntType(32),
              uint64: ir.IntType(64)}


def registers(type_, n):
    """Numba's type of n registers: a tuple, whose elements never need an address and so never leave registers."""
    return types.UniTuple(type_, n)


def emit(builder, text, returns, returns_constraints, args, constraints, pure=False):
    """Write one block of inline PTX.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
    text : str
        PTX; operands are numbered results first.
    returns : llvmlite type
    returns_constraints, constraints : list of str
        Of the results and of the arguments.
    args : list of llvmlite values
    pure : bool
        Whether the result depends on nothing but the arguments and nothing else happens: the compiler may then move,
        merge or drop the block. All other blocks stay in order, and all accesses to memory stay on their side of it.
    """
    clobbers = [] if pure else ["~{memory}"]
    function = ir.FunctionType(returns, [arg.type for arg in args])
    assembly = ir.InlineAsm(function, text, ",".join([*returns_constraints, *constraints, *clobbers]),
                            side_effect=not pure)
    return builder.call(assembly, args)


def unpack(builder, aggregate, n):
    """The n elements of a tuple (or of what `emit` returned)."""
    return [builder.extract_value(aggregate, index) for index in range(n)]


def pack(builder, values):
    """A tuple of values of one type."""
    aggregate = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for index, value in enumerate(values):
        aggregate = builder.insert_value(aggregate, value, index)
    return aggregate


def with_arity(codegen, parameters):
    """Make an intrinsic of ``codegen(typing_context, *args)`` that Numba takes for a function of these parameters."""
    names = "typing_context", *parameters
    codegen.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                                               for name in names])
    return intrinsic(codegen)


def instruction(text, returns, *arg_types, pure=False, in_float64=None):
    """Turn a function without a body into the instruction that its docstring describes.

    Parameters
    ----------
    text : str
        PTX. ``$0`` is the result if there is one, else the first argument.
    returns : numba type or None
    *arg_types : numba types
        Arguments are converted to these.
    pure : bool
        See `emit`.
    in_float64 : str, optional
        PTX for when an argument is a float64: then what is float32 above is, too.
    """
    def decorate(function):
        def typed(typing_context, *args):
            wide = in_float64 is not None and float64 in args
            its_text, its_returns, *its_types = (
                (in_float64, *(float64 if type_ == float32 else type_ for type_ in (returns, *arg_types)))
                if wide else (text, returns, *arg_types))

            def codegen(context, builder, signature, values):
                constraints = [CONSTRAINTS[type_] for type_ in its_types]
                if returns is None:
                    emit(builder, its_text, ir.VoidType(), [], values, constraints)
                    return context.get_dummy_value()
                return emit(builder, its_text, LLVM_TYPES[its_returns], ["=" + CONSTRAINTS[its_returns]], values,
                            constraints, pure)

            return numba_signature(its_returns or types.void, *its_types), codegen

        typed.__name__, typed.__doc__ = function.__name__, function.__doc__
        return with_arity(typed, inspect.signature(function).parameters)

    return decorate
