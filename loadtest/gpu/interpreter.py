"""Corrects the interpreter of the Triton language, which runs kernels without a GPU.

Compiled kernels do not need these corrections.
"""

from typing import Any


def correct_interpreter() -> None:
    """Correct the interpreter of the installed version of the Triton language.

    Call this function after the package triton was imported with TRITON_INTERPRET=1.
    """
    from triton import language
    from triton.runtime import interpreter

    _multiply_bfloat16(interpreter, language)
    _read_scalars(interpreter)


def _multiply_bfloat16(interpreter: Any, language: Any) -> None:  # noqa: ANN401 - modules
    """Correct matrix products of bfloat16 numbers.

    The interpreter stores bfloat16 numbers as integers, and would multiply these integers.
    """
    builder = interpreter.InterpreterBuilder
    plain = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:  # noqa: ANN401 - as triton's
        wide = [
            self.cast_impl(x, language.float32) if x.dtype == language.bfloat16 else x
            for x in (a, b)
        ]
        return plain(self, *wide, *rest)

    builder.create_dot = create_dot


def _read_scalars(interpreter: Any) -> None:  # noqa: ANN401 - a module
    """Let kernels convert scalars to Python numbers with numpy 2.4 and later.

    The interpreter of Triton 3.6 stores a scalar as an array of one element. From numpy 2.4 on,
    such an array cannot be converted to an integer or a boolean if it has a dimension.
    """
    plain = interpreter._patch_lang_tensor

    def patch(tensor: Any, *rest: Any) -> Any:  # noqa: ANN401 - as triton's
        result = plain(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.item())
        # The interpreter treats tensors with several elements as true.
        tensor.__bool__ = lambda self: self.handle.data.size != 1 or bool(self.handle.data.item())
        return result

    interpreter._patch_lang_tensor = patch
