"""Triton's interpreter as the tests need it: what a GPU computes, in less time."""

from types import SimpleNamespace

import numpy as np
import torch


def as_a_gpu() -> None:
    """Of inline PTX the interpreter knows nothing: what kernels need is here, beside what recordings correct too."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from fused_softmax.core.kernels import exchange, state
    from fused_softmax.trace.recorder.as_a_gpu import CORRECTIONS
    from fused_softmax.trace.recorder.shortcuts import SHORTCUTS

    def inline_asm(self, asm, constraints, values, types, is_pure, pack):
        results = {
            state.HALVES.value: lambda a: TensorHandle((a.data.astype(np.uint32) << 16).view(np.float32), tl.float32),
            "mov.b32 $0, $1;": lambda a: a,
            "mov.b64 $0, $1;": lambda a: a,
            exchange.IN_ANY_WARP.value: lambda a: a,  # of one
        }
        return SimpleNamespace(get_result=lambda _: results[asm](*values))

    for holder, name, wrap in (*CORRECTIONS, *SHORTCUTS):
        setattr(holder, name, wrap(holder.__dict__[name]))
    InterpreterBuilder.create_inline_asm = inline_asm
    _patch_the_language_once()


def check_launches() -> None:
    """A launch of tensors that are not as those it was prepared for raises, as a GPU would read them wrong."""
    from fused_softmax.core import launch

    prepare, run = launch.prepare, launch.Loaded._public

    def kind_of(tensor):
        tensor = getattr(tensor, "base", tensor)  # of Triton's descriptors
        bytes_alone = tensor.dtype in launch._BYTES or tensor.dtype in (torch.int8, torch.uint8)
        return "bytes" if bytes_alone else tensor.dtype, tensor.data_ptr() % 16 == 0

    def prepared(kernel, grid, tensors, *others, **options):
        made = prepare(kernel, grid, tensors, *others, **options)
        grid, given, *rest = made.__call__.args[0]
        if not any(isinstance(each, tuple) for each in given):  # or a launch within this one has them already
            made._given = tuple(each is not None and kind_of(each) for each in tensors)
            made.__call__ = made._loaded.bind(grid, made._given, *rest)
        return made

    def checked(self, how, *arguments):
        kinds = [each for each in how[1] if each] if any(isinstance(each, tuple) for each in how[1]) else []
        for i, (kind, tensor) in enumerate(zip(kinds, arguments, strict=False)):
            (dtype, aligned), (now, is_aligned) = kind, kind_of(tensor)
            assert now == dtype, f"{self.kernel.__name__}: tensor {i} is of {now}, and was of {dtype}"
            alone = getattr(tensor, "base", tensor).numel() == 1  # which no load of several reads
            assert is_aligned or not aligned or alone, (
                f"{self.kernel.__name__}: tensor {i} no longer begins on 16 bytes"
            )
        return run(self, how, *arguments)

    launch.prepare, launch.Loaded._public = prepared, checked


def _patch_the_language_once() -> None:
    """Triton does and undoes it at every call of a function in a kernel: more than half of the interpreter's time."""
    from triton.runtime import interpreter

    patched = set()
    patch = interpreter._patch_lang

    def patch_once(fn):
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            patch(fn)
        return interpreter._LangPatchScope()  # with nothing to restore

    def call(self, *args, **kwargs):
        patch_once(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.InterpretedFunction.__call__ = call
