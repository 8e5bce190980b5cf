"""How an instruction becomes a function of a kernel.

A Numba intrinsic is a function that writes LLVM code for its call; here that code is one block of inline PTX, in which
``$0, $1, ...`` are the result and the arguments, as the constraints say: "r" a 32-bit register, "l" one of 64 bits, "f"
a float.
"""

import inspect

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature as numba_signature

float32, int32, int64, uint32, uint64 = types.float32, types.int32, types.int64, types.uint32, types.uint64
CONSTRAINTS = {float32: "f", int32: "r", uint32: "r", uint64: "l"}
LLVM_TYPES = {float32: ir.FloatType(), int32: ir.IntType(32), uint32: ir.IntType(32), uint64: ir.IntType(64)}


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


def instruction(text, returns, *arg_types, pure=False):
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
    """
    def decorate(function):
        def typed(typing_context, *args):
            def codegen(context, builder, signature, values):
                constraints = [CONSTRAINTS[type_] for type_ in arg_types]
                if returns is None:
                    emit(builder, text, ir.VoidType(), [], values, constraints)
                    return context.get_dummy_value()
                return emit(builder, text, LLVM_TYPES[returns], ["=" + CONSTRAINTS[returns]], values, constraints, pure)

            return numba_signature(returns or types.void, *arg_types), codegen

        typed.__name__, typed.__doc__ = function.__name__, function.__doc__
        return with_arity(typed, inspect.signature(function).parameters)

    return decorate
